"""What a computation allocates on the CPU.

PyTorch's profiler sees each block that its allocator hands out and takes back, those inside ops included.
"""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated(compute: Callable[[], object]) -> list[int]:
    """Bytes that there are more than at first, after each block that compute() takes or gives back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    results = profiler.profiler
    assert results is not None
    events = results.kineto_results.events()
    return list(accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))
