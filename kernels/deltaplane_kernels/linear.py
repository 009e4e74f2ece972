"""The dense product of a decoder with a frozen weight."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 16
"""Rows of x that oneDNN lays a weight out for. One layout serves all batch sizes: prefill and decode
stay within a few percent of a layout made for them."""


class Linear:
    """y[T, N] = x[T, K] @ weight[N, K]^T + bias[N].

    weight, bias: float32, bfloat16 or float16, of one dtype and device; x has the same. The products are
    accumulated in float32.

    On a CPU with oneDNN the weight is kept in oneDNN's own blocked layout, made once here: the products
    are about twice as fast as with a row-major weight, at one row as at hundreds. `weight` may be freed
    by the caller afterwards. Elsewhere it is kept as it is (cuBLAS needs no other layout).

    Errors: ValueError when the shapes do not fit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            shape = None if bias is None else tuple(bias.shape)
            raise ValueError(f"weight {tuple(weight.shape)} and bias {shape} are not [N, K] and [N]")
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._blocked = _can_block(weight)
        self._weight = _block(weight) if self._blocked else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, K]. Returns a new [T, N]."""
        if self._blocked:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return cast(Tensor, y)
        return F.linear(x, self._weight, self._bias)


def _can_block(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


def _block(weight: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT))
