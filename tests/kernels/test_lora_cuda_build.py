"""The CUDA sources compile for the GPUs that are served and agree with Python; what is compiled is kept."""

import ctypes
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltaplane_kernels import few_rows_cuda, lora_cuda, lora_slots
from deltaplane_kernels.few_rows_cuda import FewRowLaunch, TensorMap
from deltaplane_kernels.lora_cuda import DTYPES, SOURCE, Launch
from deltaplane_kernels.lora_tiles import LONG_TILE, SHORT_TILE
from deltaplane_kernels.nvrtc import OPTIONS, CompileError, architecture, cache_folder, compile_cubin
from deltaplane_kernels.rank_pages import RANK_PAGE_ROWS

TINY = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }\n'


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    source = tmp_path / "tiny.cu"
    source.write_text(TINY)
    return source


def cached(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_all_kernels_compile_without_a_gpu(arch: str, tmp_path: Path) -> None:
    cubin = compile_cubin(SOURCE, arch, cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    for dtype in DTYPES.values():
        tiles = [""] if dtype == "float32" else [f"_{rows}" for rows in (SHORT_TILE, LONG_TILE)]
        for name in (f"expand_{dtype}", *(f"shrink_{dtype}{tile}" for tile in tiles)):
            assert f".text.{name}\0".encode() in cubin


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100", "sm_120"])
def test_the_product_of_few_rows_compiles_without_a_gpu(arch: str, tmp_path: Path) -> None:
    cubin = compile_cubin(few_rows_cuda.SOURCE, arch, cache=tmp_path)
    for dtype in few_rows_cuda.DTYPES.values():
        assert f".text.few_rows_{dtype}\0".encode() in cubin


@pytest.mark.parametrize(
    ("source", "structure"),
    [(SOURCE, Launch), (few_rows_cuda.SOURCE, FewRowLaunch)],
    ids=["lora", "few_rows"],
)
def test_the_launch_structure_is_that_of_the_source(source: Path, structure: type[ctypes.Structure]) -> None:
    body = re.search(r"struct Launch \{(.*?)\n\};", source.read_text(), re.DOTALL)
    assert body is not None
    types: dict[str, Any] = {
        "TensorMap": TensorMap,
        "const void*": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
        "float*": ctypes.c_void_p,
        "const int*": ctypes.c_void_p,
        "long long": ctypes.c_longlong,
        "int": ctypes.c_int,
    }
    fields = re.findall(r"^    (.+?) (\w+)(\[MAX_SLICES\])?;", body[1], re.MULTILINE)
    expected = [(name, types[kind] * 4 if array else types[kind]) for kind, name, array in fields]
    assert structure._fields_ == expected


def constants(*sources: Path) -> dict[str, int]:
    values: dict[str, int] = {}
    for source in sources:
        for name, expression in re.findall(
            r"^constexpr int (\w+) = (.+?);", source.read_text(), re.MULTILINE
        ):
            values[name] = eval(expression.replace("/", "//"), {}, values)
    return values


ELEMENTS = SOURCE.parent / "elements.cuh"


@pytest.mark.parametrize(
    ("module", "name"),
    [(lora_cuda, name) for name in ("THREADS", "COLUMN_BLOCK", "MAX_SLICES")]
    + [(lora_slots, name) for name in ("MAX_RANK", "HAS_GAIN", "HAS_BIAS", "IS_BLEND")],
)
def test_the_constants_are_those_of_the_source(module: ModuleType, name: str) -> None:
    values = constants(ELEMENTS, SOURCE)
    assert getattr(module, name) == values[name]
    assert values["PAGE_ROWS"] == RANK_PAGE_ROWS


@pytest.mark.parametrize("name", ["THREADS", "ROWS", "OUTPUTS", "COLUMNS", "BOX", "SHARED_BYTES"])
def test_the_constants_of_the_product_of_few_rows_are_those_of_the_source(name: str) -> None:
    assert getattr(few_rows_cuda, name) == constants(ELEMENTS, few_rows_cuda.SOURCE)[name]


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")])
def test_the_architecture_of_a_compute_capability(capability: tuple[int, int], arch: str) -> None:
    assert architecture(*capability) == arch


def test_a_cubin_is_compiled_once(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = (*OPTIONS, "-DVALUE=1")
    first = compile_cubin(tiny, "sm_90a", options, cache)
    (path,) = cached(cache)
    written = path.stat().st_mtime_ns
    assert compile_cubin(tiny, "sm_90a", options, cache) == first
    assert cached(cache) == [path]
    assert path.stat().st_mtime_ns == written


def test_another_source_arch_or_option_is_another_cubin(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = (*OPTIONS, "-DVALUE=1")
    compile_cubin(tiny, "sm_90a", options, cache)
    compile_cubin(tiny, "sm_80", options, cache)
    compile_cubin(tiny, "sm_90a", (*OPTIONS, "-DVALUE=2"), cache)
    tiny.write_text(TINY + "// changed\n")
    compile_cubin(tiny, "sm_90a", options, cache)
    assert len(cached(cache)) == 4


def test_another_header_is_another_cubin(tmp_path: Path) -> None:
    source, header, cache = tmp_path / "tiny.cu", tmp_path / "value.cuh", tmp_path / "cache"
    header.write_text("constexpr int VALUE = 1;\n")
    source.write_text('#include "value.cuh"\n\n' + TINY)
    compile_cubin(source, "sm_90a", cache=cache)
    header.write_text("constexpr int VALUE = 2;\n")
    compile_cubin(source, "sm_90a", cache=cache)
    assert len(cached(cache)) == 2


@pytest.mark.parametrize("damage", [b"", b"half a file"])
def test_a_damaged_cubin_is_compiled_again(tiny: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "cache"
    options = (*OPTIONS, "-DVALUE=1")
    whole = compile_cubin(tiny, "sm_90a", options, cache)
    (path,) = cached(cache)
    kept = path.read_bytes()
    path.write_bytes(damage)
    assert compile_cubin(tiny, "sm_90a", options, cache) == whole
    assert path.read_bytes() == kept


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cubin = compile_cubin(tiny, "sm_90a", (*OPTIONS, "-DVALUE=1"), tmp_path / "file" / "cache")
    assert cubin.startswith(b"\x7fELF")
    assert "compiled again at each start" in caplog.text


def test_a_source_that_does_not_compile_is_refused_with_the_log(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r'(?s)NVRTC refused tiny.cu for sm_90a: .*"VALUE" is undefined'):
        compile_cubin(tiny, "sm_90a", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_cache_is_in_the_folder_of_deltaplane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAPLANE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "kernels"
    monkeypatch.delenv("DELTAPLANE_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "deltaplane" / "kernels"
