"""Sampling on the GPU: the draw against its model, the rest of the sampler against the CPU, and that the host
never waits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.sampling import draw
from deltaplane_server.execution.sampler import Sampler
from deltaplane_server.scheduling.plan import SampledToken
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from sampling_cases import (
    PLAIN,
    TRUNCATED,
    Options,
    check_shares,
    kept_shares,
    make_draws,
    modelled_tokens,
    random_noise,
)

GPU = torch.device("cuda")
VOCAB = 3001
WAYS = [*PLAIN, *TRUNCATED]


def draw_on_gpu(logits: Tensor, options: Sequence[Options], noise: Tensor) -> list[int]:
    return draw(logits.to(GPU), make_draws(options, noise.to(GPU))).tolist()


@pytest.mark.parametrize("vocab_size", [7, 50257, 262144])
@pytest.mark.parametrize("spread", [1.0, 5.0], ids=["flat", "peaked"])
def test_all_ways_to_draw_in_one_batch(vocab_size: int, spread: float) -> None:
    torch.manual_seed(0)
    logits, noise = torch.randn(len(WAYS), vocab_size) * spread, random_noise(len(WAYS))
    assert draw_on_gpu(logits, WAYS, noise) == modelled_tokens(logits, WAYS, noise)


def test_equal_logits() -> None:
    torch.manual_seed(0)
    logits, noise = torch.randn(len(WAYS), 128256).bfloat16().float(), random_noise(len(WAYS))
    assert draw_on_gpu(logits, WAYS, noise) == modelled_tokens(logits, WAYS, noise)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3},
        {"top_k": 6},
        {"top_p": 0.8},
        {"top_p": 0.3, "temperature": 3.0},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_shares(options: Options) -> None:
    """20,000 draws from the same logits, of which 40 matter."""
    torch.manual_seed(0)
    num_draws, row = 20_000, torch.full((VOCAB,), -torch.inf)
    row[torch.randperm(VOCAB)[:40]] = torch.randn(40) * 1.5
    tokens = draw_on_gpu(row.repeat(num_draws, 1), [options] * num_draws, random_noise(num_draws))
    check_shares(tokens, kept_shares(row, options))


def test_a_row_depends_on_itself_alone() -> None:
    torch.manual_seed(0)
    options = WAYS * 13
    logits, noise = torch.randn(len(options), 50257), random_noise(len(options))
    together = draw_on_gpu(logits, options, noise)
    assert draw_on_gpu(logits, options, noise) == together
    for row in range(0, len(options), 19):
        part = slice(row, row + 3)
        assert draw_on_gpu(logits[part], options[part], noise[part]) == together[part]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_disturb_nobody_else(broken: float) -> None:
    torch.manual_seed(0)
    logits, noise = torch.randn(len(WAYS), 50257), random_noise(len(WAYS))
    expected = draw_on_gpu(logits, WAYS, noise)
    logits[::2] = broken
    tokens = draw_on_gpu(logits, WAYS, noise)
    assert tokens[1::2] == expected[1::2]
    assert all(0 <= token < 50257 for token in tokens)


STOP = StopParams(max_tokens=99, min_tokens=5, stop_token_ids=frozenset({7}), eos_token_ids=frozenset({1}))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 20, "logit_bias": {5: 3.0, 2000: -100.0}},
    {"temperature": 0.0, "stop": STOP},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {3: 2.5}},
    {"temperature": 0.0, "repetition_penalty": 0.7, "frequency_penalty": -0.5, "stop": STOP},
    {"temperature": 0.7},
    {"top_k": 5, "logprobs": 3},
    {"top_p": 0.9, "repetition_penalty": 1.1},
    {"min_p": 0.1, "presence_penalty": 1.0, "stop": STOP},
    {"temperature": 1.2, "top_k": 100, "top_p": 0.8, "min_p": 0.01, "logit_bias": {9: 5.0}},
]
"""Each request that there is, and greedy ones whose tokens a CPU must agree on."""


def mixed_batch(num_known: int, num_pending: int) -> list[TokenSequence]:
    """Of each kind two sequences, the first with that many known tokens at its end, and pending ones."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for number, options in enumerate(KINDS * 2):
        sampling = {name: value for name, value in options.items() if name != "stop"}
        tokens = torch.randint(40, (20,), generator=generator).tolist()
        ahead = 1 if number < len(KINDS) else 0
        sequence = TokenSequence(
            number,
            str(number),
            0,
            tokens[: 18 + num_known if ahead else 19],
            10,
            SamplingParams(seed=number, **sampling),
            options.get("stop", StopParams(max_tokens=99)),
        )
        sequence.num_pending = num_pending * ahead
        sequences.append(sequence)
    return sequences


def unread_of(sequences: Sequence[TokenSequence]) -> Tensor:
    """The last tokens of those that may be pending; for the others, none that there is."""
    return torch.tensor([s.tokens[-1] if s.id < len(KINDS) else -1 for s in sequences])


def sampled(
    logits: Tensor, sequences: Sequence[TokenSequence], unread: Tensor | None = None
) -> tuple[Tensor, list[SampledToken]]:
    """The logits as the sampler leaves them, and what it draws."""
    edited = logits.clone()
    batch = Sampler().sample(edited, sequences, unread).start_copy()
    torch.cuda.synchronize()
    return edited, batch.to_host()


def never_waits(call: Callable[[], object]) -> None:
    """Runs it where each synchronising call of torch is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", [None, *range(len(KINDS))])
def test_the_host_never_waits(kind: int | None) -> None:
    """For a mixed batch, and for each kind of request alone, with a pending token and without."""
    known, pending = mixed_batch(1, 0), mixed_batch(0, 1)
    unread = unread_of(known).to(GPU)
    if kind is not None:
        known, pending, unread = known[kind : kind + 1], pending[kind : kind + 1], unread[kind : kind + 1]
    logits = torch.randn(len(known), VOCAB, device=GPU)
    with pytest.raises(RuntimeError, match="synchronizing"):
        never_waits(lambda: logits[0, 0].item())
    sampler = Sampler()
    sampler.sample(logits, known).start_copy()
    torch.cuda.synchronize()
    never_waits(lambda: sampler.sample(logits, known).start_copy())
    never_waits(lambda: sampler.sample(logits, pending, unread).start_copy())


def test_edits_and_reports_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    sequences = mixed_batch(1, 0)
    logits = torch.randn(len(sequences), VOCAB)
    edited, tokens = sampled(logits, sequences)
    edited_on_gpu, tokens_on_gpu = sampled(logits.to(GPU), sequences)
    torch.testing.assert_close(edited_on_gpu.cpu(), edited, rtol=1e-6, atol=1e-6)
    for expected, actual in zip(tokens, tokens_on_gpu, strict=True):
        if expected.sequence.sampling.is_greedy:
            assert actual.token_id == expected.token_id
            assert actual.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [token for token, _ in actual.top] == [token for token, _ in expected.top]
        assert [p for _, p in actual.top] == pytest.approx([p for _, p in expected.top], abs=1e-5)


def test_a_pending_token_counts_as_if_it_were_known() -> None:
    torch.manual_seed(0)
    known, pending = mixed_batch(1, 0), mixed_batch(0, 1)
    logits = torch.randn(len(known), VOCAB, device=GPU)
    edited, tokens = sampled(logits, known)
    edited_too, tokens_too = sampled(logits, pending, unread_of(known).to(GPU))
    assert torch.equal(edited_too, edited)
    assert [(t.token_id, t.logprob, t.top) for t in tokens_too] == [
        (t.token_id, t.logprob, t.top) for t in tokens
    ]
