"""Ways to draw, and a model of the draw that the GPU kernels make, in numpy and float64."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaplane_kernels.sampling import Draws

Options = Mapping[str, float]
"""temperature, top_k, top_p, min_p; what is missing is off."""

PLAIN: list[Options] = [{"temperature": 0.0}, {}, {"temperature": 0.3}, {"temperature": 2.5}]
TRUNCATED: list[Options] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 4097},
    {"top_k": 1 << 20},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"min_p": 1e-6},
    {"top_k": 50, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 5000, "top_p": 0.5, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.99, "min_p": 0.001},
]


def make_draws(options: Sequence[Options], noise: Tensor) -> Draws:
    """A row for each, on the device of the noise: [R], int64."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([o.get(name, default) for o in options], device=noise.device).to(dtype)

    return Draws(
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        noise,
    )


def random_noise(num_rows: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (num_rows,))


def modelled_tokens(logits: Tensor, options: Sequence[Options], noise: Tensor) -> list[int]:
    """What the GPU draws of each row: by the inverse of the cumulative distribution, in rising order of ids,
    and again among the tokens before the drawn one where top_p does not keep that."""
    return [
        _modelled_token(row, o, bits)
        for row, o, bits in zip(logits.double().numpy(), options, noise.tolist(), strict=True)
    ]


def kept_shares(logits: Tensor, options: Options) -> dict[int, float]:
    """With which probability each token is drawn."""
    row = logits.double().numpy()
    weights = _weights(row, options.get("temperature", 1.0))
    kept = _by_top_k(row, options)
    share = float(np.float32(options.get("top_p", 1.0))) * weights[kept].sum()
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept[order] &= before < share
    kept &= weights >= options.get("min_p", 0.0) * weights.max()
    total = weights[kept].sum()
    return {int(token): float(weights[token] / total) for token in np.flatnonzero(kept & (weights > 0))}


def check_shares(tokens: Sequence[int], expected: Mapping[int, float]) -> None:
    """Each token was drawn as often as expected, within five standard deviations, and no other one was."""
    counts = Counter(tokens)
    assert counts.keys() <= expected.keys()
    for token, p in expected.items():
        tolerance = 5 * math.sqrt(p * (1 - p) / len(tokens)) + 1e-9
        assert abs(counts[token] / len(tokens) - p) <= tolerance, (token, counts[token] / len(tokens), p)


def _modelled_token(row: NDArray[np.float64], options: Options, noise: int) -> int:
    weights = _weights(row, options.get("temperature", 1.0))
    top_p = float(np.float32(options.get("top_p", 1.0)))
    candidates = _by_top_k(row, options)
    share = top_p * weights[candidates].sum()
    candidates &= weights >= options.get("min_p", 0.0) * weights.max()
    bits, ids = np.array([noise]).view(np.uint64), np.arange(len(row))
    while True:
        cumulative = np.cumsum(weights * candidates)
        target = float(bits[0] >> np.uint64(11)) * 2.0**-53 * cumulative[-1]
        token = int(np.searchsorted(cumulative, target, side="right"))
        candidates = (row > row[token]) | ((row == row[token]) & (ids < token))
        if top_p >= 1 or weights[candidates].sum() < share:
            return token
        bits = _splitmix64(bits)


def _weights(row: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    weights: NDArray[np.float64]
    if temperature == 0:
        weights = (np.arange(len(row)) == row.argmax()).astype(np.float64)
    else:
        weights = np.exp((row - row.max()) / float(np.float32(temperature)))
    return weights


def _by_top_k(row: NDArray[np.float64], options: Options) -> NDArray[np.bool_]:
    top_k = int(options.get("top_k", 0))
    lowest: float = np.sort(row)[-top_k] if 0 < top_k < len(row) else -np.inf
    kept: NDArray[np.bool_] = row >= lowest
    return kept


def _splitmix64(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
