"""Refuses calls that bring no token, before anything of them is parsed."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import structlog

from deltaplane_controlplane.errors import UnauthenticatedError
from deltaplane_controlplane.interceptor import abort_with
from deltaplane_server.access.tokens import Tokens

_OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Probes have no tokens, and learn nothing but that the server is there."""

_FIRST_MESSAGE_S = 1.0

log = structlog.get_logger(__name__)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Has each call to a method that there is bring a token, whatever its kind; health is open to all.

    It is the outermost interceptor: those inside it may keep what they have made for a method.
    """

    def __init__(self, tokens: Callable[[], Tokens], on_refused: Callable[[str], object]) -> None:
        """tokens: those that are in force. on_refused: told the reason of each refusal."""
        self._tokens = tokens
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICE):
            return handler
        error = self._tokens().check(handler_call_details.invocation_metadata or ())
        if error is None:
            return handler
        self._on_refused(error.reason)
        return _refusal(error, method, is_stream=handler.request_streaming)


def _refusal(error: UnauthenticatedError, method: str, *, is_stream: bool) -> Any:
    """A handler that answers a stream of messages, whatever the method does: it need not read any.

    is_stream: whether the client sends a stream.
    """

    async def refuse(requests: AsyncIterable[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        log.info("rpc.unauthenticated", method=method, peer=context.peer(), reason=error.reason)
        if is_stream:
            await _wait_for_first(requests)
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _wait_for_first(requests: AsyncIterable[bytes]) -> None:
    """Lets a client send its first message: one that meets the end of a call hides its status in grpc.aio."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            await anext(aiter(requests), None)
