"""One plane of a server as a blocking channel: unary calls and streams with errors, tries and timeouts."""

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
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
            grpc.secure_channel(address, config.credentials, options=config.arguments())
            if config.credentials
            else grpc.insecure_channel(address, options=config.arguments())
        )
        self._metadata = config.call_metadata
        self._retry = retry

    def unary(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        *,
        timeout: float | None,
        idempotent: bool = False,
    ) -> Response:
        """Calls and waits for the answer."""
        attempts = Attempts(self._retry, timeout=timeout, idempotent=idempotent)
        return self._try(
            lambda: method(request, timeout=attempts.remaining(), metadata=self._metadata()), attempts
        )

    def upload(
        self,
        method: "grpc.StreamUnaryMultiCallable[Request, Response]",
        requests: Callable[[], Iterator[Request]],
        *,
        timeout: float | None,
    ) -> Response:
        """Calls, sends all requests and waits for the answer. Each try asks for the requests anew."""
        attempts = Attempts(self._retry, timeout=timeout, idempotent=False)
        return self._try(
            lambda: method(requests(), timeout=attempts.remaining(), metadata=self._metadata()), attempts
        )

    def _try(self, call: Callable[[], Response], attempts: Attempts) -> Response:
        while True:
            try:
                return call()
            except grpc.RpcError as failure:
                error = from_rpc(failure, self.address)
                seconds = attempts.wait_after(error)
                if seconds is None:
                    raise error from failure
                time.sleep(seconds)

    def stream(
        self,
        method: "grpc.UnaryStreamMultiCallable[Request, Response]",
        request: Request,
        *,
        timeout: float | None,
    ) -> "Stream[Response]":
        """Calls at once and gives the stream."""
        attempts = Attempts(self._retry, timeout=timeout, idempotent=True)
        return Stream(
            lambda: method(request, timeout=attempts.remaining(), metadata=self._metadata()),
            attempts,
            self.address,
        )

    def is_serving(self, timeout: float | None) -> bool:
        """Asks gRPC's standard health service for the server as a whole."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = self.unary(stub.Check, health_pb2.HealthCheckRequest(), timeout=timeout, idempotent=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Stream(Generic[Response]):
    """The messages of a stream, as they come. Leaving it as a context manager, or cancel(), ends the call.

    It is tried again, where a policy allows it, only until its first message has arrived.
    """

    def __init__(self, start: Callable[[], Any], attempts: Attempts, address: str) -> None:
        self._start = start
        self._attempts = attempts
        self._address = address
        self._call = start()
        self._is_started = False
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Response]:
        return self

    def __next__(self) -> Response:
        while not self._cancelled.is_set():
            try:
                message: Response = next(self._call)
            except grpc.RpcError as failure:
                self._recover(failure)
            else:
                self._is_started = True
                return message
        raise StopIteration

    def _recover(self, failure: grpc.RpcError) -> None:
        """Starts the call again after a wait, or raises what made it fail."""
        if self._cancelled.is_set():
            return
        error = from_rpc(failure, self._address)
        seconds = None if self._is_started else self._attempts.wait_after(error)
        if seconds is None:
            raise error from failure
        if not self._cancelled.wait(seconds):
            self._call = self._start()

    def cancel(self) -> None:
        """Ends the call, from any thread; the server frees what it held, and iteration stops."""
        self._cancelled.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
