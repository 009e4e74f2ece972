"""Root-mean-square norms (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowWeights:
    """The weight of each row on a GPU, chosen by the kernels of norms themselves.

    Row t has base [H], unless slots[t] is a slot with a weight of its own: the H elements of `pool`, whatever
    its shape, from offsets[slots[t]] on.

    slots: [T], int32; below 0 where a row has no slot. No kernel of a step writes them.
    offsets: [num_slots], int64, of any stride; below 0 where a slot has no weight of its own.
    """

    base: Tensor
    slots: Tensor
    offsets: Tensor
    pool: Tensor


NormWeight = Tensor | RowWeights
"""[H] for all rows; or of each row, [T, H] on a CPU and RowWeights on a GPU."""


def check_weight(weight: NormWeight, num_rows: int, size: int) -> tuple[Tensor, RowWeights | None]:
    """The weight of the base, and those of rows where there are such: for num_rows rows of `size`, on a GPU.

    Errors: RuntimeError where they do not fit.
    """
    own, base = (weight, weight.base) if isinstance(weight, RowWeights) else (None, weight)
    if base.shape != (size,):
        raise RuntimeError(f"weight {tuple(base.shape)} does not fit rows of {size}")
    if own is not None and own.slots.shape != (num_rows,):
        raise RuntimeError(f"slots {tuple(own.slots.shape)} do not fit {num_rows} rows")
    return base, own


def rms_norm(x: Tensor, weight: NormWeight, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), over the last dimension.

    x: [..., H], float32, bfloat16 or float16; [T, H] or [T, heads, H] where each row t has its own weight.
    weight: dtype of x.
    Returns [..., H] in the dtype of x. Statistics and quotient are float32; the quotient is rounded to the
    dtype of x before the product with weight, as the models are trained.
    Errors: RuntimeError when the shape of weight does not fit.
    """
    if x.is_cuda:
        from deltaplane_kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    assert isinstance(weight, Tensor)
    if weight.ndim == 2 and x.ndim == 3:
        weight = weight[:, None]
    wide = x.float()
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: NormWeight, eps: float) -> Tensor:
    """residual += x, in place; returns rms_norm(residual, weight, eps).

    x, residual: [T, H], of the dtype of weight. x is left alone.
    Errors: RuntimeError when the shapes do not fit.
    """
    if x.is_cuda:
        from deltaplane_kernels import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)
