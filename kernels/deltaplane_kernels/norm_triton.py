"""RMSNorm in Triton: one program a row, which reads it once. Rounds where norm.py rounds.

Where rows have weights of their own, a program reads its row's slot, where that slot's weight lies, and the
weight, before it waits for the kernel ahead of it: they come in meanwhile. A row without a slot reads one
number more than else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.norm import NormWeight, check_weight
from deltaplane_kernels.overlap_triton import launch_options, let_next_start, wait_for_previous


def rms_norm(x: Tensor, weight: NormWeight, eps: float, out: Tensor | None = None) -> Tensor:
    """As norm.rms_norm. out: contiguous, of the shape of x; a new tensor where it is None."""
    rows = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, x.shape[-1]).contiguous()
    return _launch(rows, None, weight, eps, out, x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: NormWeight, eps: float, out: Tensor | None = None
) -> Tensor:
    """As norm.add_rms_norm; x and residual contiguous. out: as they are; a new tensor where it is None."""
    if x.shape != residual.shape or not (x.is_contiguous() and residual.is_contiguous()):
        raise RuntimeError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must be contiguous and of one shape"
        )
    return _launch(x.view(-1, 1, x.shape[-1]), residual, weight, eps, out, x.shape)


def _launch(
    rows: Tensor,
    residual: Tensor | None,
    weight: NormWeight,
    eps: float,
    out: Tensor | None,
    shape: torch.Size,
) -> Tensor:
    """rows: [T, heads, H], the elements of a row side by side."""
    num_tokens, num_heads, size = rows.shape
    base, own = check_weight(weight, num_tokens, size)
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    if num_tokens:
        block = triton.next_power_of_2(size)
        _rms_norm[(num_tokens, num_heads)](
            out,
            rows,
            residual,
            base,
            None if own is None else own.slots,
            None if own is None else own.offsets,
            None if own is None else own.pool,
            rows.stride(0),
            rows.stride(1),
            0 if own is None else own.offsets.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(rows.device),
        )
    return out


@triton.jit
def _rms_norm(
    out,
    x,
    residual,
    weight,
    slots,
    offsets,
    pool,
    token_stride,
    head_stride,
    offset_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_start(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = (token * tl.num_programs(1) + head) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    if slots is not None:
        slot = tl.load(slots + token)
        if slot >= 0:
            offset = tl.load(offsets + slot.to(tl.int64) * offset_stride)
            if offset >= 0:
                weights = tl.load(pool + offset + columns, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    values = tl.load(x + token * token_stride + head * head_stride + columns, mask=inside, other=0.0)
    if residual is not None:
        values += tl.load(residual + row + columns, mask=inside, other=0.0)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out + row + columns, (wide * inverse).to(weights.dtype) * weights, mask=inside)
