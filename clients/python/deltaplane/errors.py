"""What a call can fail with, drawn once.

    DeltaplaneError                   any status that has no class of its own below
    ├── InvalidArgumentError          a field is out of bounds: see `violations`
    ├── NotFoundError                 no such adapter or version
    ├── AlreadyExistsError            the adapter's name, or the request id, is taken
    ├── FailedPreconditionError       the state of an adapter forbids it (failed, pinned, in use)
    ├── AbortedError                  an etag does not match: read the adapter again
    ├── OutOfRangeError               a resume token is too old: watch afresh
    ├── RetryableError                may succeed later: see `retry_after`
    │   ├── ResourceExhaustedError    a queue, a tier or a limit is full
    │   └── UnavailableError          the server drains, or cannot be reached
    ├── DeadlineExceededError         the call's timeout passed
    ├── CallCancelledError            the call was cancelled
    ├── UnauthenticatedError          the call brought no token that the server accepts
    ├── UnimplementedError            the server does not serve this part of the API
    └── InternalError                 a fault of the server's

A status carries its details as google.rpc messages: ErrorInfo (reason and metadata), BadRequest (violations)
and RetryInfo (retry_after).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"

_Detail = TypeVar("_Detail", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that is out of bounds.

    field: its path in the request message, such as "sampling.top_p".
    description: the value, the limit and how to mend it.
    """

    field: str
    description: str


class DeltaplaneError(Exception):
    """A call failed.

    message: what went wrong, for people.
    code: the gRPC status.
    reason: UPPER_SNAKE_CASE and stable, for programs; empty where no deltaplane server answered.
    metadata: further facts for programs.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason
        self.metadata = dict(metadata or {})


class InvalidArgumentError(DeltaplaneError):
    """A field of the request is out of bounds, or an adapter's files cannot be served exactly."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    violations: tuple[FieldViolation, ...] = ()

    @classmethod
    def for_field(cls, field: str, description: str) -> Self:
        """The error of a value that cannot be put on the wire at all."""
        error = cls(f"{field}: {description}", reason="INVALID_ARGUMENT")
        error.violations = (FieldViolation(field, description),)
        return error


class NotFoundError(DeltaplaneError):
    """No such adapter or version."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(DeltaplaneError):
    """The adapter's name, or the request id, is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(DeltaplaneError):
    """The state of an adapter forbids it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(DeltaplaneError):
    """Somebody else changed the adapter in between: its etag does not match."""

    code = grpc.StatusCode.ABORTED


class OutOfRangeError(DeltaplaneError):
    """A resume token is too old to go on from."""

    code = grpc.StatusCode.OUT_OF_RANGE


class RetryableError(DeltaplaneError):
    """May succeed later. retry_after: seconds that the server asks to wait; None where it did not say."""

    retry_after: float | None = None


class ResourceExhaustedError(RetryableError):
    """A queue, a tier or a limit is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(RetryableError):
    """The server drains, or cannot be reached."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(DeltaplaneError):
    """The call's timeout passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelledError(DeltaplaneError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class UnauthenticatedError(DeltaplaneError):
    """The call brought no token that the server accepts."""

    code = grpc.StatusCode.UNAUTHENTICATED


class UnimplementedError(DeltaplaneError):
    """The server does not serve this part of the API."""

    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(DeltaplaneError):
    """A fault of the server's."""

    code = grpc.StatusCode.INTERNAL


_CLASSES: dict[grpc.StatusCode, type[DeltaplaneError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        ResourceExhaustedError,
        UnavailableError,
        DeadlineExceededError,
        CallCancelledError,
        UnauthenticatedError,
        UnimplementedError,
        InternalError,
    )
}


def from_rpc(failure: grpc.RpcError, address: str) -> DeltaplaneError:
    """The error of a failed call to `address`, sync or asyncio, with its google.rpc details parsed."""
    code, message = failure.code(), failure.details() or ""
    status = _status(failure.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not _detail(status, error_details_pb2.ErrorInfo()).reason:
        message = f"no answer from {address}: {message}"
    return _error(code, message, status)


def from_status(status: status_pb2.Status) -> DeltaplaneError:
    """The error of a call that ended elsewhere, such as that of an operation."""
    code = next((c for c in grpc.StatusCode if c.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    return _error(code, status.message, status)


def _error(code: grpc.StatusCode, message: str, status: status_pb2.Status) -> DeltaplaneError:
    info = _detail(status, error_details_pb2.ErrorInfo())
    bad_request = _detail(status, error_details_pb2.BadRequest())
    retry_info = _detail(status, error_details_pb2.RetryInfo())
    cls = _CLASSES.get(code, DeltaplaneError)
    error = cls(message or code.name, code=code, reason=info.reason, metadata=info.metadata)
    if isinstance(error, InvalidArgumentError):
        error.violations = tuple(
            FieldViolation(violation.field, violation.description)
            for violation in bad_request.field_violations
        )
    if isinstance(error, RetryableError) and retry_info.HasField("retry_delay"):
        error.retry_after = retry_info.retry_delay.ToTimedelta().total_seconds()
    return error


def _status(trailers: Iterable[Any]) -> status_pb2.Status:
    """The google.rpc.Status of a call; empty where there is none that can be read."""
    blob = next((value for key, value in trailers if key == _DETAILS_KEY), b"")
    try:
        return status_pb2.Status.FromString(blob)
    except DecodeError:
        return status_pb2.Status()  # a proxy's own details: code and message stand for themselves


def _detail(status: status_pb2.Status, message: _Detail) -> _Detail:
    """The detail of this kind; the message stays empty where there is none that can be read."""
    for detail in status.details:
        with suppress(DecodeError):
            detail.Unpack(message)
    return message
