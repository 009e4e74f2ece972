"""The CUDA sources compile for the GPUs that are served, without one, and agree with Python."""

import ctypes
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltaplane_kernels import (
    attention_cuda,
    few_rows_cuda,
    lora_cuda,
    lora_launch,
    lora_norm_cuda,
    lora_slots,
)
from deltaplane_kernels.attention_cuda import DecodeLaunch
from deltaplane_kernels.few_rows_cuda import FewRowLaunch
from deltaplane_kernels.lora_launch import Launch, NormLaunch
from deltaplane_kernels.lora_tiles import LONG_TILE, SHORT_TILE
from deltaplane_kernels.nvrtc import compile_cubin
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS
from deltaplane_kernels.tensor_map import TensorMap

HEADERS = _, _, STEP, NORM = [
    lora_cuda.SOURCE.parent / name
    for name in ("elements.cuh", "bulk_copies.cuh", "lora_step.cuh", "expand_norm.cuh")
]


def lora_kernels() -> list[str]:
    names = ["shrink_float32"]
    for dtype in lora_cuda.DTYPES.values():
        names.append(f"expand_{dtype}")
        if dtype != "float32":
            names += [f"shrink_{dtype}_{rows}" for rows in (SHORT_TILE, LONG_TILE)]
    return names


KERNELS = {
    lora_cuda.SOURCE: lora_kernels(),
    few_rows_cuda.SOURCE: [
        f"few_rows_{dtype}_{outputs}"
        for dtype in few_rows_cuda.DTYPES.values()
        for outputs in few_rows_cuda.OUTPUTS
    ],
    attention_cuda.SOURCE: [
        f"decode_{dtype}_{head_dim}"
        for dtype in attention_cuda.DTYPES.values()
        for head_dim in attention_cuda.HEAD_DIMS
    ],
}


ARCHITECTURES = {
    lora_cuda.SOURCE: ["sm_80", "sm_90a", "sm_100", "sm_120"],
    attention_cuda.SOURCE: ["sm_90a", "sm_100", "sm_120"],
    few_rows_cuda.SOURCE: ["sm_90a"],
}


@pytest.mark.parametrize(
    ("source", "arch"),
    [(source, arch) for source, archs in ARCHITECTURES.items() for arch in archs],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_all_kernels_compile_without_a_gpu(source: Path, arch: str, tmp_path: Path) -> None:
    cubin = compile_cubin(source, arch, cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    names = [*KERNELS[source]]
    if source == lora_cuda.SOURCE and arch != "sm_80":  # has clusters
        names += [f"expand_add_rms_norm_{dtype}" for dtype in ("bfloat16", "float16")]
    for name in names:
        assert f".text.{name}\0".encode() in cubin


@pytest.mark.parametrize(
    ("source", "structure"),
    [
        (STEP, Launch),
        (NORM, NormLaunch),
        (few_rows_cuda.SOURCE, FewRowLaunch),
        (attention_cuda.SOURCE, DecodeLaunch),
    ],
    ids=["lora", "lora_norm", "few_rows", "decode_attention"],
)
def test_the_launch_structure_is_that_of_the_source(source: Path, structure: type[ctypes.Structure]) -> None:
    body = re.search(r"struct \w*Launch \{(.*?)\n\};", source.read_text(), re.DOTALL)
    assert body is not None
    types: dict[str, Any] = {
        "Launch": Launch,
        "TensorMap": TensorMap,
        "const void*": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
        "float*": ctypes.c_void_p,
        "float2*": ctypes.c_void_p,
        "int*": ctypes.c_void_p,
        "const int*": ctypes.c_void_p,
        "const long long*": ctypes.c_void_p,
        "long long": ctypes.c_longlong,
        "int": ctypes.c_int,
        "float": ctypes.c_float,
    }
    fields = re.findall(r"^    (.+?) (\w+)(\[MAX_SLICES\])?;", body[1], re.MULTILINE)
    expected = [(name, types[kind] * 4 if array else types[kind]) for kind, name, array in fields]
    assert structure._fields_ == expected
    if "TensorMap" in body[1]:
        assert ctypes.sizeof(structure) % 64 == 0  # the driver copies as many bytes as the kernel's has


def constants(source: Path) -> dict[str, int]:
    values: dict[str, int] = {}
    for path in (*HEADERS, source):
        for name, expression in re.findall(r"^constexpr int (\w+) = (.+?);", path.read_text(), re.MULTILINE):
            values[name] = eval(expression.replace("/", "//"), {}, values)
    return values


@pytest.mark.parametrize(
    ("module", "source", "name"),
    [(lora_launch, lora_cuda.SOURCE, name) for name in ("THREADS", "COLUMN_BLOCK", "MAX_SLICES")]
    + [(lora_slots, lora_cuda.SOURCE, name) for name in ("MAX_RANK", "HAS_GAIN", "HAS_BIAS", "IS_BLEND")]
    + [(lora_norm_cuda, lora_cuda.SOURCE, name) for name in ("VECTOR", "MAX_CLUSTER", "MAX_THREADS")]
    + [
        (few_rows_cuda, few_rows_cuda.SOURCE, name)
        for name in ("THREADS", "ROWS", "COLUMNS", "BOX", "GROUP", "MAX_STAGES", "BARRIERS", "SUMS")
    ]
    + [
        (attention_cuda, attention_cuda.SOURCE, name)
        for name in ("KEYS", "BOX", "STAGES", "MAX_GROUP", "MAX_WARPS")
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_constants_are_those_of_the_source(module: ModuleType, source: Path, name: str) -> None:
    assert getattr(module, name) == constants(source)[name]


def test_a_rank_page_has_as_many_rows_as_the_kernels_take() -> None:
    assert constants(lora_cuda.SOURCE)["PAGE_ROWS"] == RANK_PAGE_ROWS


def test_a_block_of_expand_fits_beside_one_of_the_product_of_few_rows() -> None:
    """So that it starts, and loads B, while the product runs."""
    of_multiprocessor, reserved = 228 * 1024, 1024  # of compute capability 9.0; by CUDA, in each block
    sizes = constants(STEP)
    shrunk = sizes["SUBTILE"] * (sizes["MAX_ROWS"] + 4) * 4
    assert few_rows_cuda.SHARED_BYTES + shrunk + 2 * reserved <= of_multiprocessor
