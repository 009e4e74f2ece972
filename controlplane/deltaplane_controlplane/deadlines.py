"""Calls that are to be made at a time."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)


class Deadlines:
    """Makes calls at their time, on one thread of its own, which starts with the first of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Makes a call at `when`, in seconds of the monotonic clock, or at once if that has passed."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (when, next(self._order), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="adapter-deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drops what is still to come and waits for the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _log.exception("deadline.call_failed")

    def _next(self) -> Callable[[], object] | None:
        """Waits for the next call that is due; None when closed."""
        with self._changed:
            while not self._closed:
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(wait)
            return None
