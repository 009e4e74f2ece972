"""The product of few rows with a weight on a GPU: csrc/few_rows.cu and its launches.

At few rows a step is bound by its weights, which are read once, and by what stands still between two of
them. So the kernel asks for its weight before the kernel ahead of it has ended (programmatic dependent
launch), and by bulk tensor copies, as the large tiles of cuBLAS do. And it leaves registers and shared memory
for the shrink of LoRA, which runs beside it.

The two numbers, for T rows in two-byte types: 2 in out bytes, at 4.26 TB/s on an H200; 2 T in out operations,
on tensor cores, nothing at 16 rows. With 1 to 8 rows the qkv, o and down projections of Llama-3-8B take 14.5,
9.8 and 29.2 us instead of cuBLAS's 16.2, 12.6 and 31.2, and a step of 16 rows on 16 adapters 5.37 ms instead
of 5.58.

In CUDA graphs alone: outside of them a launch, which encodes a tensor map of its x, costs the host more than
it saves the GPU.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_kernels.cuda_module import CudaKernel, has_bulk_copies, load_module
from deltaplane_kernels.tensor_map import TensorMap, tensor_map

SOURCE = Path(__file__).parent / "csrc" / "few_rows.cu"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# As in few_rows.cu.
THREADS = 288
OUTPUTS = 32
COLUMNS = 512
BOX = 64
SHARED_BYTES = {8: 182_336, 16: 215_104}
"""By the most rows of a kernel."""

MAX_OUTPUTS = 8192
"""For more, cuBLAS is faster by 2 to 4 %."""


class FewRowLaunch(ctypes.Structure):
    """What a launch is given, by value: struct Launch of few_rows.cu, which explains the fields."""

    _fields_ = [
        ("weight", TensorMap),
        ("x", TensorMap),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_pitch", ctypes.c_longlong),
        ("num_rows", ctypes.c_int),
        ("in_features", ctypes.c_int),
        ("out_features", ctypes.c_int),
        ("to_alignment", ctypes.c_byte * 24),  # of TensorMap
    ]


class FewRowLinear:
    """y[T, N] = x[T, K] @ weight[N, K]^T + bias[N] for at most max_rows rows."""

    def __init__(self, kernels: Mapping[int, CudaKernel], weight: Tensor, bias: Tensor | None) -> None:
        """kernels: by their most rows. Errors: KernelError."""
        self._kernels = kernels
        self.max_rows = max(kernels)
        self._weight = weight
        self._bias = bias
        self._weight_map = tensor_map(weight, OUTPUTS, COLUMNS, BOX)

    def __call__(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Returns `out`, or a new tensor where that is None. Errors: KernelError."""
        out_features, in_features = self._weight.shape
        y = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device) if out is None else out
        rows = min(rows for rows in self._kernels if len(x) <= rows)
        kernel = self._kernels[rows]
        launch = FewRowLaunch(
            weight=self._weight_map,
            x=tensor_map(x, rows, COLUMNS, BOX),
            bias=None if self._bias is None else self._bias.data_ptr(),
            y=y.data_ptr(),
            y_pitch=y.stride(0),
            num_rows=len(x),
            in_features=in_features,
            out_features=out_features,
        )
        grid = min(out_features // OUTPUTS, kernel.resident_blocks)
        described = f"x {tuple(x.shape)} and weight {tuple(self._weight.shape)} of {x.dtype}"
        stream = torch.cuda.current_stream(x.device)
        kernel.launch(grid, stream.cuda_stream, launch, lambda: described)
        return y


def few_row_linear(weight: Tensor, bias: Tensor | None) -> FewRowLinear | None:
    """weight: [N, K] of neighbouring elements. None where no kernel takes it: in float32, where N is above
    MAX_OUTPUTS or no multiple of OUTPUTS, K none of BOX, and where the GPU has not what it needs.

    Errors: CompileError, KernelError.
    """
    outputs, inputs = weight.shape
    if weight.dtype not in DTYPES or outputs > MAX_OUTPUTS or not weight.is_contiguous():
        return None
    if outputs % OUTPUTS or inputs % BOX or not is_able(weight.device):
        return None
    return FewRowLinear(_kernels(weight.device, weight.dtype), weight, bias)


def is_able(device: torch.device) -> bool:
    """Whether a GPU has what the kernels need."""
    return has_bulk_copies(device, max(SHARED_BYTES.values()))


@cache
def _kernels(device: torch.device, dtype: torch.dtype) -> dict[int, CudaKernel]:
    module = load_module(SOURCE, device)
    return {
        rows: module.kernel(f"few_rows_{DTYPES[dtype]}_{rows}", THREADS, shared_bytes=shared_bytes)
        for rows, shared_bytes in SHARED_BYTES.items()
    }
