"""How much of the time the GPU works while something runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.gpu_trace import Span, gpu_trace

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
    spans = gpu_trace(run)
    return busy_of(spans[int(skip * len(spans)) :])


def busy_of(spans: Sequence[Span]) -> Busy:
    """spans: by start, at least one."""
    gaps, end = [], spans[0].stop
    for span in spans[1:]:
        gaps.append(max(span.start - end, 0))
        end = max(end, span.stop)
    whole = end - spans[0].start
    return Busy(1 - sum(gaps) / whole, sum(gap for gap in gaps if gap > _LAUNCH_NS) / whole)
