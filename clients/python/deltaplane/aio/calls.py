"""One plane of a server as an asyncio channel: unary calls and streams with errors, tries and timeouts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltaplane.channel import ChannelConfig
from deltaplane.errors import from_rpc
from deltaplane.retry import Attempts, RetryPolicy

Request = TypeVar("Request")
Response = TypeVar("Response")


class Plane:
    """A channel to `address`, plain text unless the config has credentials."""

    def __init__(self, address: str, config: ChannelConfig, retry: RetryPolicy | None) -> None:
        self.address = address
        self.channel = (
            grpc.aio.secure_channel(address, config.credentials, options=config.arguments())
            if config.credentials
            else grpc.aio.insecure_channel(address, options=config.arguments())
        )
        self._metadata = config.call_metadata
        self._retry = retry

    async def unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout: float | None,
        idempotent: bool = False,
    ) -> Response:
        """Calls and waits for the answer."""
        attempts = Attempts(self._retry, timeout=timeout, idempotent=idempotent)
        return await self._try(
            lambda: method(request, timeout=attempts.remaining(), metadata=self._metadata()), attempts
        )

    async def upload(
        self,
        method: grpc.aio.StreamUnaryMultiCallable[Request, Response],
        requests: Callable[[], AsyncIterator[Request]],
        *,
        accepted: str,
        timeout: float | None,
    ) -> Response:
        """Calls, sends all requests and waits for the answer. Each try asks for the requests anew.

        The others are not sent before the server has accepted the first one, by the metadata `accepted`: in
        grpc.aio, a message that meets a refusal on its way hides the refusal's status.
        """
        attempts = Attempts(self._retry, timeout=timeout, idempotent=False)

        async def call() -> Response:
            call = method(timeout=attempts.remaining(), metadata=self._metadata())
            try:
                async for request in requests():
                    await call.write(request)
                    if accepted not in dict(await call.initial_metadata()):
                        return await call
                await call.done_writing()
                return await call
            finally:
                call.cancel()

        return await self._try(call, attempts)

    async def _try(self, call: Callable[[], Awaitable[Response]], attempts: Attempts) -> Response:
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                error = from_rpc(failure, self.address)
                seconds = attempts.wait_after(error)
                if seconds is None:
                    raise error from failure
                await asyncio.sleep(seconds)

    def stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout: float | None,
    ) -> "AsyncStream[Response]":
        """Calls at once and gives the stream."""
        attempts = Attempts(self._retry, timeout=timeout, idempotent=True)
        return AsyncStream(
            lambda: method(request, timeout=attempts.remaining(), metadata=self._metadata()),
            attempts,
            self.address,
        )

    async def is_serving(self, timeout: float | None) -> bool:
        """Asks gRPC's standard health service for the server as a whole."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await self.unary(
            stub.Check, health_pb2.HealthCheckRequest(), timeout=timeout, idempotent=True
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class AsyncStream(Generic[Response]):
    """The messages of a stream, as they come. Leaving it as a context manager, or cancel(), ends the call.

    It is tried again, where a policy allows it, only until its first message has arrived.
    """

    def __init__(self, start: Callable[[], Any], attempts: Attempts, address: str) -> None:
        self._start = start
        self._attempts = attempts
        self._address = address
        self._call = start()
        self._is_started = False
        self._is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        while not self._is_cancelled:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as failure:
                await self._recover(failure)
            except asyncio.CancelledError:
                if not self._is_cancelled:
                    raise
            else:
                if message is grpc.aio.EOF:
                    break
                self._is_started = True
                return cast(Response, message)
        raise StopAsyncIteration

    async def _recover(self, failure: grpc.aio.AioRpcError) -> None:
        """Starts the call again after a wait, or raises what made it fail."""
        error = from_rpc(failure, self._address)
        seconds = None if self._is_started else self._attempts.wait_after(error)
        if seconds is None:
            raise error from failure
        await asyncio.sleep(seconds)
        if not self._is_cancelled:
            self._call = self._start()

    def cancel(self) -> None:
        """Ends the call; the server frees what it held, and iteration stops."""
        self._is_cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
