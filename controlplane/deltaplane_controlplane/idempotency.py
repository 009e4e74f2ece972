"""Answers to requests that may be sent twice."""

import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from deltaplane_controlplane.errors import InvalidArgumentError

_MAX_KEY_LENGTH = 45
"""Of a UUID as a URN."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """request: its SHA-256, for a request may be large."""

    request: bytes
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

    def once(self, key: str, request: object, call: Callable[[], T]) -> T:
        """Answers `call()`, or what it answered when the same request came with this key before; the second
        of two at the same time waits for the first. An empty key remembers nothing.

        request: all that makes two requests the same, by its repr.
        Errors: InvalidArgumentError (the key is no UUID, or came with another request), and those of `call`.
        """
        if not key:
            return call()
        _check_uuid(key)
        digest = _digest(request)
        with self._lock:
            self._drop_old()
            entry = self._entries.get(key)
            first = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry(digest, Future(), self._clock())
        _check_same(key, entry.request, digest)
        if first:
            self._answer(key, entry, call)
        return entry.answer.result()

    def find(self, key: str, request: object) -> T | None:
        """What the same request was answered before with this key; None where it was not, or not yet.

        Errors: InvalidArgumentError, as `once`.
        """
        if not key:
            return None
        _check_uuid(key)
        with self._lock:
            self._drop_old()
            entry = self._entries.get(key)
        if entry is None:
            return None
        _check_same(key, entry.request, _digest(request))
        return entry.answer.result() if entry.answer.done() else None

    def forget(self, key: str) -> None:
        """The request of this key has failed after all: it can be tried again."""
        with self._lock:
            self._entries.pop(key, None)

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


def _digest(request: object) -> bytes:
    return hashlib.sha256(repr(request).encode()).digest()


def _check_same(key: str, earlier: bytes, digest: bytes) -> None:
    if earlier != digest:
        raise InvalidArgumentError.for_field(
            "idempotency_key", f"{key} came with another request before: use a new UUID for each request"
        )


def _check_uuid(key: str) -> None:
    try:
        if len(key) > _MAX_KEY_LENGTH:
            raise ValueError
        uuid.UUID(key)
    except ValueError:
        raise InvalidArgumentError.for_field(
            "idempotency_key", f"{key[:_MAX_KEY_LENGTH]!r} is not a UUID"
        ) from None
