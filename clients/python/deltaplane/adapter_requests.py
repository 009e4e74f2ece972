"""Builds the control plane's request messages from Python arguments; shared by both clients."""

from collections.abc import Mapping
from typing import Literal

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from deltaplane.errors import InvalidArgumentError
from deltaplane.v1 import adapters_pb2, operations_pb2

Tier = Literal["device", "host"]
"""Where weights can be: device memory, or host memory."""

_TIERS = {"device": adapters_pb2.ADAPTER_TIER_DEVICE, "host": adapters_pb2.ADAPTER_TIER_HOST}


def tier(value: Tier | None) -> "adapters_pb2.AdapterTier.ValueType":
    """Errors: InvalidArgumentError."""
    if value is None:
        return adapters_pb2.ADAPTER_TIER_UNSPECIFIED
    if value not in _TIERS:
        raise InvalidArgumentError.for_field("tier", f"{value!r} is no tier; use 'device' or 'host'")
    return _TIERS[value]


def register_adapter(
    name: str,
    source: str,
    *,
    labels: Mapping[str, str] | None,
    load_tier: Tier | None,
    expected_digest: str,
    validate_only: bool,
    idempotency_key: str,
    return_immediately: bool = False,
) -> adapters_pb2.RegisterAdapterRequest:
    return adapters_pb2.RegisterAdapterRequest(
        name=name,
        source=source,
        labels=labels,
        load_tier=tier(load_tier),
        expected_digest=expected_digest,
        validate_only=validate_only,
        idempotency_key=idempotency_key,
        return_immediately=return_immediately,
    )


def update_adapter(
    name: str,
    *,
    source: str | None,
    labels: Mapping[str, str] | None,
    etag: str,
    expected_digest: str,
    validate_only: bool,
    keep_previous: bool,
    idempotency_key: str,
    return_immediately: bool = False,
) -> adapters_pb2.UpdateAdapterRequest:
    """The mask names what is not None, so that empty labels clear them."""
    return adapters_pb2.UpdateAdapterRequest(
        adapter=adapters_pb2.Adapter(name=name, source=source or "", labels=labels),
        update_mask=FieldMask(
            paths=[path for path, value in (("source", source), ("labels", labels)) if value is not None]
        ),
        etag=etag,
        expected_digest=expected_digest,
        validate_only=validate_only,
        keep_previous=keep_previous,
        idempotency_key=idempotency_key,
        return_immediately=return_immediately,
    )


def delete_adapter(
    name: str,
    *,
    etag: str,
    drain_timeout: float | None,
    force: bool,
    allow_missing: bool,
    validate_only: bool = False,
    wait_until_gone: bool = False,
    idempotency_key: str = "",
) -> adapters_pb2.DeleteAdapterRequest:
    return adapters_pb2.DeleteAdapterRequest(
        name=name,
        etag=etag,
        drain_timeout=None if drain_timeout is None else _duration(drain_timeout),
        force=force,
        allow_missing=allow_missing,
        validate_only=validate_only,
        wait_until_gone=wait_until_gone,
        idempotency_key=idempotency_key,
    )


def wait_operation(operation_id: str, timeout: float) -> operations_pb2.WaitOperationRequest:
    return operations_pb2.WaitOperationRequest(id=operation_id, timeout=_duration(timeout))


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
