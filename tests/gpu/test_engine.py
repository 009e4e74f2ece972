"""The whole engine on the GPU, against transformers + PEFT on the same GPU.

Base and adapters of several ranks and shapes, prompts and outputs of many lengths, all at once: prefills,
mixed steps, and decodes of ever smaller batches.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaplane_server.config import EngineConfig
from deltaplane_server.execution.kv_cache import kv_page_bytes
from deltaplane_server.models.config import load_decoder_config
from e2e_reference import Continuation, Reference
from in_process import Answer, Ask, InProcess, in_process
from peft_factory import ADAPTERS, FAMILIES, byte_tokenizer, make_adapter, make_tiny_model

DEVICE = "cuda"
VOCAB = len(byte_tokenizer())
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 64, 150, 300)
TOLERANCE = 1e-3

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "mistral": {"sliding_window": 40, "head_dim": 128, "num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64, "num_key_value_heads": 4},
}


@dataclass
class Case:
    """A family's model and its adapters."""

    family: str
    model: Path
    adapters: Mapping[str, Path]

    @cached_property
    def expected(self) -> list[Continuation]:
        """What transformers + PEFT answer to asks(), in float32."""
        reference = Reference(self.model, self.adapters, device=DEVICE)
        return [reference.greedy(ask.prompt, ask.adapter, ask.num_tokens) for ask in self.asks()]

    def config(self, **options: Any) -> EngineConfig:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_num_batched_tokens": 128,
            "max_num_seqs": 48,
            "max_lora_rank": 17,
            "kv_cache_bytes": 64 << 20,
        }
        return EngineConfig(str(self.model), self.family, device=DEVICE, **{**defaults, **options})

    def asks(self) -> list[Ask]:
        """Each length of prompt with the base and each adapter, in a random order, with random lengths of
        output; every other one asks for log-probabilities."""
        rng = random.Random(self.family)
        made = [
            Ask(
                adapter,
                [rng.randrange(256) for _ in range(length)],
                num_tokens=rng.randrange(1, 30),
                top=rng.choice((None, VOCAB)),
            )
            for length in PROMPT_LENGTHS
            for adapter in ("", *self.adapters)
        ]
        rng.shuffle(made)
        return made


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(folder, request.param, **VARIANTS[request.param])
    return Case(request.param, model, make_adapters(model, folder))


def make_adapters(model: Path, folder: Path) -> dict[str, Path]:
    return {
        name: make_adapter(model, folder / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def logprobs(answer: Answer) -> torch.Tensor:
    """[tokens, vocabulary]."""
    rows = torch.empty(len(answer.logprobs), VOCAB)
    for row, token in zip(rows, answer.logprobs, strict=True):
        ids, values = zip(*token.top, strict=True)
        row[list(ids)] = torch.tensor(values)
    return rows


def check_equal(case: Case, engine: InProcess, chosen: Sequence[int]) -> None:
    """Puts some of case.asks() at once, by their numbers, and checks the answers."""
    asks, expected = case.asks(), case.expected
    answers = engine.ask_all([asks[number] for number in chosen])
    for number, answer in zip(chosen, answers, strict=True):
        ask = asks[number]
        what = f"{ask.adapter or 'base'}, prompt of {len(ask.prompt)}, {ask.num_tokens} tokens"
        assert answer.tokens == expected[number].tokens, what
        if ask.top is not None:
            error = (logprobs(answer) - expected[number].logprobs).abs().max().item()
            assert error < TOLERANCE, f"{what}: log-probabilities are off by {error}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_chunked_prefill": False},
        {"enable_prefix_caching": True},
        {"max_loras": 2},
        {"page_size": 32, "max_num_seqs": 7},
        {"max_num_batched_tokens": 1000, "max_num_seqs": 300},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_float32_equals_transformers_and_peft_token_for_token(case: Case, options: dict[str, Any]) -> None:
    """All at once, only the base's, one alone, and all again: the same graphs meet ever other mixes."""
    asks = case.asks()
    everything = range(len(asks))
    of_the_base = [number for number in everything if not asks[number].adapter]
    with in_process(case.config(**options), case.model, case.adapters) as engine:
        for chosen in (everything, of_the_base, [0], everything):
            check_equal(case, engine, chosen)


def test_sequences_that_are_preempted_go_on_as_they_would_have(case: Case) -> None:
    """All at once, with pages for three of the longest."""
    model, size = load_decoder_config(case.model, None), 16
    pages = 3 * -(-(max(PROMPT_LENGTHS) + 30) // size)
    kv_cache_bytes = pages * kv_page_bytes(model, size, torch.float32)
    with in_process(case.config(kv_cache_bytes=kv_cache_bytes), case.model, case.adapters) as engine:
        check_equal(case, engine, range(len(case.asks())))


def test_float32_without_lora_equals_transformers(case: Case) -> None:
    chosen = [number for number, ask in enumerate(case.asks()) if not ask.adapter]
    with in_process(case.config(enable_lora=False), case.model, {}) as engine:
        check_equal(case, engine, chosen)


def test_drawn_output_does_not_depend_on_the_batch(case: Case) -> None:
    """Also not on whether the rest of the batch is greedy."""
    drawn = [Ask(name, [3, 1, 4, 1, 5], 30, temperature=1.0, seed=7) for name in ("", *case.adapters)]
    with in_process(case.config(), case.model, case.adapters) as engine:
        alone = [engine.ask_all([ask])[0].tokens for ask in drawn]
        crowded = engine.ask_all([*drawn, *case.asks()])[: len(drawn)]
    assert [answer.tokens for answer in crowded] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_the_same_step_gives_the_same_bits(case: Case) -> None:
    asks = [Ask(name, [3, 1, 4, 1, 5] * 20, 20, top=VOCAB) for name in ("", *case.adapters)]
    with in_process(case.config(dtype="bfloat16"), case.model, case.adapters) as engine:
        first, second = ([engine.ask_all([ask])[0] for ask in asks] for _ in range(2))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in second]
    assert [answer.logprobs for answer in first] == [answer.logprobs for answer in second]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model that is large enough for its rounding errors to have a distribution, and adapters whose files
    and scales bfloat16 holds exactly."""
    folder = tmp_path_factory.mktemp("wide")
    model = make_tiny_model(
        folder,
        "llama",
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.04,
    )
    adapters = {
        f"rank-{rank}": make_adapter(
            model, folder / f"rank-{rank}", rank=rank, alpha=2 * rank, seed=rank, dtype=torch.bfloat16
        )
        for rank in (8, 16)
    }
    return Case("llama", model, adapters)


def test_bfloat16_is_no_further_from_float32_than_transformers(wide: Case) -> None:
    """The error of first tokens' log-probabilities, relative to their spread over the vocabulary."""
    rng = random.Random(1)
    asks = [
        Ask(adapter, [rng.randrange(256) for _ in range(rng.randrange(1, 200))], 1, top=VOCAB)
        for adapter in ("", *wide.adapters)
        for _ in range(40)
    ]
    with in_process(wide.config(dtype="bfloat16"), wide.model, wide.adapters) as engine:
        ours = torch.cat([logprobs(answer) for answer in engine.ask_all(asks)])
    exact, theirs = (first_logprobs(asks, wide, dtype) for dtype in (torch.float32, torch.bfloat16))
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    our_error, their_error = ((rows - exact).norm() / spread for rows in (ours, theirs))
    assert our_error <= 1.05 * their_error
    assert our_error < 0.05


def test_a_prompt_gives_the_same_bits_in_a_graph_and_kernel_by_kernel(wide: Case) -> None:
    """Prompts that fill a graph's rows, more than few_rows_cuda.py takes: products of the same kernels."""
    rng = random.Random(2)
    asks = [
        Ask(adapter, [rng.randrange(256) for _ in range(length)], 1, top=VOCAB)
        for adapter in ("", *wide.adapters)
        for length in (128, 256)
    ]
    answers = []
    for enforce_eager in (False, True):
        config = wide.config(dtype="bfloat16", enforce_eager=enforce_eager)
        with in_process(config, wide.model, wide.adapters) as engine:
            answers.append([engine.ask_all([ask])[0].logprobs for ask in asks])
    assert answers[0] == answers[1]


def first_logprobs(asks: Sequence[Ask], case: Case, dtype: torch.dtype) -> torch.Tensor:
    """[asks, vocabulary], by transformers + PEFT."""
    reference = Reference(case.model, case.adapters, dtype=dtype, device=DEVICE)
    return torch.cat([reference.greedy(ask.prompt, ask.adapter, 1).logprobs for ask in asks])
