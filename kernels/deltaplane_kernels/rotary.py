"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split form of the Llama family."""

import torch
from torch import Tensor


def rotary_factors(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The factors that apply_rotary takes: computed once a step, used by every layer.

    positions: [T], int32 or int64.
    inv_freq: [D / 2], float32, radians per position.
    scaling: multiplies both factors (YaRN's attention factor; 1 without it).
    Returns (cos, sin), each [T, 1, D] in `dtype`, with angle position * inv_freq[i] at i and at i + D / 2;
    the first half of sin is negated, so that a rotation is one roll and two products.
    """
    if positions.is_cuda:
        from deltaplane_kernels import rotary_triton

        return rotary_triton.rotary_factors(positions, inv_freq, scaling, dtype)
    angles = positions[:, None].float() * inv_freq
    cos = angles.cos().mul_(scaling)
    sin = angles.sin().mul_(scaling)
    return (
        torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
    )


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates in place: x[t, h, i] = x[t, h, i] * cos[t, i] + x[t, h, (i + D / 2) mod D] * sin[t, i].

    x: [T, heads, D], D even; may be a view into packed q, k and v.
    cos, sin: [T, 1, D] from rotary_factors, in the dtype of x.
    Errors: RuntimeError when the shapes do not fit.
    """
    if x.is_cuda:
        from deltaplane_kernels import rotary_triton

        rotary_triton.apply_rotary(x, cos, sin)
        return
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).add_(swapped.mul_(sin))
