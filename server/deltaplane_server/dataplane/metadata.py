"""What a request may say in the call's metadata instead of in its fields, as gateways do."""

from collections.abc import Mapping
from uuid import uuid4

from deltaplane.v1 import generation_pb2 as pb

REQUEST_ID = "x-request-id"
ADAPTER_VERSION = "x-adapter-version"

_ADAPTER_KEYS = ("x-llm-d-model-name-rewrite", "multiplexed_model_id")
"""The keys of llm-d and of Ray Serve, in order of precedence."""


def fill_from_metadata(request: pb.GenerateRequest, metadata: Mapping[str, str], base_model: str) -> None:
    """Sets request_id and adapter where they are empty: from the metadata, or the former to a new id.

    base_model: the name that the base model is served under; as an adapter it means none.
    """
    if not request.request_id:
        request.request_id = metadata.get(REQUEST_ID) or f"req-{uuid4().hex}"
    if not request.adapter and not request.adapters:
        named = next((metadata[key] for key in _ADAPTER_KEYS if metadata.get(key)), "")
        request.adapter = "" if named == base_model else named


def trace_id(metadata: Mapping[str, str]) -> str | None:
    """The trace of a W3C traceparent ("00-<trace>-<span>-<flags>"), for logs."""
    parts = metadata.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None
