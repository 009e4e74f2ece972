"""CUDA sources are compiled once, and what is compiled is kept."""

from pathlib import Path

import pytest

from deltaplane_kernels.nvrtc import OPTIONS, CompileError, architecture, cache_folder, compile_cubin

TINY = 'extern "C" __global__ void fill(int* out) { out[threadIdx.x] = VALUE; }\n'


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    source = tmp_path / "tiny.cu"
    source.write_text(TINY)
    return source


def cached(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


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
