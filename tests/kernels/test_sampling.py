"""Drawing tokens on the CPU: against transformers' own processors, and by shares."""

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deltaplane_kernels.sampling import Draws, draw
from deltaplane_kernels.sampling_torch import likeliest
from sampling_cases import PLAIN, TRUNCATED, Options, check_shares, kept_shares, make_draws, random_noise

LARGE_VOCAB = 6000
"""More than the widest part of a vocabulary that is looked at before all of it."""

NO_TOKENS: Any = torch.empty(0, dtype=torch.long)


def kept_by_transformers(scores: torch.Tensor, options: Options) -> set[int]:
    processors = LogitsProcessorList()
    if "top_k" in options:
        processors.append(TopKLogitsWarper(int(options["top_k"])))
    if "top_p" in options:
        processors.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        processors.append(MinPLogitsWarper(options["min_p"]))
    return set(processors(NO_TOKENS, scores[None].clone())[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab_size", [5, 300, LARGE_VOCAB])
@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "peaked"])
def test_the_kept_tokens_are_those_of_transformers(vocab_size: int, spread: float) -> None:
    """All truncations in one batch: rows that need little and rows that need the whole vocabulary."""
    torch.manual_seed(0)
    scores = torch.randn(len(TRUNCATED), vocab_size) * spread
    scores -= scores.amax(-1, keepdim=True)
    seen = []
    for rows, weights, ids in likeliest(scores, make_draws(TRUNCATED, random_noise(len(TRUNCATED)))):
        for row, weight, tokens in zip(rows.tolist(), weights, ids, strict=True):
            seen.append(row)
            kept = tokens[weight > 0]
            assert set(kept.tolist()) == kept_by_transformers(scores[row], TRUNCATED[row]), TRUNCATED[row]
            assert torch.equal(weight[weight > 0], scores[row, kept].exp())
    assert sorted(seen) == list(range(len(TRUNCATED)))


@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("options", [*PLAIN, *TRUNCATED], ids=str)
def test_the_model_of_the_gpu_keeps_what_transformers_keeps(spread: float, options: Options) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2000) * spread
    tempered = scores / (options.get("temperature", 1.0) or 1e-6)
    assert kept_shares(scores, options).keys() == {
        token
        for token in kept_by_transformers(tempered, options)
        if (tempered - tempered.max())[token] > -700
    }


@pytest.mark.parametrize("options", [*PLAIN, *TRUNCATED], ids=str)
def test_shares(options: Options) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12) * 2
    logits[[3, 5]] = -torch.inf
    tokens = draw(logits.repeat(4000, 1), make_draws([options] * 4000, random_noise(4000)))
    check_shares(tokens.tolist(), kept_shares(logits, options))


def test_noise_decides_alone() -> None:
    torch.manual_seed(0)
    options = [*PLAIN, *TRUNCATED]
    logits, noise = torch.randn(len(options), LARGE_VOCAB), random_noise(len(options))
    before = logits.clone()
    tokens = draw(logits, make_draws(options, noise))
    assert torch.equal(logits, before)
    for row, token in enumerate(tokens.tolist()):
        part = slice(row, row + 1)
        assert draw(logits[part], make_draws(options[part], noise[part])).tolist() == [token]
    assert draw(logits, make_draws(options, noise + (1 << 60))).tolist() != tokens.tolist()


def test_temperatures_that_float32_lacks_are_greedy() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    assert draw(logits, make_draws([{"temperature": 1e-60}], random_noise(1))).tolist() == [1]


def test_refuses_what_does_not_fit() -> None:
    draws = make_draws(PLAIN, random_noise(len(PLAIN)))
    rows = torch.randn(len(PLAIN), 10)
    for logits in (rows[0], rows.double(), rows.half(), rows[:, ::2]):
        with pytest.raises(ValueError, match="contiguous rows of float32"):
            draw(logits, draws)
    one_less = Draws(draws.temperature[1:], draws.top_k, draws.top_p, draws.min_p, draws.noise)
    for wrong in (one_less, make_draws(PLAIN[1:], random_noise(len(PLAIN) - 1))):
        with pytest.raises(ValueError, match="as many rows"):
            draw(rows, wrong)
