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
    ├── UnimplementedError            the server does not serve this part of the API
    └── InternalError                 a fault of the server's

A status carries its details as google.rpc messages: ErrorInfo (reason and metadata), BadRequest (violations)
and RetryInfo (retry_after).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


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
        UnimplementedError,
        InternalError,
    )
}


def from_rpc(failure: grpc.RpcError, address: str) -> DeltaplaneError:
    """The error of a failed call to `address`, sync or asyncio, with its google.rpc details parsed."""
    code, message = failure.code(), failure.details() or ""
    info, bad_request, retry_info = _details(failure.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not info.reason:
        message = f"no answer from {address}: {message}"
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


def _details(
    trailers: Iterable[Any],
) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo]:
    """The details of a status; those that it lacks, or that cannot be read, are empty."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_info = error_details_pb2.RetryInfo()
    blob = next((value for key, value in trailers if key == _DETAILS_KEY), b"")
    try:
        for detail in status_pb2.Status.FromString(blob).details:
            for message in (info, bad_request, retry_info):
                detail.Unpack(message)
    except DecodeError:
        pass  # a proxy's own details: code and message stand for themselves
    return info, bad_request, retry_info
