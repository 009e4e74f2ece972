"""The likeliest token of each row of logits."""

import torch
from torch import Tensor


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """out[r] = the first column at which row r is highest.

    logits: [R, V], float32, bfloat16 or float16, contiguous, without NaN.
    out: [R], int64, contiguous; a new tensor where it is None. Returns it.
    Errors: ValueError when the shapes do not fit.
    """
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} must be contiguous rows")
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    elif out.shape != logits.shape[:1]:
        raise ValueError(f"out {tuple(out.shape)} does not fit logits {tuple(logits.shape)}")
    if logits.is_cuda:
        from deltaplane_kernels import argmax_triton

        return argmax_triton.argmax(logits, out)
    return torch.argmax(logits, -1, out=out)
