"""Draws a token of each row of logits: the likeliest, or one at random of a truncated softmax."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """How R rows draw, each [R], on the device of the logits.

    temperature: float32; 0 takes the likeliest token, the first of several, whatever else is asked for.
    top_k: int32; 0 is off.
    top_p, min_p: float32; 1 and 0 are off.
    noise: int64, 64 random bits, of which each draw needs its own.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """token ~ softmax(logits / temperature), of the kept tokens alone.

    The tokens of a row stand in falling order of their weight, exp(logits / temperature). One is kept where
    all three hold:

        fewer than top_k tokens have a higher weight          (so ties with the k-th are kept)
        the sum before it < top_p * the sum of all            (of those that top_k keeps)
        its weight >= min_p * the highest

    This is what transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper keep, in this order.
    Top-p is nucleus sampling (Holtzman et al., 2020), min-p is Nguyen et al., 2024.

    logits: [R, V], float32, contiguous; left alone.
    Returns [R], int64, each below V, for rows of NaN too. A row's token depends on this row alone. A CPU and
    a GPU draw from the same distribution, but not the same tokens from the same bits. The host does not wait
    for a GPU.
    Errors: ValueError where logits are otherwise, or where draws are not of R rows.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} must be contiguous rows of float32")
    if any(getattr(draws, field.name).shape != logits.shape[:1] for field in fields(draws)):
        raise ValueError(f"draws must be of as many rows as logits {tuple(logits.shape)}")
    if logits.is_cuda:
        from deltaplane_kernels import sampling_triton

        return sampling_triton.draw(logits, draws)
    from deltaplane_kernels import sampling_torch

    return sampling_torch.draw(logits, draws)
