"""What the GPU did while something ran, by torch's profiler (CUPTI)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Span(NamedTuple):
    """A kernel or a copy. start, stop: ns of the profiler's clock. name: as the driver knows it."""

    start: int
    stop: int
    name: str


def gpu_trace(run: Callable[[], object]) -> list[Span]:
    """All that the GPU did of what a run launched, by start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    return sorted(
        Span(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
