"""Copies from the host to a GPU: loads on a stream of their own, and what each step sends ahead of itself."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

STAGED_STEPS = 4
"""Steps whose memory may be on its way to the device at once; the next one waits for the first of them."""

T = TypeVar("T")


def copy_to_device(target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Begins to copy pinned memory to a GPU, from address to address.

    For many copies by one thread, which a tensor's copy_ would keep busy. Errors: KernelError.
    """
    from cuda.bindings import driver

    from deltaplane_kernels.cuda_module import check

    with torch.cuda.device(stream.device):
        stream.query()  # makes torch's context the thread's own
        (status,) = driver.cuMemcpyHtoDAsync(target, source, num_bytes, driver.CUstream(stream.cuda_stream))
    check(status, f"copying {num_bytes} bytes to {stream.device}")


class LoadStream:
    """A stream for loads, which may come from any thread, one at a time. No other stream waits for it, and no
    lock is held that a step takes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._loaded = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that are begun inside are done when this is left; for that the caller sleeps, without the
        GIL."""
        with self._lock, torch.cuda.stream(self._stream):
            yield
            self._loaded.record(self._stream)
            self._loaded.synchronize()


class StepStaging(Generic[T]):
    """Pinned memory for what steps send, used in turn. For one thread."""

    def __init__(self, make: Callable[[], T], device: torch.device) -> None:
        """make: takes the memory of one step."""
        self._device = device
        with torch.inference_mode(False):
            self._memory = [(make(), torch.cuda.Event()) for _ in range(STAGED_STEPS)]  # type: ignore[no-untyped-call]
        self._next = 0

    @contextmanager
    def turn(self) -> Iterator[T]:
        """Memory that no copy is read from any more; copies out of it are begun inside, on the current
        stream."""
        memory, sent = self._memory[self._next]
        self._next = (self._next + 1) % STAGED_STEPS
        sent.synchronize()
        yield memory
        sent.record(torch.cuda.current_stream(self._device))
