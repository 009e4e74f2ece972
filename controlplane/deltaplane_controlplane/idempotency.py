"""Answers to requests that may be sent twice."""

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from deltaplane_controlplane.errors import InvalidArgumentError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    request: Hashable
    answer: Future[T]
    begun: float


class IdempotencyCache(Generic[T]):
    """Remembers the answers of the last `ttl_s` seconds by the key that the caller chose, at most `capacity`
    of them. A failed request is forgotten, so that it can be tried again."""

    def __init__(
        self, ttl_s: float = 600.0, capacity: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._lock = threading.Lock()

    def once(self, key: str, request: Hashable, call: Callable[[], T]) -> T:
        """Answers `call()`, or what it answered when the same request came with this key before; the second
        of two at the same time waits for the first. An empty key remembers nothing.

        Errors: InvalidArgumentError (the key is no UUID, or came with another request), and those of `call`.
        """
        if not key:
            return call()
        _check_uuid(key)
        with self._lock:
            self._drop_old()
            entry = self._entries.get(key)
            first = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry(request, Future(), self._clock())
        if entry.request != request:
            raise InvalidArgumentError.for_field(
                "idempotency_key", f"{key} came with another request before: use a new UUID for each request"
            )
        if first:
            self._answer(key, entry, call)
        return entry.answer.result()

    def _answer(self, key: str, entry: _Entry[T], call: Callable[[], T]) -> None:
        try:
            entry.answer.set_result(call())
        except BaseException as error:
            with self._lock:
                self._entries.pop(key, None)
            entry.answer.set_exception(error)

    def _drop_old(self) -> None:
        too_old = self._clock() - self._ttl_s
        while self._entries and (
            len(self._entries) >= self._capacity or next(iter(self._entries.values())).begun <= too_old
        ):
            self._entries.popitem(last=False)


def _check_uuid(key: str) -> None:
    try:
        uuid.UUID(key)
    except ValueError:
        raise InvalidArgumentError.for_field("idempotency_key", f"{key!r} is not a UUID") from None
