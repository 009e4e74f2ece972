"""CUDA C++ to machine code by NVRTC, kept on disk: no compiler and no GPU is needed, only NVIDIA's wheels.

The package `cuda-bindings` calls NVRTC, and `nvidia-cuda-nvrtc` is NVRTC.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda.bindings import nvrtc

OPTIONS = ("--std=c++17",)

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_DIGEST_BYTES = hashlib.sha256().digest_size
_logger = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_folder() -> Path:
    """Where cubins are kept: ``$DELTAPLANE_CACHE/kernels``, by default ``~/.cache/deltaplane/kernels``."""
    root = os.environ.get("DELTAPLANE_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "deltaplane") / "kernels"


def architecture(major: int, minor: int) -> str:
    """The target of a GPU's compute capability: (9, 0) is "sm_90a"."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compile_cubin(
    source: Path, arch: str, options: Sequence[str] = OPTIONS, cache: Path | None = None
) -> bytes:
    """The cubin of a CUDA C++ file for `arch` ("sm_90a"), from the cache where it is there and whole.

    The file may include others of its folder, by lines of `#include "name"`, which include none.

    The name of a cached file holds a hash of the source, the arch, the options and NVRTC's version. Files are
    written whole or not at all; a cache that cannot be written costs a warning and a compilation.
    cache: cache_folder() by default.
    Errors: CompileError with NVRTC's log.
    """
    text = _with_headers(source)
    path = (cache or cache_folder()) / f"{source.stem}-{arch}-{_key(text, arch, options)}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = _compile(text, source.name, arch, options)
        try:
            _write(path, cubin)
        except OSError as error:
            _logger.warning("compiled kernels are not kept, and compiled again at each start: %s", error)
    return cubin


def _with_headers(source: Path) -> str:
    return _INCLUDE.sub(lambda line: (source.parent / line[1]).read_text(), source.read_text())


def _key(text: str, arch: str, options: Sequence[str]) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    parts = json.dumps([text, arch, list(options), major, minor])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    """What _write wrote; None where it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _compile(text: str, name: str, arch: str, options: Sequence[str]) -> bytes:
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    _check(status, "nvrtcCreateProgram")
    try:
        flags = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC refused {name} for {arch}: {status.name}\n{_log(program)}")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(status, "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin)[0], "nvrtcGetCUBIN")
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: object) -> str:
    status, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(status, "nvrtcGetProgramLogSize")
    log = bytearray(size)
    _check(nvrtc.nvrtcGetProgramLog(program, log)[0], "nvrtcGetProgramLog")
    return log.rstrip(b"\0").decode(errors="replace").strip()


def _check(status: nvrtc.nvrtcResult, call: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{call} failed: {status.name}")
