"""Rotary embedding in Triton, together with the writing of keys and values. Rounds where rotary.py rounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.overlap_triton import launch_options, let_next_start, wait_for_previous

_HEADS = 8
"""Heads of one program."""


def rotary_factors(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As rotary.rotary_factors; positions of any integer type."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    # One by one, for whatever number of tokens they start at a multiple of 16 bytes, as compiled for.
    cos, sin = (
        torch.empty((num_tokens, 1, 2 * half), dtype=dtype, device=positions.device) for _ in range(2)
    )
    if num_tokens:
        _rotary_factors[(num_tokens,)](
            cos,
            sin,
            positions,
            inv_freq,
            float(scaling),
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
            **launch_options(positions.device),
        )
    return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As rotary.apply_rotary; the elements of x's heads side by side, and its heads."""
    _launch(x, (cos, sin), x.shape[1], x.shape[1], None, None)


def rotary_write_kv(heads: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor) -> None:
    """As attention.rotary_write_kv, but the keys in heads stay as they are: only their pages get them turned.

    slots: [T], int32, of attention_index.AttentionIndex.
    """
    num_kv_heads = kv.shape[2]
    num_rotated = heads.shape[1] - num_kv_heads
    _launch(heads, (cos, sin), num_rotated, num_rotated - num_kv_heads, kv, slots)


def write_kv(kv: Tensor, keys_values: Tensor, slots: Tensor) -> None:
    """As attention.write_kv. slots: as in rotary_write_kv."""
    _launch(keys_values, None, 0, 0, kv, slots)


def _launch(
    heads: Tensor,
    factors: tuple[Tensor, Tensor] | None,
    num_rotated: int,
    num_kept: int,
    kv: Tensor | None,
    slots: Tensor | None,
) -> None:
    """heads: [T, all heads, D]. The first num_rotated are turned; the first num_kept stay where they are, and
    the others are written to kv."""
    num_tokens, num_heads, head_dim = heads.shape
    if heads.stride(2) != 1 or heads.stride(1) != head_dim:
        raise RuntimeError(f"heads {tuple(heads.shape)} with strides {heads.stride()} must lie side by side")
    if factors is not None and any(factor.shape != (num_tokens, 1, head_dim) for factor in factors):
        shapes = [tuple(factor.shape) for factor in factors]
        raise RuntimeError(f"cos and sin {shapes} do not fit heads {tuple(heads.shape)}")
    if kv is not None and slots is not None:
        needed = (slots.shape[0], num_kept + 2 * kv.shape[2], kv.shape[4])
        if num_kept < 0 or heads.shape != needed:
            raise RuntimeError(
                f"heads {tuple(heads.shape)} do not fit {needed[0]} tokens of kv {tuple(kv.shape)}"
            )
    cos, sin = factors or (None, None)
    if num_tokens:
        _rotate_and_write[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            heads,
            cos,
            sin,
            kv,
            slots,
            heads.stride(0),
            0 if kv is None else kv.stride(0),
            NUM_HEADS=num_heads,
            NUM_ROTATED=num_rotated,
            NUM_KEPT=num_kept,
            HEAD_DIM=head_dim,
            PAGE_SIZE=1 if kv is None else kv.shape[3],
            HEADS=_HEADS,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=2,
            **launch_options(heads.device),
        )


@triton.jit
def _rotary_factors(
    cos,
    sin,
    positions,
    inv_freq,
    scaling,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < HALF
    angles = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + dims, mask=inside, other=0.0)
    c = (tl.cos(angles) * scaling).to(cos.dtype.element_ty)
    s = tl.sin(angles) * scaling
    first = token * 2 * HALF + dims
    tl.store(cos + first, c, mask=inside)
    tl.store(cos + first + HALF, c, mask=inside)
    tl.store(sin + first, (-s).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + first + HALF, s.to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_write(
    heads,
    cos,
    sin,
    kv,
    slots,
    token_stride,
    page_stride,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """HEADS heads of one token, their two halves as two tiles."""
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (dims < HALF)
    source = heads + token * token_stride + head * HEAD_DIM + dims
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    if NUM_ROTATED > 0:
        factors = token * HEAD_DIM + HALF + dims
        c = tl.load(cos + factors, mask=dims < HALF, other=0.0)
        s = tl.load(sin + factors, mask=dims < HALF, other=0.0)
        turned_low = _product(low, c) - _product(high, s)
        turned_high = _product(high, c) + _product(low, s)
        low = tl.where(head < NUM_ROTATED, turned_low.to(low.dtype), low)
        high = tl.where(head < NUM_ROTATED, turned_high.to(high.dtype), high)
        kept = inside & (head < NUM_KEPT)
        tl.store(source, low, mask=kept)
        tl.store(source + HALF, high, mask=kept)
    if NUM_KEPT < NUM_HEADS:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            place = kv + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * HEAD_DIM
            target = place + (head - NUM_KEPT) * PAGE_SIZE * HEAD_DIM + dims
            written = inside & (head >= NUM_KEPT)
            tl.store(target, low, mask=written)
            tl.store(target + HALF, high, mask=written)


@triton.jit
def _product(x, factor):
    """Rounded to the dtype of x, as float32. Left to itself, the compiler rounds a sum of products once."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype).to(tl.float32)
