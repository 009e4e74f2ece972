"""The gated activation of the feed-forward block (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up, where gate and up are the two halves of the last dimension.

    gate_up: [T, 2 * I], float32, bfloat16 or float16.
    Returns [T, I] in the same dtype; silu is rounded to it before the product.
    Errors: ValueError when the last dimension is odd.
    """
    size, rest = divmod(gate_up.shape[-1], 2)
    if rest:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; gate and up need an even number")
    if gate_up.is_cuda:
        from deltaplane_kernels import activation_triton

        return activation_triton.silu_mul(gate_up)
    return F.silu(gate_up[..., :size]).mul_(gate_up[..., size:])
