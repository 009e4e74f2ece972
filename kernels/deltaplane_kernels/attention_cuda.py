"""Attention of decodes over KV pages on a GPU: csrc/decode_attention.cu and its launches.

The two numbers of a layer of Llama-3-8B in two-byte types, for each token of context of a sequence: 4 KB of
keys and values, and 16 kFLOP, nothing beside them. 64 sequences of 256 tokens take 67 MB, 16 us at the
4.26 TB/s of an H200. So decodes are bound by bytes and, where contexts are short, by loads that wait for one
another: a sequence's place in the block tables, its page numbers, keys, values. Blocks that fill the device
ask for three tiles of each warp at once, and most of them before the kernel ahead has ended. These 64 take
19 us, where the kernel of attention_triton.py takes 21, 16 of them 7 instead of 14, and one 3 instead of 8.

A step's own tokens aside, the keys that its decodes attend to must have been written by earlier steps.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deltaplane_kernels.attention import as_rows
from deltaplane_kernels.attention_index import MIN_SPLITS, AttentionIndex, processors
from deltaplane_kernels.cuda_module import CudaKernel, CudaModule, has_bulk_copies, load_module
from deltaplane_kernels.tensor_map import TensorMap, tensor_map

SOURCE = Path(__file__).parent / "csrc" / "decode_attention.cu"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
HEAD_DIMS = (64, 128)

# As in decode_attention.cu and bulk_copies.cuh.
KEYS = 16
BOX = 64
STAGES = 3
MAX_GROUP = 8
MAX_WARPS = 8

MAX_HEADS_OF_TOKENS = 2**31
"""Keys and values of a head and token are numbered in 32 bits."""

SHARED_KEYS = 512
"""Fewest keys of a split where blocks fill the device without splits, and sequences of about the mean length
are left whole: only one that all others would wait for is shared out."""


class DecodeLaunch(ctypes.Structure):
    """What a launch is given, by value: struct Launch of decode_attention.cu, which explains the fields."""

    _fields_ = [
        ("kv", TensorMap),
        ("out", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("q_pitch", ctypes.c_longlong),
        ("page_rows", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("window", ctypes.c_int),
        ("most_splits", ctypes.c_int),
        ("least_keys", ctypes.c_int),
        ("spares_even_ones", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


def takes(q: Tensor, kv: Tensor) -> bool:
    """Whether launch_decode may be called with q and kv: two-byte types, heads of 64 or 128 columns, at most
    8 query heads for each KV head, pages of a multiple of 16 tokens, heads of tokens in all layers and pages
    that 32 bits count, and a GPU that has what it needs."""
    num_kv_heads, page_size, head_dim = kv.shape[2:]
    return (
        q.dtype in DTYPES
        and head_dim in HEAD_DIMS
        and q.shape[1] <= MAX_GROUP * num_kv_heads
        and page_size % KEYS == 0
        and len(kv) * kv.stride(0) // head_dim < MAX_HEADS_OF_TOKENS
        and q.is_cuda
        and has_bulk_copies(q.device, _shared_bytes(MAX_WARPS, max(HEAD_DIMS)))
    )


def launch_decode(out: Tensor, q: Tensor, kv: Tensor, index: AttentionIndex, window: int | None) -> None:
    """Writes the rows of out [T, Hq * D] that are decodes; the rest as attention_gpu.paged_attention.

    Errors: CompileError, KernelError.
    """
    num_kv_heads, page_size, head_dim = kv.shape[2:]
    num_programs = index.max_decodes * num_kv_heads
    shape = LaunchShape.of(num_programs, processors(kv.device))
    kernel = _kernel(kv.device, q.dtype, head_dim, shape.warps)
    sums, weights = index.workspace.partials(q.shape[1], head_dim)
    launch = DecodeLaunch(
        kv=tensor_map(as_rows(kv, head_dim), KEYS, head_dim, BOX),
        out=out.data_ptr(),
        q=q.data_ptr(),
        counts=index.counts.data_ptr(),
        rows=index.rows.data_ptr(),
        starts=index.starts.data_ptr(),
        table_starts=index.table_starts.data_ptr(),
        tables=index.tables.data_ptr(),
        sums=sums.data_ptr(),
        weights=weights.data_ptr(),
        counters=index.workspace.counters.data_ptr(),
        q_pitch=q.stride(0),
        page_rows=kv.stride(0) // head_dim,
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        page_size=page_size,
        window=window or 0,
        most_splits=shape.most_splits,
        least_keys=shape.least_keys,
        spares_even_ones=shape.fills_device,
        scale=math.log2(math.e) / head_dim**0.5,
    )
    grid = max(num_programs, min(num_programs * shape.most_splits, kernel.resident_blocks))
    operands = f"q {tuple(q.shape)} and kv {tuple(kv.shape)} of {q.dtype}"
    kernel.launch(grid, torch.cuda.current_stream(kv.device).cuda_stream, launch, lambda: operands)


class LaunchShape(NamedTuple):
    """How decodes are shared out among blocks.

    warps: of a block. fills_device: whether they do so without splits. most_splits: of a decode.
    least_keys: of a split.
    """

    warps: int
    fills_device: bool
    most_splits: int
    least_keys: int

    @classmethod
    def of(cls, num_programs: int, num_processors: int) -> "LaunchShape":
        """num_programs: decodes times KV heads."""
        warps = 2 if num_programs > 2 * num_processors else 4 if num_programs > num_processors else MAX_WARPS
        if 2 * num_programs >= num_processors:
            return cls(warps, True, MIN_SPLITS, SHARED_KEYS)
        return cls(warps, False, max(num_processors // num_programs, MIN_SPLITS), 2 * warps * KEYS)


def _shared_bytes(warps: int, head_dim: int) -> int:
    tile = 2 * KEYS * head_dim * 2
    return warps * STAGES * (tile + 8) + 16


@cache
def _kernel(device: torch.device, dtype: torch.dtype, head_dim: int, warps: int) -> CudaKernel:
    name = f"decode_{DTYPES[dtype]}_{head_dim}"
    return _module(device).kernel(name, warps * 32, shared_bytes=_shared_bytes(warps, head_dim))


@cache
def _module(device: torch.device) -> CudaModule:
    return load_module(SOURCE, device)
