"""Where and in which numbers the model runs."""

import os

import torch

from deltaplane_controlplane.errors import InvalidArgumentError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device of EngineConfig.device; "auto" is the first CUDA device, else the CPU.

    Errors: InvalidArgumentError for a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError.for_field(
            "device", f"{name!r} is not known; use auto, cpu, cuda or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError.for_field(
            "device",
            f"{name!r} is not there, {torch.cuda.device_count()} CUDA devices are; use cpu or another one",
        )
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype of EngineConfig.dtype; "auto" is float32 on a CPU, else the checkpoint's own.

    Errors: InvalidArgumentError for a dtype that is not served.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    if name not in _DTYPES:
        raise InvalidArgumentError.for_field(
            "dtype", f"{name!r} is not served; use auto, {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def resolve_num_threads(num_threads: int | None) -> int:
    """CPU threads of a step, EngineConfig.num_threads; None is all cores but one, and at least one.

    The core left over is the event loop's. Threads of a step wait for each other many times in a layer: with
    one too many, each such wait lasts until the event loop yields its core (on two cores, two threads made a
    mixed batch slower than one did by a third). OMP_NUM_THREADS, where it is set, is a bound as well.
    """
    if num_threads is not None:
        return num_threads
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))
