"""Times of kernels as a serving step runs them: in a CUDA graph, one after the other."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

L2_BYTES = 60e6
"""Of an H200. Calls that go round among several times as many bytes do not find theirs in the cache."""


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Of one of the calls, the median of `repeats` replays of a graph of them all."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    for _ in range(3):
        graph.replay()
    for i, event in enumerate(events):
        if i:
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [float(before.elapsed_time(after)) for before, after in pairwise(events)]
    return statistics.median(times) * 1e3 / len(calls)
