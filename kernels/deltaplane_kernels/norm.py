"""Root-mean-square norms (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), over the last dimension.

    x: [..., H], float32, bfloat16 or float16.
    weight: [H], dtype of x.
    Returns [..., H] in the dtype of x. Statistics and quotient are float32; the quotient is rounded to the
    dtype of x before the product with weight, as the models are trained.
    Errors: RuntimeError when the shape of weight does not fit.
    """
    if x.is_cuda:
        from deltaplane_kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    wide = x.float()
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place; returns rms_norm(residual, weight, eps).

    x, residual: [T, H]; weight: [H]; all of one dtype. x is left alone.
    Errors: RuntimeError when the shapes do not fit.
    """
    if x.is_cuda:
        from deltaplane_kernels import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)
