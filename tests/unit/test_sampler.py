"""Sampling: against transformers' own processors where they exist, and by its distribution elsewhere."""

import math
from collections.abc import Sequence
from itertools import count, pairwise, product
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deltaplane_server.engine.api import GenerationRequest
from deltaplane_server.engine.request_state import RequestState
from deltaplane_server.execution.sampler import Sampler, draws_likeliest
from deltaplane_server.execution.token_counts import TokenCounts
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from fake_runner import LetterDecoder
from sampling_cases import check_shares

LARGE_VOCAB = 6000
"""More than the widest part of a vocabulary that is looked at before all of it."""


def sequence(
    number: int = 1,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stop: StopParams | None = None,
    **sampling: Any,
) -> TokenSequence:
    return TokenSequence(
        number,
        f"r{number}",
        0,
        [*prompt, *output],
        len(prompt),
        SamplingParams(**sampling),
        stop or StopParams(max_tokens=100),
    )


def draw(logits: torch.Tensor, *sequences: TokenSequence, sampler: Sampler | None = None) -> list[int]:
    """One token each, from logits [R, V] or the same [V] for all."""
    rows = logits.clone() if logits.dim() == 2 else logits.repeat(len(sequences), 1)
    return [s.token_id for s in (sampler or Sampler()).sample(rows, sequences).to_host()]


def many(logits: torch.Tensor, num_draws: int = 4000, **sampling: Any) -> list[int]:
    """Draws with as many seeds."""
    return draw(logits, *(sequence(i, seed=i, **sampling) for i in range(num_draws)))


def softmax_shares(logits: torch.Tensor) -> dict[int, float]:
    return {token: p for token, p in enumerate(logits.softmax(-1).tolist()) if p > 0}


NO_TOKENS: Any = torch.empty(0, dtype=torch.long)
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    assert draw(logits, sequence(1, temperature=0.0), sequence(2, temperature=0.0)) == [1, 3]


def test_draws_follow_the_distribution() -> None:
    check_shares(many(LOGITS), softmax_shares(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    expected = TemperatureLogitsWarper(temperature)(NO_TOKENS, LOGITS[None].clone())[0]
    check_shares(many(LOGITS, temperature=temperature), softmax_shares(expected))


def test_a_very_low_temperature_is_greedy() -> None:
    assert set(many(LOGITS * 1e4, num_draws=20, temperature=1e-30)) == {1}


def test_truncated_draws_follow_the_distribution() -> None:
    """Order: temperature, top-k, top-p, min-p."""
    processors = LogitsProcessorList(
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(4), TopPLogitsWarper(0.95), MinPLogitsWarper(0.2)]
    )
    expected = softmax_shares(processors(NO_TOKENS, LOGITS[None].clone())[0])
    assert expected.keys() == {0, 1, 2}
    check_shares(many(LOGITS, temperature=1.5, top_k=4, top_p=0.95, min_p=0.2), expected)


def test_ties_with_the_kth_are_kept() -> None:
    check_shares(
        many(torch.tensor([2.0, 1.0, 1.0, 0.0]), top_k=2),
        softmax_shares(torch.tensor([2.0, 1.0, 1.0, -torch.inf])),
    )


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    prompts, outputs = [[1, 2, 2], [3], [4, 5]], [[7, 1], [], [9, 9, 9]]
    expected = [
        int(RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([p + o]), row[None].clone()).argmax())
        for p, o, row in zip(prompts, outputs, logits, strict=True)
    ]
    sequences = [
        sequence(i, p, o, temperature=0.0, repetition_penalty=penalty)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    assert draw(logits, *sequences) == expected


def edited(
    logits: torch.Tensor, *sequences: TokenSequence, unread: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits that greedy choice sees; sample() overwrites what it is given."""
    rows = logits.clone()
    Sampler().sample(rows, sequences, unread)
    return rows


def test_penalties_change_each_row_by_its_own_tokens_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 20) * 3
    plain = sequence(1, [1, 2], [3, 3], temperature=0.0)
    repetition = sequence(2, [1, 2], [3, 3], temperature=0.0, repetition_penalty=1.5)
    presence = sequence(3, [1, 2], [3, 3, 4], temperature=0.0, presence_penalty=0.7)
    frequency = sequence(4, [1, 2], [2, 3, 3, 3], temperature=0.0, frequency_penalty=-0.25)
    expected = logits.clone()
    repeated = logits[1, [1, 2, 3]]
    expected[1, [1, 2, 3]] = torch.where(repeated < 0, repeated * 1.5, repeated / 1.5)
    expected[2, [3, 4]] -= 0.7
    expected[3, 2] += 0.25
    expected[3, 3] += 0.75
    torch.testing.assert_close(edited(logits, plain, repetition, presence, frequency), expected)


def test_repetition_comes_before_presence_and_frequency_and_then_the_bias() -> None:
    logits = torch.tensor([[4.0, 1.0]])
    subject = sequence(
        1,
        [1],
        [0, 0],
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={0: 10.0},
    )
    assert edited(logits, subject)[0].tolist() == [4.0 / 2 - 0.5 - 2 * 0.25 + 10.0, 1.0 / 2]


def test_bias_is_added_before_the_temperature() -> None:
    biased = LOGITS + torch.tensor([0.0, 0.0, 0.0, 4.0, 0.0])
    drawn = many(LOGITS, temperature=2.0, logit_bias={3: 4.0})
    check_shares(drawn, softmax_shares(biased / 2.0))


def test_a_bias_can_forbid_and_force() -> None:
    assert draw(LOGITS, sequence(temperature=0.0, logit_bias={1: -100.0})) == [2]
    assert draw(LOGITS, sequence(temperature=1.0, seed=0, logit_bias={3: 100.0})) == [3]


def test_tokens_that_end_the_output_are_held_back_below_min_tokens() -> None:
    stop = StopParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({2}), eos_token_ids=frozenset({1}))
    early = sequence(1, [0], [3], stop=stop, temperature=0.0, logit_bias={2: 50.0})
    enough = sequence(2, [0], [3, 3], stop=stop, temperature=0.0)
    pending = sequence(3, [0], [3], stop=stop, temperature=0.0)
    pending.num_pending = 1
    assert draw(LOGITS, early, enough, pending) == [0, 1, 1]


def test_a_pending_token_is_penalized_as_if_it_were_known() -> None:
    """Whether prompt or output have it already, or not, beside sequences that have none."""
    torch.manual_seed(0)
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {
            "repetition_penalty": 0.8,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.9,
            "logit_bias": {3: 2.0},
        },
    ]
    known, pending = [], []
    for number, (options, last) in enumerate(product([{}, *penalties], [None, 1, 3, 4, 9])):
        output = [3, 3, 4] if last is None else [3, 3, 4, last]
        known.append(sequence(number, [1, 2], output, temperature=0.0, **options))
        pending.append(sequence(number, [1, 2], [3, 3, 4], temperature=0.0, **options))
        pending[-1].num_pending = 0 if last is None else 1
    logits = torch.randn(len(known), 12) * 3
    unread = torch.tensor([s.output_tokens[3] if s.num_output == 4 else 10**9 for s in known])
    assert torch.equal(edited(logits, *pending, unread=unread), edited(logits, *known))


def test_counts_read_each_token_once() -> None:
    counts = TokenCounts()
    tokens = [5, 6, 5]
    for new in ([], [6], [7, 7], [5]):
        tokens += new
        counts.update(tokens, num_prompt=3)
    assert counts.ids.tolist() == [5, 6, 7]
    assert counts.output_counts.tolist() == [1, 1, 2]
    assert len(counts) == 3


def test_counts_of_a_growing_sequence_equal_those_from_scratch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(30, 1, 12)
    penalties: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.9}
    growing, sampler = sequence(1, [1, 2, 3], **penalties), Sampler()
    for row in logits:
        expected = draw(row, sequence(2, [1, 2, 3], growing.output_tokens, **penalties))
        assert draw(row, growing, sampler=sampler) == expected
        growing.tokens += expected


def test_a_seed_makes_draws_repeatable_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, LARGE_VOCAB)

    def outputs(crowd: Sequence[TokenSequence]) -> list[int]:
        sampler, tokens = Sampler(), list[int]()
        for row in rows:
            subject = sequence(1, output=tokens, seed=42, top_p=0.9)
            tokens.append(draw(row, *crowd, subject, sampler=sampler)[-1])
        return tokens

    alone = outputs([])
    crowd = [
        sequence(2, seed=1),
        sequence(3, temperature=0.0),
        sequence(4, seed=2, top_k=5000),
        sequence(5, seed=3, min_p=0.5, temperature=0.3),
    ]
    assert outputs(crowd) == alone
    assert len(set(alone)) > 6


def test_other_seeds_give_other_draws() -> None:
    flat = torch.zeros(LARGE_VOCAB)
    seeded = draw(flat, *(sequence(i, seed=i) for i in range(50)))
    assert len(set(seeded)) > 40
    assert draw(flat, *(sequence(i, seed=i) for i in reversed(range(50)))) == seeded[::-1]


def test_outputs_of_requests_without_a_seed_get_seeds_of_their_own() -> None:
    request = GenerationRequest("r", [1], SamplingParams(), StopParams(max_tokens=9), num_outputs=2)
    states = [RequestState(request, [None, None], LetterDecoder(), ids=count(), accepted=0.0) for _ in "ab"]
    seeds = [output.sequence.sampling.seed for state in states for output in state.outputs]
    assert len(set(seeds)) == 4
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, 2**64 + 3])
def test_any_seed_is_taken(seed: int) -> None:
    assert draw(LOGITS, sequence(seed=seed)) == draw(LOGITS, sequence(seed=seed % 2**64))


def test_each_draw_is_another_and_depends_on_how_many_there_were() -> None:
    """Not on which they were, nor on whether the host knows the last of them."""
    flat, sampler = torch.zeros(LARGE_VOCAB), Sampler()
    first = [draw(flat, sequence(seed=7, output=[0] * n), sampler=sampler)[0] for n in range(5)]
    assert len(set(first)) == 5
    again = []
    for n in range(5):
        subject = sequence(seed=7, output=[9] * max(n - 1, 0))
        subject.num_pending = min(n, 1)
        again.append(draw(flat, subject)[0])
    assert again == first


def test_neighbouring_seeds_and_draws_are_independent() -> None:
    """The streams of 10 seeds side by side, of 1,000 draws of 10 tokens each: they are uniform, and no stream
    is another one shifted."""
    flat = torch.zeros(10)
    streams = [draw(flat, *(sequence(seed=seed, output=[0] * n) for n in range(1000))) for seed in range(10)]
    check_shares([t for stream in streams for t in stream], dict.fromkeys(range(10), 0.1))
    for one, other in pairwise(streams):
        for shift in range(-2, 3):
            pairs = list(zip(one[10 + shift :], other[10:], strict=False))
            equal = sum(a == b for a, b in pairs) / len(pairs)
            assert equal == pytest.approx(0.1, abs=5 * math.sqrt(0.09 / len(pairs)))


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    sampled = Sampler().sample(
        LOGITS.repeat(3, 1),
        [
            sequence(1, temperature=0.0, logit_bias={3: 100.0}, logprobs=2),
            sequence(2, temperature=0.0),
            sequence(3, [0], [1], temperature=0.5, seed=1, top_k=1, presence_penalty=2.0, logprobs=0),
        ],
    )
    expected = LOGITS.log_softmax(-1)
    biased, silent, penalized = sampled.to_host()
    assert biased.token_id == 3
    assert biased.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in biased.top] == [1, 2]
    assert [value for _, value in biased.top] == pytest.approx([float(expected[1]), float(expected[2])])
    assert (silent.token_id, silent.logprob, silent.top) == (1, None, ())
    assert (penalized.token_id, penalized.top) == (2, ())
    assert penalized.logprob == pytest.approx(float(expected[2]))


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.full((10,), -torch.inf)
    logits[[2, 7]] = 0.0
    assert set(many(logits, num_draws=500)) == {2, 7}
    assert set(many(logits, num_draws=500, top_p=0.999, top_k=8)) == {2, 7}


def test_numbers_that_are_none_disturb_nobody_else() -> None:
    logits = torch.stack((LOGITS, torch.full((5,), torch.nan), LOGITS))
    tokens = draw(
        logits, sequence(1, temperature=0.0), sequence(2, seed=1, top_p=0.5), sequence(3, seed=4, top_k=1)
    )
    assert (tokens[0], tokens[2]) == (1, 1)
    assert 0 <= tokens[1] < 5


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (True, {}),
        (True, {"top_k": 1, "top_p": 0.5, "min_p": 0.5, "seed": 3}),
        (True, {"output": [5], "stop": StopParams(max_tokens=9, min_tokens=1)}),
        (True, {"pending": 1, "stop": StopParams(max_tokens=9, min_tokens=1)}),
        (False, {"temperature": 0.1}),
        (False, {"logprobs": 0}),
        (False, {"repetition_penalty": 1.1}),
        (False, {"presence_penalty": -0.1}),
        (False, {"frequency_penalty": 0.1}),
        (False, {"logit_bias": {3: 1.0}}),
        (False, {"stop": StopParams(max_tokens=9, min_tokens=1)}),
    ],
)
def test_which_sequences_take_the_likeliest_token(expected: bool, options: dict[str, Any]) -> None:
    pending = options.get("pending", 0)
    subject = sequence(**{"temperature": 0.0, **{k: v for k, v in options.items() if k != "pending"}})
    subject.num_pending = pending
    assert draws_likeliest(subject) is expected
    if expected:
        logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
        assert draw(logits, subject) == [int(logits.argmax())]
