"""The threads that loads of adapters share."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import length_hint
from typing import Generic, TypeVar

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
        such as with a disk that does not answer. An iterator is asked for one item after the other, by the
        threads that take them: the first calls begin before the last items are there.

        Errors: that of the first item in order whose call had one, or that could not be had.
        """
        calls = _Calls(work, iter(items))
        for _ in range(min(self.num_threads, length_hint(items, self.num_threads)) - 1):
            self._helpers.submit(calls.make)
        calls.make()
        wait(calls.results)
        return [result.result() for result in calls.results]


class _Calls(Generic[Item, Result]):
    """Calls that several threads make. results: of those that a thread has taken, in order."""

    def __init__(self, work: Callable[[Item], Result], items: Iterator[Item]) -> None:
        self.results: list[Future[Result]] = []
        self._work = work
        self._items = items
        self._lock = threading.Lock()

    def make(self) -> None:
        """Makes the calls that no other thread has taken."""
        while (taken := self._take()) is not None:
            item, result = taken
            try:
                result.set_result(self._work(item))
            except BaseException as error:
                result.set_exception(error)

    def _take(self) -> tuple[Item, Future[Result]] | None:
        """The next item and where its result goes; None after the last."""
        result: Future[Result] = Future()
        with self._lock:
            try:
                item = next(self._items)
            except StopIteration:
                return None
            except BaseException as error:
                result.set_exception(error)
                self.results.append(result)
                return None
            self.results.append(result)
        return item, result
