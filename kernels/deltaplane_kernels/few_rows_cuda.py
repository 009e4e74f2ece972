"""The product of few rows with a weight on a GPU: csrc/few_rows.cu and its launches.

At few rows a step is bound by its weights, which are read once, and by what stands still between two of
them. So the kernel asks for its weight before the kernel ahead of it has ended (programmatic dependent
launch), by bulk tensor copies, as the large tiles of cuBLAS do; and it asks for no more at once than keeps
the memory busy, as more would make the small kernels between two products wait behind it. It leaves registers
and shared memory for LoRA's shrink, which runs beside it, and for a block of the expand that comes next.

The two numbers, for T rows in two-byte types: 2 in out bytes, at 4.26 TB/s on an H200; 2 T in out operations
on tensor cores, a quarter of that time at 64 rows. A decode step of Llama-3-8B takes 4.05 ms with 1 row and
4.95 with 64, where cuBLAS's products make it 5.16.

In CUDA graphs alone: outside of them a launch, which encodes a tensor map of its x, costs the host more than
it saves the GPU.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from deltaplane_kernels.cuda_module import CudaKernel, has_bulk_copies, load_module
from deltaplane_kernels.tensor_map import TensorMap, tensor_map

SOURCE = Path(__file__).parent / "csrc" / "few_rows.cu"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# As in few_rows.cu.
THREADS = 192
ROWS = 64
COLUMNS = 128
BOX = 64
GROUP = 8
MAX_STAGES = 16
BARRIERS = 65
SUMS = 129

OUTPUTS = (48, 56, 64, 112)
"""Of a tile, each with a kernel of its own. Between them they share out most widths evenly."""

SPLITS = (1, 2, 4, 8)
"""Parts of the columns of a tile, each of a block of a cluster."""

X_STAGES = 4
"""Pieces of x that a block holds."""

BYTES_AHEAD = 36 * 1024
"""Of the weight that a block has on their way at once, rounded up to a whole piece, which makes it 36 to 56
KB: up to twice the bandwidth of a multiprocessor times the latency of the memory. With all that fits (150 KB)
a step takes 0.15 to 0.25 ms more, with half of it 0.4."""

SHARED_BYTES = 208 * 1024
"""Of a block. What it leaves of a multiprocessor's serves LoRA's shrink and expand."""

MAX_OUTPUTS = 32768
"""For more, cuBLAS is as fast."""


@dataclass(frozen=True)
class Tiling:
    """How a product is shared out among blocks.

    outputs: of a tile. splits: of SPLITS, more than 1 only where all tiles run at once. blocks: in all.
    """

    outputs: int
    splits: int
    blocks: int


def plan_tiling(out_features: int, in_features: int, resident_blocks: Mapping[int, int]) -> Tiling:
    """The tiling in which the busiest block has least to do.

    resident_blocks: that the GPU holds at once, by SPLITS.
    """

    def rounds(outputs: int, splits: int) -> int:
        return -(-out_features // outputs * splits // resident_blocks[splits])

    def cost(choice: tuple[int, int]) -> int:
        """Rows of pieces that are copied; a piece of x counts for a quarter, adding up splits for two."""
        outputs, splits = choice
        pieces = -(-in_features // (COLUMNS * splits))
        return rounds(outputs, splits) * pieces * (outputs + ROWS // 4) + 2 * ROWS * (splits > 1)

    def fits(outputs: int, splits: int) -> bool:
        if splits == 1:
            return True
        shares = outputs // GROUP % splits == 0 and COLUMNS * splits <= in_features
        return shares and rounds(outputs, splits) == 1

    outputs, splits = min((choice for choice in product(OUTPUTS, SPLITS) if fits(*choice)), key=cost)
    tiles = -(-out_features // outputs)
    return Tiling(outputs, splits, -(-tiles // rounds(outputs, splits)) * splits)


def weight_stages(outputs: int, x_rows: int) -> int:
    """Pieces of the weight that a block's shared memory holds beside X_STAGES of x."""
    sums = outputs // GROUP * SUMS * 16
    rest = SHARED_BYTES - sums - BARRIERS * 8 - X_STAGES * x_rows * COLUMNS * 2
    return min(rest // _piece_bytes(outputs), MAX_STAGES)


def _piece_bytes(outputs: int) -> int:
    return outputs * COLUMNS * 2


class FewRowLaunch(ctypes.Structure):
    """What a launch is given, by value: struct Launch of few_rows.cu, which explains the fields."""

    _fields_ = [
        ("weight", TensorMap),
        ("x", TensorMap),
        ("bias", ctypes.c_void_p),
        ("x_is_there", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_pitch", ctypes.c_longlong),
        ("num_rows", ctypes.c_int),
        ("in_features", ctypes.c_int),
        ("out_features", ctypes.c_int),
        ("x_rows", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("weight_stages", ctypes.c_int),
        ("x_stages", ctypes.c_int),
        ("weight_ahead", ctypes.c_int),
    ]


class FewRowLinear:
    """y[T, N] = x[T, K] @ weight[N, K]^T + bias[N] for at most max_rows rows."""

    max_rows = ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None, tiling: Tiling | None = None) -> None:
        """tiling: by default that of plan_tiling(). Errors: CompileError, KernelError."""
        self._weight = weight
        self._bias = bias
        kernels = _kernels(weight.device, weight.dtype)
        resident_blocks = {splits: kernels[OUTPUTS[0], splits].resident_blocks for splits in SPLITS}
        out_features, in_features = weight.shape
        self._tiling = tiling or plan_tiling(out_features, in_features, resident_blocks)
        self._kernel = kernels[self._tiling.outputs, self._tiling.splits]
        self._weight_map = tensor_map(weight, self._tiling.outputs, COLUMNS, BOX)

    def __call__(self, x: Tensor, out: Tensor | None, x_is_there: Tensor | None = None) -> Tensor:
        """x: [T, K]. Returns [T, N]: `out`, or a new tensor where that is None.

        x, out: of neighbouring elements in a row; rows start at multiples of 16 bytes.
        x_is_there: [1], int32, set to 1 as soon as the kernels ahead of this one have ended.
        Errors: KernelError.
        """
        outputs = self._tiling.outputs
        out_features, in_features = self._weight.shape
        y = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device) if out is None else out
        x_rows = -(-len(x) // GROUP) * GROUP
        stages = weight_stages(outputs, x_rows)
        launch = FewRowLaunch(
            weight=self._weight_map,
            x=tensor_map(x, x_rows, COLUMNS, BOX),
            bias=None if self._bias is None else self._bias.data_ptr(),
            x_is_there=None if x_is_there is None else x_is_there.data_ptr(),
            y=y.data_ptr(),
            y_pitch=y.stride(0),
            num_rows=len(x),
            in_features=in_features,
            out_features=out_features,
            x_rows=x_rows,
            splits=self._tiling.splits,
            weight_stages=stages,
            x_stages=X_STAGES,
            weight_ahead=min(-(-BYTES_AHEAD // _piece_bytes(outputs)), stages),
        )
        described = f"x {tuple(x.shape)} and weight {tuple(self._weight.shape)} of {x.dtype}"
        stream = torch.cuda.current_stream(x.device)
        self._kernel.launch(self._tiling.blocks, stream.cuda_stream, launch, lambda: described)
        return y


def few_row_linear(weight: Tensor, bias: Tensor | None) -> FewRowLinear | None:
    """weight: [N, K] of neighbouring elements. None where no kernel takes it: in float32, where N is above
    MAX_OUTPUTS or no multiple of GROUP, K none of BOX, and where the GPU has not what it needs.

    Errors: CompileError, KernelError.
    """
    outputs, inputs = weight.shape
    if weight.dtype not in DTYPES or outputs > MAX_OUTPUTS or not weight.is_contiguous():
        return None
    if outputs % GROUP or inputs % BOX or not is_able(weight.device):
        return None
    return FewRowLinear(weight, bias)


def is_able(device: torch.device) -> bool:
    """Whether a GPU has what the kernels need: they are for compute capability 9.0 alone."""
    return torch.cuda.get_device_capability(device) == (9, 0) and has_bulk_copies(device, SHARED_BYTES)


@cache
def _kernels(device: torch.device, dtype: torch.dtype) -> dict[tuple[int, int], CudaKernel]:
    """By the outputs of a tile and its splits."""
    module = load_module(SOURCE, device)
    return {
        (outputs, splits): module.kernel(
            f"few_rows_{DTYPES[dtype]}_{outputs}", THREADS, shared_bytes=SHARED_BYTES, cluster=splits
        )
        for outputs, splits in product(OUTPUTS, SPLITS)
    }
