"""The lock of the adapter manager, and what has to wait until it is released."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


class Monitor:
    """A lock that is held for moments only: no I/O, no waiting, no call of foreign code while it is held.

    What a change entails outside (log lines, hooks, answers to waiting threads) is handed to `after` and
    runs on the same thread once the lock is released, in order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._after: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        calls, self._after = self._after, []
        self._lock.release()
        for call in calls:
            self._run(call)

    def after(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Runs the call when the lock, which the caller holds, is released. What it raises is logged."""
        self._after.append(partial(call, *args, **kwargs))

    @staticmethod
    def _run(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            _log.exception("monitor.call_failed", call=repr(call))
