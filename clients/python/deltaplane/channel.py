"""How both clients reach the two planes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from deltaplane.credentials import checked_token

DEFAULT_ADDRESS = "localhost:50051"
"""Where a server's data plane is by default."""

DEFAULT_ADMIN_ADDRESS = "localhost:50052"
"""Where its control plane is by default."""

_MAX_MESSAGE_BYTES = 64 << 20  # a page of 1000 adapters is above gRPC's 4 MB when their labels are long


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """How a channel is opened.

    credentials: TLS, for example of tls_credentials(); plain text without.
    token: sent with each call as `authorization: Bearer`; a function, such as token_from_file() makes, is
        asked at each call. In plain text, whoever listens on the network learns it.
    keepalive: seconds between pings while a call is open, so that a dead peer is noticed although a long
        prefill is silent; None sends none.
    metadata: sent with each call, such as a header for a proxy.
    options: further gRPC channel arguments; they win over those made here.
    """

    credentials: grpc.ChannelCredentials | None = None
    keepalive: float | None = 60.0
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)
    options: Sequence[tuple[str, Any]] = ()
    token: str | Callable[[], str] | None = field(default=None, repr=False)

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent with a call that begins now. Errors: InvalidArgumentError (the token)."""
        if self.token is None:
            return tuple(self.metadata)
        token = self.token if isinstance(self.token, str) else self.token()
        return (*self.metadata, ("authorization", f"Bearer {checked_token(token)}"))

    def arguments(self) -> list[tuple[str, Any]]:
        """The gRPC channel arguments."""
        arguments: dict[str, Any] = {
            "grpc.max_receive_message_length": _MAX_MESSAGE_BYTES,
            "grpc.max_send_message_length": _MAX_MESSAGE_BYTES,
        }
        if self.keepalive is not None:
            arguments |= {
                "grpc.keepalive_time_ms": round(self.keepalive * 1000),
                "grpc.keepalive_timeout_ms": 20_000,
                "grpc.http2.max_pings_without_data": 0,
            }
        return list((arguments | dict(self.options)).items())
