"""The threads that loads of adapters share."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_THREADS = 8


class LoadThreads:
    """A few threads that help those that load adapters.

    num_threads: of one load at most, with its own; by default half of the cores, the others are for running
    streams, and 8 at most.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._helpers = ThreadPoolExecutor(max(1, self.num_threads - 1), thread_name_prefix="adapter-load")

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """work(item) of each, in order. Comes back when no call is under way any more, also with an error.

        The caller takes items as well, so that it waits for nobody where others keep all the helpers busy,
        such as with a disk that does not answer.

        Errors: that of the first item in order whose call had one.
        """
        calls: list[tuple[Item, Future[Result]]] = [(item, Future()) for item in items]
        waiting = deque(calls)
        for _ in range(min(self.num_threads, len(calls)) - 1):
            self._helpers.submit(_make_calls, work, waiting)
        _make_calls(work, waiting)
        results = [result for _, result in calls]
        wait(results)
        return [result.result() for result in results]


def _make_calls(work: Callable[[Item], Result], waiting: deque[tuple[Item, Future[Result]]]) -> None:
    """Makes the calls that no other thread has taken."""
    while True:
        try:
            item, result = waiting.popleft()
        except IndexError:
            return
        try:
            result.set_result(work(item))
        except BaseException as error:
            result.set_exception(error)
