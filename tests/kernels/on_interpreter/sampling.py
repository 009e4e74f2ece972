"""The sampling kernels on Triton's interpreter; test_ops_triton.py runs this file."""

import pytest
import torch
from torch import Tensor

from deltaplane_kernels import sampling_triton
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

# Differences of extreme logits overflow to -inf, as is meant; numpy tells of it, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def draw(logits: Tensor, options: list[Options], noise: Tensor) -> list[int]:
    before = logits.clone()
    tokens = sampling_triton.draw(logits, make_draws(options, noise))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert tokens.dtype == torch.int64
    return tokens.tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 512, 6001])
@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "peaked"])
def test_all_ways_to_draw_in_one_batch(vocab_size: int, spread: float) -> None:
    torch.manual_seed(0)
    options = [*PLAIN, *TRUNCATED]
    logits, noise = torch.randn(len(options), vocab_size) * spread, random_noise(len(options))
    assert draw(logits, options, noise) == modelled_tokens(logits, options, noise)


def test_equal_logits() -> None:
    """Of bfloat16, of which many are equal: top-k keeps all that are equal to the k-th, top-p the first."""
    torch.manual_seed(0)
    options: list[Options] = [*TRUNCATED, {"top_p": 0.5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.5}]
    logits, noise = (torch.randn(len(options), 1100) / 2).bfloat16().float(), random_noise(len(options))
    assert draw(logits, options, noise) == modelled_tokens(logits, options, noise)
    same = torch.zeros(len(options), 1100)
    assert draw(same, options, noise) == modelled_tokens(same, options, noise)


def test_the_last_token_that_top_p_keeps() -> None:
    """Of 1,000 equal ones, with bits that draw the 500th and the 501st, which gives way to one before it."""
    middles = (torch.tensor([499.5, 500.5]).double() / 1000 * 2**53).long() << 11
    options: list[Options] = [{"top_p": 0.5}] * 2
    assert draw(torch.zeros(2, 1000), [{}] * 2, middles) == [499, 500]
    kept, other = draw(torch.zeros(2, 1000), options, middles)
    assert (kept, other < 500) == (499, True)


def test_shares_of_truncated_draws() -> None:
    """Each with its own noise; with 5 tokens, top-p forbids a third of what is drawn first."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 3.0, 2.0, 0.9, 2.5])
    options: Options = {"temperature": 2.0, "top_p": 0.6}
    tokens = draw(logits.repeat(250, 1), [options] * 250, random_noise(250))
    expected = kept_shares(logits, options)
    assert len(expected) == 3
    check_shares(tokens, expected)


def test_the_likeliest_is_the_first_of_several() -> None:
    logits = torch.zeros(3, 1500)
    logits[0, [700, 1250]] = 1.0
    logits[1, [600, 601]] = 1.0
    options: list[Options] = [{"temperature": 0.0}] * 3
    assert draw(logits, options, random_noise(3)) == [700, 600, 0]


@pytest.mark.parametrize("noise", [0, -1], ids=["first", "last"])
def test_the_ends_of_a_distribution(noise: int) -> None:
    """Bits of 0 draw the first kept token, and bits of 1 the last, however light they are."""
    logits = torch.full((4, 2000), -torch.inf)
    logits[:, [3, 800, 1300, 1999]] = torch.tensor([-20.0, 0.0, -1.0, -20.0])
    options: list[Options] = [{}, {"top_k": 2}, {"min_p": 0.1}, {"top_k": 3, "temperature": 100.0}]
    expected = [3, 800, 800, 3] if noise == 0 else [1999, 1300, 1300, 1999]
    assert draw(logits, options, torch.full((4,), noise)) == expected


def test_extreme_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.full((7, 700), -largest)
    logits[:, 650] = largest
    logits[3:5, 20] = torch.inf
    logits[5:, 20:600] = -torch.inf
    options: list[Options] = [
        {},
        {"temperature": 1e-42},
        {"temperature": 100.0, "top_p": 0.5},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 690},
        {"min_p": 1e-30, "top_k": 100, "top_p": 0.1},
    ]
    assert draw(logits, options, torch.zeros(7, dtype=torch.int64)) == [650, 650, 650, 20, 20, 650, 650]


def test_numbers_that_are_none_are_not_drawn() -> None:
    options: list[Options] = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}]
    for broken in (torch.nan, -torch.inf):
        logits = torch.full((5, 701), broken)
        noise = torch.full((5,), -1)
        assert all(0 <= token < 701 for token in draw(logits, options, noise))
        logits[:, 600] = -5.0
        assert draw(logits, options, noise) == [600] * 5


def test_a_row_depends_on_itself_alone() -> None:
    torch.manual_seed(0)
    options = [*PLAIN, *TRUNCATED]
    logits, noise = torch.randn(len(options), 1500), random_noise(len(options))
    together = draw(logits, options, noise)
    for row in range(0, len(options), 3):
        assert draw(logits[row : row + 1], [options[row]], noise[row : row + 1]) == together[row : row + 1]


def test_no_rows() -> None:
    assert draw(torch.empty(0, 9), [], random_noise(0)) == []
