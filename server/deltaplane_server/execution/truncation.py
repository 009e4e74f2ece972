"""Top-k, top-p and min-p: which tokens a draw may choose from.

The kept set is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper applied in this
order. Top-p is nucleus sampling (Holtzman et al., 2020), min-p is Nguyen et al., 2024.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WIDTHS = (256, 4096)
"""Sorting a vocabulary takes longer than a step of a small model, and nearly always the kept tokens are among
the first few hundred. A row looks at so many, then at more, and at all of them only where it must."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of R rows, each [R]. top_k: int64, 0 is off. top_p, min_p: float32; 1 and 0 are off."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def select(self, rows: Tensor) -> "Limits":
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def likeliest(scores: Tensor, limits: Limits) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The tokens that may be drawn, in parts of rows that needed the same width.

    scores: [R, V], float32: logits over temperature, less the row's highest, so that exp() is a weight up
        to 1.
    Returns (rows [r], weights [r, width], ids [r, width]) per part: weights are float32, falling, of any sum,
    and 0 for tokens that are cut off. Each row is in exactly one part; which one depends on this row alone.
    """
    vocab_size = scores.shape[-1]
    rows = torch.arange(scores.shape[0], device=scores.device)
    mass = scores.exp().sum(-1, keepdim=True)
    parts = []
    for width in (*(w for w in _WIDTHS if w < vocab_size), vocab_size):
        values, ids = scores[rows].topk(width)
        kept, complete = _kept(values, mass[rows], limits.select(rows))
        if width == vocab_size:
            complete = torch.ones_like(complete)
        weights = values.exp().masked_fill_(~kept, 0)
        parts.append((rows[complete], weights[complete], ids[complete]))
        rows = rows[~complete]
        if not len(rows):
            break
    return parts


def _kept(values: Tensor, mass: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """values: [r, width], the highest scores, falling; mass: [r, 1], the weight of the whole row.

    Returns which are kept [r, width], and for which rows nothing beyond them can be [r].
    """
    width = values.shape[1]
    has_top_k = (limits.top_k > 0)[:, None]
    kth = values.gather(1, (limits.top_k[:, None] - 1).clamp(0, width - 1))
    kept = ~has_top_k | (values >= kth)  # as in transformers, ties with the k-th are kept
    top_k_complete = ~has_top_k[:, 0] | ~kept[:, -1]

    weights = values.double().exp()
    total = torch.where(has_top_k, (weights * kept).sum(-1, keepdim=True), mass.double())
    before = weights.cumsum(-1) - weights
    kept &= (before < limits.top_p[:, None] * total) | (limits.top_p >= 1)[:, None]
    kept &= values >= limits.min_p[:, None].log()
    return kept, top_k_complete & ~kept[:, -1]
