"""When a failed call is tried again.

A server answers every error that a request can earn before its first token ahead of the stream's headers,
which go out with the first message; so a stream may be tried again until a message has arrived, and never
after. A call that changes something is tried again only when the server itself refused it and said when to
come back, which means that nothing was done.
"""

import random
import time
from dataclasses import dataclass

from deltaplane.errors import DeltaplaneError, RetryableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how late a call is tried again on UNAVAILABLE and RESOURCE_EXHAUSTED.

    max_attempts: tries in all, the first one included; at least 1.
    initial_backoff, max_backoff: seconds. The backoff doubles from try to try, and the wait is drawn at
        random below it ("full jitter"), so that clients turned away together do not come back together. What
        the server asks for in RetryInfo is waited at least, up to max_backoff.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.2
    max_backoff: float = 10.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: {self.max_attempts} is below 1; 1 tries once and never again")
        if not 0 <= self.initial_backoff <= self.max_backoff:
            raise ValueError(
                f"initial_backoff: {self.initial_backoff} is not in [0, max_backoff={self.max_backoff}]"
            )

    def backoff(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after failed try number `attempt`, counted from 1."""
        ceiling = min(self.initial_backoff * 2.0 ** (attempt - 1), self.max_backoff)
        return min(max(random.uniform(0, ceiling), retry_after or 0.0), self.max_backoff)


class Attempts:
    """The tries of one call under one timeout, in seconds, that all of them share.

    idempotent: whether the call may be sent again when nobody knows if the server saw it.
    """

    def __init__(self, policy: RetryPolicy | None, *, timeout: float | None, idempotent: bool) -> None:
        self._policy = policy or RetryPolicy(max_attempts=1)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._idempotent = idempotent
        self._made = 0

    def remaining(self) -> float | None:
        """Seconds left for the next try; None where there is no timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def wait_after(self, error: DeltaplaneError) -> float | None:
        """Seconds to wait before the next try, or None when the error is final."""
        self._made += 1
        if not isinstance(error, RetryableError) or self._made >= self._policy.max_attempts:
            return None
        if not self._idempotent and error.retry_after is None:
            return None
        seconds = self._policy.backoff(self._made, error.retry_after)
        remaining = self.remaining()
        return seconds if remaining is None or seconds < remaining else None
