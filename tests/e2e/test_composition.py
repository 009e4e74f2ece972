"""Through a real server: adapters that are added up equal PEFT's concatenation of them, in float32."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from deltaplane import Client
from deltaplane.errors import FailedPreconditionError
from e2e_reference import Continuation, Reference
from e2e_streams import Answer, Ask, ask_all
from peft_factory import ADAPTERS, COMPOSITIONS, make_adapter, make_tiny_model
from serving import served

DORA = "rank-15-dora"
PLAIN = tuple(name for name in ADAPTERS if name != DORA)

NUM_TOKENS = 20
TOP = 5
TOLERANCE = 2e-4
FLAGS = ("--max-lora-rank", "17", "--max-num-seqs", "32")


@dataclass(eq=False)
class Case:
    """A model, its adapters and the oracle over both. names: those that the compositions have there."""

    model: Path
    adapters: Mapping[str, Path]
    reference: Reference
    names: Sequence[str]

    def expected(self, ask: Ask) -> Continuation:
        name = self.names[COMPOSITIONS.index(ask.weights)] if ask.weights else ask.adapter
        return self._continuation(name, tuple(ask.prompt), ask.num_tokens)

    @cache  # noqa: B019  # there is one case
    def _continuation(self, name: str, prompt: tuple[int, ...], num_tokens: int) -> Continuation:
        return self.reference.greedy(prompt, name, num_tokens)

    def check(self, ask: Ask, answer: Answer) -> None:
        expected, what = self.expected(ask), f"{ask.weights or ask.adapter}, prompt of {len(ask.prompt)}"
        assert answer.tokens == expected.tokens, what
        for place, found in enumerate(answer.logprobs):
            ids = torch.tensor(list(found))
            difference = expected.logprobs[place, ids] - torch.tensor(list(found.values()))
            assert difference.abs().max() < TOLERANCE, f"{what}, token {place}"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("composition")
    model = make_tiny_model(folder, "llama")
    adapters = {
        name: make_adapter(model, folder / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    reference = Reference(model, adapters)
    return Case(model, adapters, reference, [reference.compose(weights) for weights in COMPOSITIONS])


def asks(lengths: tuple[int, ...], *, max_members: int = 4, num_tokens: int = NUM_TOKENS) -> list[Ask]:
    """Each length of prompt with the base, each adapter and each composition, in a random order: every step
    is a mix. All prompts of one length are alike."""
    rng = random.Random(1)
    made = []
    for length in lengths:
        prompt = [rng.randrange(256) for _ in range(length)]
        made += [Ask(name, prompt, num_tokens, TOP) for name in ("", *PLAIN)]
        made += [
            Ask("", prompt, num_tokens, TOP, weights)
            for weights in COMPOSITIONS
            if len(weights) <= max_members
        ]
    rng.shuffle(made)
    return made


def test_compositions_differ_from_their_adapters_and_from_each_other(case: Case) -> None:
    found = {tuple(case.expected(ask).tokens) for ask in asks((16,))}
    assert len(found) == 1 + len(PLAIN) + len(COMPOSITIONS)


async def test_mixed_streams_equal_peft(case: Case, tmp_path: Path) -> None:
    """Twice, so that the second time finds the first one's prompts in the prefix cache, and nobody else's."""
    everything = asks((1, 15, 16, 64, 150))
    flags = (*FLAGS, "--enable-prefix-caching", "--max-num-batched-tokens", "48")
    with served(case.model, tmp_path, *flags, adapters=case.adapters) as server:
        for time in range(2):
            answers = await ask_all(server.address, everything)
            for ask, answer in zip(everything, answers, strict=True):
                case.check(ask, answer)
                assert [use.adapter for use in answer.usage.adapters] == sorted(
                    ask.weights or filter(None, [ask.adapter])
                )
                assert bool(answer.usage.cached_tokens) == (time == 1 and len(ask.prompt) > 16)


async def test_evicted_and_preempted_streams_equal_peft(case: Case, tmp_path: Path) -> None:
    """Two slots for four adapters; and KV pages for about a third of the sequences that run."""
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, KV heads, tokens, head size, float32
    everything = asks((60, 100), max_members=2, num_tokens=50) * 2
    flags = ("--max-loras", "2", "--max-model-len", "200", "--kv-cache-memory", str(40 * page_bytes))
    with served(case.model, tmp_path, *FLAGS, *flags, adapters=case.adapters) as server:
        answers = await ask_all(server.address, everything)
        assert server.metric("deltaplane_preemptions_total") > 0
        assert server.metric("deltaplane_adapter_evictions_total") > 1
    for ask, answer in zip(everything, answers, strict=True):
        case.check(ask, answer)


def test_clients_compose(case: Case, tmp_path: Path) -> None:
    prompt = list(b"The quick brown fox")
    weights = COMPOSITIONS[0]
    expected = case.expected(Ask("", prompt, NUM_TOKENS, weights=weights)).tokens
    alone = case.expected(Ask(PLAIN[0], prompt, NUM_TOKENS)).tokens
    with (
        served(case.model, tmp_path, *FLAGS, adapters=case.adapters) as server,
        Client(server.address, server.admin_address) as client,
    ):
        done = client.complete(
            prompt, adapters=weights, n=2, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        assert [done.outputs[index].token_ids for index in range(2)] == [expected] * 2
        done = client.complete(
            prompt, adapters=PLAIN[:1], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        assert done.outputs[0].token_ids == alone
        with pytest.raises(FailedPreconditionError, match=rf"{DORA}@1 has dora"):
            client.complete(prompt, adapters={PLAIN[0]: 0.5, DORA: 0.5})
