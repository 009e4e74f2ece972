"""Captures CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class GraphRecorder:
    """Captures graphs one after the other, which share one pool of memory.

    The largest comes first: the others then do with the memory that it took. So they are replayed one after
    the other, on one stream, and what is to outlive a replay is written to memory from elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around record(), and around what makes the inputs of what it captures."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the graphs have taken is in the pool

    def record(self, compute: Callable[[], None], *, warm_up: bool) -> torch.cuda.CUDAGraph:
        """compute: launches kernels on the current stream. warm_up: also calls it outside of the capture:
        there its kernels are compiled, and workspaces are taken."""
        if warm_up:
            compute()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would first give all cached memory, pinned too, back to the driver.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            compute()
        finally:
            graph.capture_end()
        return graph
