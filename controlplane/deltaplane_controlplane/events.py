"""What happened to adapters, for watchers: a bounded log that each of them reads at its own pace."""

import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from deltaplane_controlplane.errors import (
    DeltaplaneError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.views import AdapterView

_TOKEN = re.compile(r"(?P<epoch>[0-9a-f]{8})\.(?P<sequence>-1|[0-9]{1,18})")

_BUSY_RETRY_S = 5.0


class EventType(Enum):
    """What an event tells (see AdapterEventType in adapters.proto)."""

    FETCHING = "fetching"
    REGISTERED = "registered"
    UPDATED = "updated"
    LOADING = "loading"
    LOADED = "loaded"
    EVICTED = "evicted"
    PINNED = "pinned"
    FAILED = "failed"
    DRAINING = "draining"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """A change. adapter: after it. version: the number that it happened to. time: seconds since the epoch.

    The adapter itself is gone when DELETED tells of its current version; else an earlier version is.
    """

    type: EventType
    adapter: AdapterView
    version: int
    reason: str
    time: float
    resume_token: str


class EventLog:
    """The last `capacity` events. A reader who falls more than `max_lag` behind is cut off; it may resume
    from its token while the log still reaches back that far, and has until then to catch up.

    Readers share the log and have no queue of their own, so a reader that never reads costs nothing. The
    idea is etcd's: a watch is a position in a bounded history. Each event wakes all readers, so there are at
    most `max_readers`.
    """

    def __init__(self, capacity: int = 8192, max_lag: int = 2048, max_readers: int = 1024) -> None:
        self._ring: list[AdapterEvent | None] = [None] * capacity
        self._max_lag = max_lag
        self._max_readers = max_readers
        self._next = 0
        self._epoch = secrets.token_hex(4)
        self._subscriptions: set[Subscription] = set()
        self._closed = False
        self._lock = threading.Lock()

    def append(self, kind: EventType, adapter: AdapterView, version: int, reason: str, time: float) -> None:
        """Writes an event. Readers learn of it with `notify`."""
        with self._lock:
            event = AdapterEvent(kind, adapter, version, reason, time, self._token(self._next))
            self._ring[self._next % len(self._ring)] = event
            self._next += 1

    def notify(self) -> None:
        """Wakes all readers."""
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.wake()

    @property
    def num_readers(self) -> int:
        """Those that there are now."""
        with self._lock:
            return len(self._subscriptions)

    def subscribe(self, wake: Callable[[], None], resume_token: str = "") -> "Subscription":
        """A reader that starts behind the event of `resume_token`, or with what comes next.

        wake: called from any thread when there may be something to read.
        Errors: InvalidArgumentError (no token of ours), OutOfRangeError (too old, or of another process),
        ResourceExhaustedError (too many readers).
        """
        with self._lock:
            if len(self._subscriptions) >= self._max_readers:
                raise ResourceExhaustedError(
                    f"{len(self._subscriptions)} watches are open, which is all that --max-watches lets in: "
                    "end one, or raise the limit",
                    reason="TOO_MANY_WATCHES",
                    retry_after_s=_BUSY_RETRY_S,
                )
            position = self._position(resume_token)
            is_behind = self._next - position > self._max_lag
            subscription = Subscription(self, wake, position, is_catching_up=is_behind)
            self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """Ends all subscriptions: their next read is an UnavailableError."""
        with self._lock:
            self._closed = True
        self.notify()

    def read(self, position: int, limit: int, *, is_catching_up: bool) -> list[AdapterEvent]:
        """At most `limit` events from a position on.

        is_catching_up: as far behind as the log reaches back is not too far.
        Errors: ResourceExhaustedError (the reader is too far behind), UnavailableError (closed).
        """
        max_lag = len(self._ring) if is_catching_up else min(self._max_lag, len(self._ring))
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is shutting down")
            if self._next - position > max_lag:
                raise ResourceExhaustedError(
                    f"the watcher is {self._next - position} events behind, {max_lag} are allowed: "
                    "resume from the last token, and read faster or narrow the filter",
                    reason="WATCHER_TOO_SLOW",
                )
            stop = min(self._next, position + limit)
            return [e for i in range(position, stop) if (e := self._ring[i % len(self._ring)]) is not None]

    def is_near(self, position: int) -> bool:
        """Whether a reader there is not too far behind."""
        with self._lock:
            return self._next - position <= self._max_lag

    def token(self, position: int) -> str:
        """The token to resume with at a position."""
        return self._token(position - 1)

    def forget(self, subscription: "Subscription") -> None:
        with self._lock:
            self._subscriptions.discard(subscription)

    def _token(self, sequence: int) -> str:
        return f"{self._epoch}.{sequence}"

    def _position(self, token: str) -> int:
        if not token:
            return self._next
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise InvalidArgumentError.for_field(
                "resume_token", f"{token!r} is not a token of a watch: send one as it was received, or none"
            )
        position = int(match["sequence"]) + 1
        if match["epoch"] != self._epoch or not self._next - len(self._ring) <= position <= self._next:
            raise _too_old(token)
        return position


class Subscription:
    """A reader's position in the log. Use as a context manager."""

    def __init__(
        self, log: EventLog, wake: Callable[[], None], position: int, *, is_catching_up: bool
    ) -> None:
        self._log = log
        self._position = position
        self._is_catching_up = is_catching_up
        self.wake = wake

    @property
    def resume_token(self) -> str:
        """The token to resume with after what was read so far."""
        return self._log.token(self._position)

    def read(self, limit: int = 64) -> list[AdapterEvent]:
        """What is new, at once; empty where nothing is. Errors: as EventLog.read."""
        events = self._log.read(self._position, limit, is_catching_up=self._is_catching_up)
        self._position += len(events)
        self._is_catching_up = self._is_catching_up and not self._log.is_near(self._position)
        return events

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.forget(self)


def _too_old(token: str) -> DeltaplaneError:
    return OutOfRangeError(
        f"resume_token: {token!r} is too old, or of an earlier run of the server: "
        "watch afresh, without a token"
    )
