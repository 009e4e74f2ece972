"""How much of the time the GPU works while something runs, by torch's profiler (CUPTI)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCH_NS = 5_000
"""Gaps up to this long lie between two kernels of a graph; a host that is late leaves longer ones."""


@dataclass(frozen=True)
class Busy:
    """share: of the time in which a kernel or a copy runs. waited: of the time in gaps of more than 5 us."""

    share: float
    waited: float


def gpu_busy(run: Callable[[], object], *, skip: float = 0.25) -> Busy:
    """Runs it under the profiler. skip: the part of all kernels and copies, from the first on, that does not
    count: a run's prefill."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    return busy_of(spans[int(skip * len(spans)) :])


def busy_of(spans: list[tuple[int, int]]) -> Busy:
    """spans: of start and end, by start."""
    gaps, end = [], spans[0][1]
    for start, stop in spans[1:]:
        gaps.append(max(start - end, 0))
        end = max(end, stop)
    whole = end - spans[0][0]
    return Busy(1 - sum(gaps) / whole, sum(gap for gap in gaps if gap > _LAUNCH_NS) / whole)
