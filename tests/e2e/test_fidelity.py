"""Through a real server: tokens and log-probabilities equal transformers + PEFT in float32.

Tiny random models of all families; base and adapters of several ranks and shapes in the same steps.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from e2e_reference import Reference
from e2e_streams import Answer, Ask, ask_all
from peft_factory import ADAPTERS, FAMILIES, make_adapter, make_tiny_model
from serving import Served, served

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 64, 150, 300)
NUM_TOKENS = 20
TOP = 5
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    """A family's model, its adapters and the oracle over both."""

    family: str
    model: Path
    adapters: Mapping[str, Path]
    reference: Reference


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(f"fidelity-{request.param}")
    window = {"sliding_window": 40} if request.param == "mistral" else {}
    model = make_tiny_model(folder, request.param, **window)
    adapters = {
        name: make_adapter(model, folder / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    return Case(request.param, model, adapters, Reference(model, adapters))


FLAGS = {
    "chunked": ("--max-num-batched-tokens", "48", "--max-num-seqs", "48"),
    "whole prompts": ("--no-enable-chunked-prefill",),
    "prefix cache": ("--enable-prefix-caching",),
}


@pytest.fixture(params=FLAGS)
def server(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with served(
        case.model, tmp_path, "--max-lora-rank", "17", *FLAGS[request.param], adapters=case.adapters
    ) as server:
        yield server


def asks(case: Case) -> list[Ask]:
    """Each prompt length with the base and each adapter, in a random order: every step is a mix."""
    rng = random.Random(case.family)
    made = [
        Ask(adapter, [rng.randrange(256) for _ in range(length)], NUM_TOKENS, TOP)
        for length in PROMPT_LENGTHS
        for adapter in ("", *case.adapters)
    ]
    rng.shuffle(made)
    return made


def check(case: Case, ask: Ask, answer: Answer) -> None:
    assert not isinstance(ask.prompt, str)
    expected = case.reference.greedy(ask.prompt, ask.adapter, ask.num_tokens)
    what = f"{ask.adapter or 'base'}, prompt of {len(ask.prompt)}"
    assert answer.tokens == expected.tokens, what
    assert len(answer.logprobs) == ask.num_tokens
    for place, found in enumerate(answer.logprobs):
        assert len(found) >= TOP
        ids = torch.tensor(list(found))
        difference = expected.logprobs[place, ids] - torch.tensor(list(found.values()))
        assert difference.abs().max() < TOLERANCE, f"{what}, token {place}"


async def test_mixed_streams_equal_transformers_and_peft(case: Case, server: Served) -> None:
    everything = asks(case)
    for ask, answer in zip(everything, await ask_all(server.address, everything), strict=True):
        check(case, ask, answer)
        assert answer.usage.adapter == ask.adapter
        assert answer.usage.prompt_tokens == len(ask.prompt)


async def test_adapters_differ_from_the_base_and_from_each_other(case: Case) -> None:
    prompt = list(b"The quick brown fox")
    made = {
        name: tuple(case.reference.greedy(prompt, name, NUM_TOKENS).tokens) for name in ("", *case.adapters)
    }
    assert len(set(made.values())) == len(made)


async def test_preempted_streams_go_on_with_the_tokens_they_would_have_had(
    case: Case, tmp_path: Path
) -> None:
    """Eight sequences of 100 + 60 tokens need 80 pages of 16; there are 40."""
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, KV heads, tokens, head size, float32
    rng = random.Random(1)
    everything = [
        Ask(adapter, [rng.randrange(256) for _ in range(100)], 60)
        for adapter in ("", *case.adapters, "", *list(case.adapters)[:2])
    ]
    flags = ("--max-lora-rank", "17", "--max-model-len", "200", "--kv-cache-memory", str(40 * page_bytes))
    with served(case.model, tmp_path, *flags, adapters=case.adapters) as server:
        answers = await ask_all(server.address, everything)
        preemptions = server.metric("deltaplane_preemptions_total")
    assert preemptions > 0
    assert sum(answer.usage.preemptions for answer in answers) == preemptions
    for ask, answer in zip(everything, answers, strict=True):
        expected = case.reference.greedy(ask.prompt, ask.adapter, ask.num_tokens)  # type: ignore[arg-type]
        assert answer.tokens == expected.tokens, ask.adapter
