"""The one table from deltaplane's errors to gRPC codes, and their google.rpc.Status. Both planes use it."""

from collections.abc import Iterable

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from deltaplane_controlplane.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    DeltaplaneError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    RetryableError,
    UnauthenticatedError,
    UnavailableError,
)

DOMAIN = "deltaplane"
"""google.rpc.ErrorInfo.domain of every error."""

CODES: dict[type[DeltaplaneError], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    AbortedError: grpc.StatusCode.ABORTED,
    OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    CancelledError: grpc.StatusCode.CANCELLED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    InternalError: grpc.StatusCode.INTERNAL,
}

# A status travels in trailers, which gRPC bounds to 8 KiB: once as text, percent-encoded, and once as
# details, in base64.
_MAX_MESSAGE_BYTES = 768
_MAX_VIOLATIONS = 6
_MAX_FIELD_BYTES = 96
_MAX_DESCRIPTION_BYTES = 256
_MAX_METADATA = 4
_MAX_KEY_BYTES = 64
_MAX_VALUE_BYTES = 128


def status_code(error: DeltaplaneError) -> grpc.StatusCode:
    """The gRPC code of an error: its own class's, or that of the nearest class it derives from."""
    return next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: DeltaplaneError) -> status_pb2.Status:
    """An error as google.rpc.Status.

    Details: ErrorInfo always; BadRequest with the fields of an InvalidArgumentError; RetryInfo on a
    RetryableError. Texts are clipped so that the status fits a call's trailers.
    """
    status = status_pb2.Status(
        code=status_code(error).value[0], message=_clip(error.message, _MAX_MESSAGE_BYTES)
    )
    status.details.add().Pack(_error_info(error))
    if isinstance(error, InvalidArgumentError) and error.violations:
        status.details.add().Pack(_bad_request(error.violations[:_MAX_VIOLATIONS]))
    if isinstance(error, RetryableError):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _error_info(error: DeltaplaneError) -> error_details_pb2.ErrorInfo:
    metadata = {
        _clip(key, _MAX_KEY_BYTES): _clip(value, _MAX_VALUE_BYTES)
        for key, value in list(error.metadata.items())[:_MAX_METADATA]
    }
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _bad_request(violations: Iterable[FieldViolation]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_clip(v.field, _MAX_FIELD_BYTES),
                description=_clip(v.description, _MAX_DESCRIPTION_BYTES),
            )
            for v in violations
        ]
    )


def _clip(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."
