"""The order of administrators' changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltaplane_controlplane.errors import UnavailableError


class Turn:
    """A lock that is held while one change is made, which may wait for the disk, and that refuses all after
    the last.

    Errors: UnavailableError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise UnavailableError("the server is shutting down")

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    @contextmanager
    def last(self) -> Iterator[None]:
        """The last turn. May be taken again."""
        with self._lock:
            self._closed = True
            yield


def nothing() -> None:
    """The check of a change that is wanted whatever happens."""
