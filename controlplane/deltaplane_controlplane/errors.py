"""The errors of deltaplane, drawn once.

    DeltaplaneError
    ├── InvalidArgumentError      a field of the request is out of bounds, or files cannot be served exactly
    ├── NotFoundError             no such adapter or version
    ├── AlreadyExistsError        the name or the request id is taken
    ├── FailedPreconditionError   the state of an adapter forbids it (failed, pinned, in use)
    ├── AbortedError              an etag does not match
    ├── OutOfRangeError           a resume token is too old
    ├── ResourceExhaustedError    a queue, a tier or a limit is full; may be retried
    ├── UnavailableError          the server is draining; may be retried
    ├── DeadlineExceededError     the caller's deadline passed first
    ├── CancelledError            the caller gave up, or an administrator cancelled it
    ├── UnauthenticatedError      the call does not say by whom it is made, or not credibly
    └── InternalError             a fault of ours

`status.py` holds the one table from these to gRPC codes. Messages say what, why and what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is out of bounds.

    field: its path in the request message, such as "sampling.top_p".
    description: the value, the limit and how to mend it.
    """

    field: str
    description: str


class DeltaplaneError(Exception):
    """Base of all errors that cross a plane.

    reason: UPPER_SNAKE_CASE, stable, for programs (google.rpc.ErrorInfo.reason).
    metadata: further facts for programs (google.rpc.ErrorInfo.metadata).
    """

    reason = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.metadata = dict(metadata or {})


class InvalidArgumentError(DeltaplaneError):
    """A field of the request is out of bounds, or an adapter's files cannot be served exactly."""

    reason = "INVALID_ARGUMENT"

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.violations = tuple(violations)

    @classmethod
    def for_field(cls, field: str, description: str, *, reason: str | None = None) -> "InvalidArgumentError":
        """The error for one field: `description` says value, limit and how to mend it."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)], reason=reason)


class NotFoundError(DeltaplaneError):
    """No such adapter or version."""

    reason = "NOT_FOUND"


class AlreadyExistsError(DeltaplaneError):
    """The name of the adapter, or the id of the request, is taken."""

    reason = "ALREADY_EXISTS"


class FailedPreconditionError(DeltaplaneError):
    """The state of an adapter forbids it."""

    reason = "FAILED_PRECONDITION"


class AbortedError(DeltaplaneError):
    """Somebody else changed the adapter in between."""

    reason = "ETAG_MISMATCH"


class OutOfRangeError(DeltaplaneError):
    """A resume token is too old to go on from."""

    reason = "RESUME_TOKEN_EXPIRED"


class RetryableError(DeltaplaneError):
    """May succeed later. retry_after_s: seconds to wait before the next try."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class ResourceExhaustedError(RetryableError):
    """A queue, a tier or a limit is full."""

    reason = "RESOURCE_EXHAUSTED"


class UnavailableError(RetryableError):
    """The server is not serving now."""

    reason = "UNAVAILABLE"


class DeadlineExceededError(DeltaplaneError):
    """The caller's deadline passed first."""

    reason = "DEADLINE_EXCEEDED"


class CancelledError(DeltaplaneError):
    """The caller gave up, or an administrator cancelled the operation."""

    reason = "CANCELLED"


class UnauthenticatedError(DeltaplaneError):
    """The call does not say by whom it is made, or not credibly."""

    reason = "UNAUTHENTICATED"


class InternalError(DeltaplaneError):
    """A fault of deltaplane's."""

    reason = "INTERNAL"
