"""What adapters have outside the linears of the layers: tokens and logits equal transformers + PEFT.

In float32, tiny random models with embeddings that are tied and others; each adapter in the same steps as the
base, a plain adapter and all the others.
"""

import pytest
import torch

from in_process import Ask, in_process
from outside_cases import VARIANTS, VOCAB, Case

TOLERANCE = 2e-4

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(request.param, tmp_path_factory.mktemp(request.param))


def test_mixed_streams_equal_transformers_and_peft(case: Case) -> None:
    asks = case.asks()
    with in_process(case.config(), case.model, case.adapters) as engine:
        answers = engine.ask_all(asks)
    case.check_equal(asks, answers, TOLERANCE)


def test_they_are_evicted_and_loaded_again(case: Case) -> None:
    """Two slots, and pages for few at once: each adapter's pages were others' before."""
    asks = case.asks()
    with in_process(case.config(max_loras=2, adapter_pages=6), case.model, case.adapters) as engine:
        for _ in range(2):
            answers = engine.ask_all(asks)
        evictions = sum(engine.manager.get(name).evictions for name in case.adapters)
    assert evictions > len(case.adapters)
    case.check_equal(asks, answers, TOLERANCE)


def test_adapters_differ_from_the_base_and_from_each_other(case: Case) -> None:
    with in_process(case.config(), case.model, case.adapters) as engine:
        asks = [Ask(name, list(b"The quick brown fox"), 1, top=VOCAB) for name in ("", *case.adapters)]
        tops = [dict(answer.logprobs[0].top) for answer in engine.ask_all(asks)]
    rows = torch.tensor([[top[token] for token in sorted(top)] for top in tops])
    differences = torch.cdist(rows, rows, p=torch.inf).fill_diagonal_(torch.inf)
    assert differences.min() > 100 * TOLERANCE
