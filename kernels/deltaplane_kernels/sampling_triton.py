"""Drawing tokens in Triton, without sorting.

A row is cut into tiles. A first launch reads all logits once and notes each tile's highest logit and its
mass, the sum of its weights. A second one, a program for each row, draws by these: a tile by the masses, then
a token in it, both by the inverse of the cumulative distribution, in rising order of ids.

A draw that top-p may forbid is checked, not prevented: the mass before the drawn token says whether it is
kept, and where it is not, the next draw is among the tokens before it (rejection sampling, as in FlashInfer,
Ye et al., 2025). A kept token is drawn by its weight whatever was rejected on the way, so the distribution is
exact, and about one pass over the logits does where the search for a threshold would take many. Only top-k
has its threshold searched for, by halving, from the k-th highest of the tiles' tops, which is close to it.

A pass reads only the tiles whose top is high enough to matter. Sums are taken in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.sampling import Draws

_TILE = 512
_MEASURED, _PASSED = 8, 32
"""Tiles that a program reads at a time, in the first launch and in the second."""

_HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
_LOG2_E = tl.constexpr(1.4426950408889634)


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """As sampling.draw. NaN counts as -inf; a row without any other logit draws any token."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    # One by one, for whatever number of rows they start at a multiple of 16 bytes, as compiled for.
    tops, masses = (logits.new_empty((num_rows, num_tiles)) for _ in range(2))
    _measure[(num_rows, triton.cdiv(num_tiles, _MEASURED))](
        tops,
        masses,
        logits,
        draws.temperature,
        vocab_size,
        num_tiles,
        CHUNK=_MEASURED,
        TILE=_TILE,
        num_warps=4,
    )
    _draw[(num_rows,)](
        tokens,
        logits,
        tops,
        masses,
        torch.empty_like(tops, dtype=torch.int32),
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.noise,
        vocab_size,
        num_tiles,
        TILES=triton.next_power_of_2(num_tiles),
        CHUNK=_PASSED,
        TILE=_TILE,
        num_warps=16,
    )
    return tokens


@triton.jit(do_not_specialize=["num_tiles"])
def _measure(
    tops, masses, logits, temperature, vocab_size, num_tiles, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """tops, masses: [R, num_tiles]; a mass is relative to the weight of the tile's top."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = _read(logits + row * vocab_size, columns, columns < vocab_size)
    top = tl.max(x, 1)
    tl.store(tops + row * num_tiles + tiles, top, mask=tiles < num_tiles)
    heat = tl.load(temperature + row)
    if heat > 0:
        mass = tl.sum(tl.exp2((x - top[:, None]) * _inverse(heat)), 1)
        tl.store(masses + row * num_tiles + tiles, mass, mask=tiles < num_tiles)


@triton.jit(do_not_specialize=["num_tiles"])
def _draw(
    tokens,
    logits,
    tops,
    masses,
    listed,
    temperature,
    top_k,
    top_p,
    min_p,
    noise,
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row. listed: [R, num_tiles], room for the tiles of a pass."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    tops += row * num_tiles
    masses += row * num_tiles
    listed += row * num_tiles
    tiles = tl.arange(0, TILES)
    peaks = tl.load(tops + tiles, mask=tiles < num_tiles, other=-float("inf"))
    heat = tl.load(temperature + row)
    if heat > 0:
        token = _sample(
            logits,
            tops,
            masses,
            listed,
            peaks,
            heat,
            tl.load(top_k + row),
            tl.load(top_p + row),
            tl.load(min_p + row),
            tl.load(noise + row).to(tl.uint64),
            vocab_size,
            TILES,
            CHUNK,
            TILE,
        )
    else:
        columns = tl.argmax(peaks, 0) * TILE + tl.arange(0, TILE)
        x = _read(logits, columns, columns < vocab_size)
        token = tl.min(tl.where(x == tl.max(x, 0), columns, vocab_size), 0)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _sample(
    logits,
    tops,
    masses,
    listed,
    peaks,
    heat,
    top_k,
    top_p,
    min_p,
    noise,
    vocab_size,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """A token of a row that is not greedy.

    It is drawn among those before (value, column), in falling order of logits and rising order of columns.
    """
    peak = tl.max(peaks, 0)
    inverse = _inverse(heat)
    factors = tl.exp2((peaks - peak) * inverse).to(tl.float64)
    tiles = tl.arange(0, TILES)
    total = tl.sum(tl.load(masses + tiles, mask=peaks >= -_HIGHEST, other=0.0) * factors, 0)
    value = tl.full((), -_HIGHEST, tl.float32)
    column = vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        value = _kth(logits, listed, peaks, top_k, vocab_size, TILES, CHUNK, TILE)
        total = _weigh(
            masses, logits, tops, listed, peaks, inverse, value, column, vocab_size, TILES, CHUNK, TILE
        )
    if min_p > 0:
        value = tl.maximum(value, peak + tl.log(min_p) * heat)
        _weigh(masses, logits, tops, listed, peaks, inverse, value, column, vocab_size, TILES, CHUNK, TILE)
    share = total * top_p
    token = column
    undecided = True
    while undecided:
        token, logit = _choose(
            masses, logits, peaks, factors, inverse, value, column, noise, vocab_size, TILES, TILE
        )
        undecided = False
        if top_p < 1:
            value = logit
            column = token
            noise = _next(noise)
            before = _weigh(
                masses, logits, tops, listed, peaks, inverse, value, column, vocab_size, TILES, CHUNK, TILE
            )
            undecided = (before > 0) & (before >= share)
    return token


@triton.jit
def _choose(
    masses,
    logits,
    peaks,
    factors,
    inverse,
    value,
    column,
    noise,
    vocab_size,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One of the tokens before (value, column), whose masses are known, and its logit."""
    tl.debug_barrier()
    tiles = tl.arange(0, TILES)
    mass = tl.load(masses + tiles, mask=peaks >= value, other=0.0) * factors
    uniform = (noise >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    tile, share = _invert(mass, uniform, TILES)
    columns = tile * TILE + tl.arange(0, TILE)
    x = _read(logits, columns, columns < vocab_size)
    weights = tl.exp2((x - tl.max(x, 0)) * inverse).to(tl.float64)
    place, _ = _invert(tl.where(_is_before(x, columns, value, column), weights, 0.0), share, TILE)
    token = tile * TILE + place
    return token, tl.sum(tl.where(columns == token, x, 0.0), 0)


@triton.jit
def _invert(weights, uniform, SIZE: tl.constexpr):
    """The place whose part of the cumulative weight holds the uniform share of the sum, and the share of that
    part which lies before it."""
    places = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, 0)
    target = uniform * tl.max(cumulative, 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    place = tl.minimum(tl.min(tl.where((cumulative > target) & (weights > 0), places, SIZE), 0), last)
    weight = tl.sum(tl.where(places == place, weights, 0.0), 0)
    before = tl.sum(tl.where(places == place, cumulative - weights, 0.0), 0)
    return place, (target - before) / weight


@triton.jit
def _weigh(
    masses,
    logits,
    tops,
    listed,
    peaks,
    inverse,
    value,
    column,
    vocab_size,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mass before (value, column), relative to the highest weight. Notes the tiles' shares in masses."""
    peak = tl.max(peaks, 0)
    num_listed = _list(listed, peaks, value, TILES)
    total = tl.zeros((CHUNK,), tl.float64)
    for first in range(0, num_listed, CHUNK):
        places = first + tl.arange(0, CHUNK)
        there = places < num_listed
        tiles = tl.load(listed + places, mask=there, other=0)
        top = tl.load(tops + tiles)
        columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = _read(logits, columns, there[:, None] & (columns < vocab_size))
        weights = tl.exp2((x - top[:, None]) * inverse)
        mass = tl.sum(tl.where(_is_before(x, columns, value, column), weights, 0.0), 1)
        tl.store(masses + tiles, mass, mask=there)
        total += tl.where(there, mass * tl.exp2((top - peak) * inverse).to(tl.float64), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _kth(
    logits,
    listed,
    peaks,
    k,
    vocab_size,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The k-th highest logit, for k < vocab_size.

    low <= it <= high, and both are logits. It is near low at first, so that it is looked for there first."""
    ranked = tl.sort(peaks, descending=True)
    low = tl.maximum(tl.max(tl.where(tl.arange(0, TILES) >= k - 1, ranked, -float("inf")), 0), -_HIGHEST)
    high = tl.max(peaks, 0)
    num_listed = _list(listed, peaks, low, TILES)
    part = 1 / 16
    while low < high:
        middle = low * (1 - part) + high * part
        part = tl.minimum(2 * part, 0.5)
        middle = tl.where(middle < high, tl.maximum(middle, low), low)
        num_above = tl.zeros((CHUNK,), tl.int32)
        above = tl.full((CHUNK,), _HIGHEST, tl.float32)
        below = tl.full((CHUNK,), -_HIGHEST, tl.float32)
        for first in range(0, num_listed, CHUNK):
            places = first + tl.arange(0, CHUNK)
            there = places < num_listed
            tiles = tl.load(listed + places, mask=there, other=0)
            columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            x = _read(logits, columns, there[:, None] & (columns < vocab_size))
            num_above += tl.sum((x > middle).to(tl.int32), 1)
            above = tl.minimum(above, tl.min(tl.where(x > middle, x, _HIGHEST), 1))
            below = tl.maximum(below, tl.max(tl.where(x > middle, -_HIGHEST, x), 1))
        count = tl.sum(num_above, 0)
        if count >= k:
            low = tl.min(above, 0)
            high = tl.where(count == k, low, high)
        else:
            high = tl.max(below, 0)
    return low


@triton.jit
def _list(listed, peaks, value, TILES: tl.constexpr):
    """Writes which tiles have a logit of at least `value`, and answers how many."""
    there = peaks >= value
    count = there.to(tl.int32)
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(count, 0) - 1, tl.arange(0, TILES), mask=there)
    tl.debug_barrier()
    return tl.sum(count, 0)


@triton.jit
def _read(logits, columns, there):
    """Finite numbers: NaN counts as -inf, and that as the lowest number."""
    x = tl.load(logits + columns, mask=there, other=-_HIGHEST)
    return tl.minimum(tl.where(x >= -_HIGHEST, x, -_HIGHEST), _HIGHEST)


@triton.jit
def _is_before(x, columns, value, column):
    return (x > value) | ((x == value) & (columns < column))


@triton.jit
def _inverse(heat):
    """1 / temperature, for powers of two. Finite, as 0 times it must be 0."""
    return tl.minimum(_LOG2_E / heat, _HIGHEST)


@triton.jit
def _next(noise):
    """A step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    noise += 0x9E3779B97F4A7C15
    noise = (noise ^ (noise >> 30)) * 0xBF58476D1CE4E5B9
    noise = (noise ^ (noise >> 27)) * 0x94D049BB133111EB
    return noise ^ (noise >> 31)
