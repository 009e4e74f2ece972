"""The dense product of a decoder with a frozen weight."""

from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from deltaplane_kernels.few_rows_cuda import FewRowLinear

_ROWS_HINT = 16
"""Rows of x that oneDNN lays a weight out for. One layout serves all batch sizes: prefill and decode
stay within a few percent of a layout made for them."""

_LT_ROWS = range(33, 129)
"""Rows of x for which cuBLASLt is taken instead of cuBLAS, which choose among the same kernels differently.
On an H200 a decode step of Llama-3-8B in bfloat16 takes 5.07 ms instead of 5.26 with 64 rows, 6.14 instead of
6.23 with 128, but 4.84 instead of 4.78 with 16; with 1 and with 256 they are equal."""


class BaseProduct(Protocol):
    """What LoRA is told of the product that it adds to; a Linear is one."""

    def can_announce(self, num_rows: int) -> bool:
        """See Linear.can_announce."""
        ...

    def __call__(self, x: Tensor, *, x_is_there: Tensor | None = None) -> Tensor:
        """See Linear.__call__."""
        ...


class Linear:
    """y[T, N] = x[T, K] @ weight[N, K]^T + bias[N].

    weight, bias: float32, bfloat16 or float16, of one dtype and device; x has the same. The products are
    accumulated in float32.

    On a CPU with oneDNN the weight is kept in oneDNN's own blocked layout, made once here: the products
    are about twice as fast as with a row-major weight, at one row as at hundreds. `weight` may be freed
    by the caller afterwards. Elsewhere it is kept as it is (cuBLAS needs no other layout).

    The two numbers of a decode step of Llama-3-8B in two-byte types: 15.0 GB of weights, 3.5 ms on an H200,
    and 15 GFLOP a row, which take as long at about 200 rows. So decodes are bound by bytes. The products
    take 3.6 ms at 1 row, 3.9 at 64 and 6.9 at 256.

    Errors: ValueError when the shapes do not fit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            shape = None if bias is None else tuple(bias.shape)
            raise ValueError(f"weight {tuple(weight.shape)} and bias {shape} are not [N, K] and [N]")
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._blocked = _can_block(weight)
        self._weight = _block(weight) if self._blocked else weight
        self._few_rows = _few_row_linear(weight, bias) if weight.is_cuda else None

    def can_announce(self, num_rows: int) -> bool:
        """Whether __call__ would tell when its x is there: the kernel of few rows does, in graphs."""
        return self._few_rows_for(num_rows) is not None

    def __call__(self, x: Tensor, out: Tensor | None = None, x_is_there: Tensor | None = None) -> Tensor:
        """x: [T, K]. Returns [T, N]: `out`, or a new tensor where that is None.

        x_is_there: [1], int32, set to 1 as soon as the kernels ahead of this one have ended, where it
            can_announce() that. What is launched behind it may then wait for that instead of its end.
        On a GPU this sets torch's preferred BLAS library for the whole process.
        """
        if self._blocked:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return cast(Tensor, y) if out is None else out.copy_(y)
        if x.is_cuda:
            if (few_rows := self._few_rows_for(len(x))) is not None:
                return few_rows(x, out, x_is_there)
            torch.backends.cuda.preferred_blas_library("cublaslt" if len(x) in _LT_ROWS else "cublas")
        if out is None:
            return F.linear(x, self._weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self._weight.t(), out=out)
        return torch.addmm(self.bias, x, self._weight.t(), out=out)

    def _few_rows_for(self, num_rows: int) -> "FewRowLinear | None":
        """The kernel that computes so many rows now, if there is one."""
        few_rows = self._few_rows
        if few_rows is None or num_rows > few_rows.max_rows:
            return None
        return few_rows if torch.cuda.is_current_stream_capturing() else None

    def product(self, x: Tensor, begin: int, end: int) -> Tensor:
        """x[T, K] @ weight[begin:end]^T, without the bias. Leaves torch's choice of a BLAS library alone."""
        if self._blocked:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return cast(Tensor, y)[:, begin:end]
        return torch.mm(x, self._weight[begin:end].t())

    def rows(self, begin: int, end: int) -> Tensor:
        """weight[begin:end], [end - begin, K]: where it lies, or in a copy of a weight in oneDNN's layout."""
        weight = self._weight.to_dense() if self._blocked else self._weight
        return weight[begin:end]


def _few_row_linear(weight: Tensor, bias: Tensor | None) -> "FewRowLinear | None":
    """NVIDIA's packages are imported for a weight on a GPU alone."""
    from deltaplane_kernels.few_rows_cuda import few_row_linear

    return few_row_linear(weight, bias)


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
