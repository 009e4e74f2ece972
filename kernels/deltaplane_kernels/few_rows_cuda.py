"""The product of few rows with a weight on a GPU: csrc/few_rows.cu and its launches.

At few rows a step is bound by its weights, which are read once, and by what stands still between two of
them. So the kernel asks for its weight before the kernel ahead of it has ended (programmatic dependent
launch), and by bulk tensor copies, as the large tiles of cuBLAS do.

The two numbers, for T rows in two-byte types: 2 in out bytes, at 4.26 TB/s on an H200; 2 T in out operations,
on tensor cores, nothing at 8 rows.

In CUDA graphs alone: outside of them a launch, which encodes a tensor map of its x, costs the host more than
it saves the GPU.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_kernels.cuda_module import CudaKernel, CudaModule, max_shared_bytes, tensor_map
from deltaplane_kernels.nvrtc import architecture, compile_cubin

SOURCE = Path(__file__).parent / "csrc" / "few_rows.cu"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# As in few_rows.cu.
THREADS = 288
ROWS = 8
OUTPUTS = 32
COLUMNS = 512
BOX = 64
SHARED_BYTES = 182_336

TensorMap = ctypes.c_uint64 * 16


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
    ]


class FewRowLinear:
    """y[T, N] = x[T, K] @ weight[N, K]^T + bias[N] for at most ROWS rows."""

    def __init__(self, kernel: CudaKernel, weight: Tensor, bias: Tensor | None) -> None:
        """Errors: KernelError."""
        self._kernel = kernel
        self._weight = weight
        self._bias = bias
        self._weight_map = TensorMap(*tensor_map(weight, OUTPUTS, COLUMNS, BOX))

    def __call__(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Returns `out`, or a new tensor where that is None. Errors: KernelError."""
        out_features, in_features = self._weight.shape
        y = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device) if out is None else out
        launch = FewRowLaunch(
            weight=self._weight_map,
            x=TensorMap(*tensor_map(x, ROWS, COLUMNS, BOX)),
            bias=None if self._bias is None else self._bias.data_ptr(),
            y=y.data_ptr(),
            y_pitch=y.stride(0),
            num_rows=len(x),
            in_features=in_features,
            out_features=out_features,
        )
        grid = min(out_features // OUTPUTS, self._kernel.resident_blocks)
        described = f"x {tuple(x.shape)} and weight {tuple(self._weight.shape)} of {x.dtype}"
        stream = torch.cuda.current_stream(x.device)
        self._kernel.launch(grid, stream.cuda_stream, launch, lambda: described)
        return y


def few_row_linear(weight: Tensor, bias: Tensor | None) -> FewRowLinear | None:
    """weight: [N, K] of neighbouring elements. None where no kernel takes it: in float32, where N is no
    multiple of OUTPUTS or K none of BOX, and where the GPU has not what it needs.

    Errors: CompileError, KernelError.
    """
    outputs, inputs = weight.shape
    if weight.dtype not in DTYPES or outputs % OUTPUTS or inputs % BOX or not weight.is_contiguous():
        return None
    kernel = _load(weight.device, weight.dtype)
    return None if kernel is None else FewRowLinear(kernel, weight, bias)


@cache
def _load(device: torch.device, dtype: torch.dtype) -> CudaKernel | None:
    """None without compute capability 9 or above, or without the shared memory."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9 or max_shared_bytes(device) < SHARED_BYTES:
        return None
    module = CudaModule(compile_cubin(SOURCE, architecture(properties.major, properties.minor)), device)
    return module.kernel(f"few_rows_{DTYPES[dtype]}", THREADS, shared_bytes=SHARED_BYTES)
