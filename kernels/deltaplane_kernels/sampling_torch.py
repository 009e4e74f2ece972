"""Drawing tokens in torch: the path of CPUs, by the likeliest tokens in order."""

from dataclasses import fields

import torch
from torch import Tensor

from deltaplane_kernels.sampling import Draws

_WIDTHS = (256, 4096)
"""Sorting a vocabulary takes longer than a step of a small model, and nearly always the kept tokens are among
the first few hundred. A row looks at so many, then at more, and at all of them only where it must."""


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """As sampling.draw. Rows of NaN draw any token."""
    tokens = logits.argmax(-1)
    drawn = (draws.temperature > 0).nonzero()[:, 0]
    if len(drawn):
        tokens[drawn] = _draw(logits[drawn], _select(draws, drawn))
    return tokens


def likeliest(scores: Tensor, draws: Draws) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The tokens that may be drawn, in parts of rows that needed the same width.

    scores: [R, V], float32: logits over temperature, less the row's highest, so that exp() is a weight up
        to 1.
    Returns (rows [r], weights [r, width], ids [r, width]) per part: weights are float32, falling, of any sum,
    and 0 for tokens that are cut off. Each row is in exactly one part; which one depends on this row alone.
    """
    vocab_size = scores.shape[-1]
    rows = torch.arange(scores.shape[0])
    mass = scores.exp().sum(-1, keepdim=True)
    parts = []
    for width in (*(w for w in _WIDTHS if w < vocab_size), vocab_size):
        values, ids = scores[rows].topk(width)
        kept, complete = _kept(values, mass[rows], _select(draws, rows))
        if width == vocab_size:
            complete = torch.ones_like(complete)
        weights = values.exp().masked_fill_(~kept, 0)
        parts.append((rows[complete], weights[complete], ids[complete]))
        rows = rows[~complete]
        if not len(rows):
            break
    return parts


def _draw(scores: Tensor, draws: Draws) -> Tensor:
    """For rows that are not greedy. scores: the logits; overwritten."""
    scores -= scores.amax(-1, keepdim=True)
    scores /= draws.temperature[:, None]
    uniforms = _uniforms(draws.noise)
    tokens = torch.empty(len(scores), dtype=torch.int64)
    truncated = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)
    whole = (~truncated).nonzero()[:, 0]
    if len(whole):
        tokens[whole] = _choose(scores[whole].exp(), uniforms[whole])
    cut = truncated.nonzero()[:, 0]
    if len(cut):
        for part, weights, ids in likeliest(scores[cut], _select(draws, cut)):
            rows = cut[part]
            tokens[rows] = ids.gather(1, _choose(weights, uniforms[rows])[:, None])[:, 0]
    return tokens


def _kept(values: Tensor, mass: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """values: [r, width], the highest scores, falling; mass: [r, 1], the weight of the whole row.

    Returns which are kept [r, width], and for which rows nothing beyond them can be [r].
    """
    width = values.shape[1]
    has_top_k = (draws.top_k > 0)[:, None]
    kth = values.gather(1, (draws.top_k[:, None].long() - 1).clamp(0, width - 1))
    kept = ~has_top_k | (values >= kth)
    top_k_complete = ~has_top_k[:, 0] | ~kept[:, -1]

    weights = values.double().exp()
    total = torch.where(has_top_k, (weights * kept).sum(-1, keepdim=True), mass.double())
    before = weights.cumsum(-1) - weights
    kept &= (before < draws.top_p[:, None] * total) | (draws.top_p >= 1)[:, None]
    kept &= values >= draws.min_p[:, None].log()
    return kept, top_k_complete & ~kept[:, -1]


def _uniforms(noise: Tensor) -> Tensor:
    """[R], float64, in [0, 1): the upper 53 bits."""
    return ((noise >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _choose(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws by the inverse of the cumulative distribution.

    weights: [R, N], float32, at least 0, of any sum. uniforms: [R], float64, in [0, 1).
    Returns [R], int64: the first index whose cumulative weight exceeds the uniform share of the sum, so never
    one of weight 0. Rows of NaN answer N - 1.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _select(draws: Draws, rows: Tensor) -> Draws:
    return Draws(**{field.name: getattr(draws, field.name)[rows] for field in fields(draws)})
