"""How a kernel is told of a matrix that it copies piece by piece (csrc/bulk_copies.cuh)."""

import ctypes

import torch
from cuda.bindings import driver
from torch import Tensor

from deltaplane_kernels.cuda_module import check

_TENSOR_TYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}


TensorMap = ctypes.c_uint64 * 16
"""A matrix as kernels are told of it, in a structure of ctypes."""


def tensor_map(matrix: Tensor, rows: int, columns: int, box: int) -> ctypes.Array[ctypes.c_uint64]:
    """How kernels are told of a matrix that they copy by pieces of [rows, columns].

    matrix: of bfloat16 or float16, its rows of neighbouring elements, starting at multiples of 16 bytes.
    box: columns whose rows follow one another in shared memory, 128 bytes each and with the 128-byte swizzle;
        a piece is [columns / box, rows, box] there. It divides the matrix's columns.
    Errors: KernelError.
    """
    num_rows, num_columns = matrix.shape
    size = matrix.element_size()
    status, encoded = driver.cuTensorMapEncodeTiled(
        _TENSOR_TYPES[matrix.dtype],
        3,
        matrix.data_ptr(),
        [driver.cuuint64_t(extent) for extent in (box, num_rows, num_columns // box)],
        [driver.cuuint64_t(stride) for stride in (matrix.stride(0) * size, box * size)],
        [driver.cuuint32_t(extent) for extent in (box, rows, columns // box)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    check(status, f"encoding {tuple(matrix.shape)} of {matrix.dtype} in pieces of {rows} x {columns}")
    return TensorMap(*(int(part) for part in encoded.opaque))
