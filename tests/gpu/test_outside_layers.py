"""What adapters have outside the linears of the layers, on the GPU: tokens and logits equal PEFT's.

In float32; each adapter in the same steps, and in the same CUDA graphs, as the base, a plain adapter and all
the others.
"""

from pathlib import Path
from typing import Any

import pytest

from in_process import in_process
from outside_cases import Case

TOLERANCE = 1e-3

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("llama-tied", {}),
        ("qwen3-untied", {"max_loras": 2, "adapter_pages": 6}),
        ("qwen3-untied", {"enforce_eager": True}),
    ],
    ids=str,
)
def test_mixed_streams_equal_transformers_and_peft(
    tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    """All at once, only some, and all again: the same graphs meet ever other mixes."""
    case = Case.make(variant, tmp_path, "cuda", head_dim=64)
    asks = case.asks()
    plain = [ask for ask in asks if ask.adapter in ("", "plain")]
    with in_process(case.config(max_num_seqs=24, **options), case.model, case.adapters) as engine:
        answers = [(chosen, engine.ask_all(chosen)) for chosen in (asks, plain, asks)]
    for chosen, answered in answers:
        case.check_equal(chosen, answered, TOLERANCE)


def test_the_same_step_gives_the_same_bits(tmp_path: Path) -> None:
    case = Case.make("llama-tied", tmp_path, "cuda", head_dim=64)
    asks = case.asks()
    config = case.config(dtype="bfloat16", max_num_seqs=8)
    with in_process(config, case.model, case.adapters) as engine:
        first, second = ([engine.ask_all([ask])[0] for ask in asks] for _ in range(2))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in second]
    assert [answer.logprobs for answer in first] == [answer.logprobs for answer in second]
