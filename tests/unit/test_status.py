"""Errors as google.rpc.Status."""

import base64
import inspect
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_controlplane import errors
from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FieldViolation,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    RetryableError,
)
from deltaplane_controlplane.status import CODES, DOMAIN, status_code, to_status

_MAX_TRAILERS = 8192


def _concrete_errors() -> list[type[DeltaplaneError]]:
    found = [
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DeltaplaneError)
    ]
    return [cls for cls in found if cls not in (DeltaplaneError, RetryableError)]


def _details(status: status_pb2.Status) -> tuple[error_details_pb2.ErrorInfo, list[str]]:
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info, [detail.TypeName() for detail in status.details[1:]]


@pytest.mark.parametrize("error", _concrete_errors())
def test_each_error_has_a_code_of_its_own(error: type[DeltaplaneError]) -> None:
    assert status_code(error("what happened")) is CODES[error]
    assert list(CODES.values()).count(CODES[error]) == 1


def test_a_derived_error_has_the_code_of_its_base() -> None:
    class SpecialError(NotFoundError):
        pass

    class BareError(DeltaplaneError):
        pass

    assert status_code(SpecialError("gone")) is grpc.StatusCode.NOT_FOUND
    assert status_code(BareError("odd")) is grpc.StatusCode.INTERNAL


def test_error_info_is_always_there() -> None:
    status = to_status(NotFoundError("no x", reason="ADAPTER_NOT_FOUND", metadata={"adapter": "x"}))
    info, others = _details(status)
    assert (status.code, status.message) == (5, "no x")
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, "ADAPTER_NOT_FOUND", {"adapter": "x"})
    assert others == []


def test_field_violations_and_retry_delays() -> None:
    bad = to_status(InvalidArgumentError.for_field("sampling.top_p", "2 is not in (0, 1]"))
    request = error_details_pb2.BadRequest()
    assert bad.details[1].Unpack(request)
    assert request.field_violations[0].field == "sampling.top_p"
    assert request.field_violations[0].description == "2 is not in (0, 1]"

    full = to_status(ResourceExhaustedError("the queue is full", retry_after_s=1.5))
    retry = error_details_pb2.RetryInfo()
    assert full.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@given(st.text(max_size=20), st.integers(0, 3000))
def test_any_text_fits_the_trailers(piece: str, times: int) -> None:
    error = InvalidArgumentError(
        piece * times,
        violations=[FieldViolation(piece * times, piece * times)] * 50,
        metadata={f"{i}{piece * times}": piece * times for i in range(50)},
    )
    status = to_status(error)
    details, message = base64.b64encode(status.SerializeToString()), quote(status.message, safe="")
    assert len(details) + len(message) < _MAX_TRAILERS
