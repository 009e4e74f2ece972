"""A real gRPC server of both services that answers what a test tells it to."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deltaplane.v1 import adapters_pb2_grpc, generation_pb2_grpc


@dataclass(frozen=True)
class Status(grpc.Status):
    """What a call ends with."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...] = ()


def status(code: grpc.StatusCode, message: str, *details: Message) -> Status:
    """A status with google.rpc details, as both planes send it."""
    packed = []
    for detail in details:
        blob = any_pb2.Any()
        blob.Pack(detail)
        packed.append(blob)
    trailer = status_pb2.Status(code=code.value[0], message=message, details=packed).SerializeToString()
    return Status(code, message, (("grpc-status-details-bin", trailer),))


def reason(name: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=name, domain="deltaplane", metadata=metadata)


def retry_in(seconds: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


class Script(
    generation_pb2_grpc.GenerationServiceServicer,
    adapters_pb2_grpc.AdapterServiceServicer,
):
    """Answers each call with the next of `answers`: messages are sent, a status ends the call, and None waits
    until the client has ended it.

    seen: the requests, in order.  cancelled: set when a client ended a stream.
    """

    def __init__(self) -> None:
        self.answers: list[list[Message | grpc.Status | None]] = []
        self.seen: list[Message] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = threading.Event()

    def _play(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        self.seen.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.cancelled.set)
        for answer in self.answers.pop(0):
            if isinstance(answer, Message):
                yield answer
            elif answer is None:
                self.cancelled.wait(30)
            else:
                context.abort_with_status(answer)

    def _one(self, request: Message, context: grpc.ServicerContext) -> Message:
        return next(self._play(request, context))

    Generate = WatchAdapters = _play  # type: ignore[assignment]
    GetModel = Abort = Tokenize = Detokenize = _one  # type: ignore[assignment]
    RegisterAdapter = GetAdapter = ListAdapters = UpdateAdapter = DeleteAdapter = _one  # type: ignore[assignment]
    LoadAdapter = EvictAdapter = PinAdapter = UnpinAdapter = RollbackAdapter = _one  # type: ignore[assignment]
    UploadAdapter = ListSlots = GetCapacity = _one  # type: ignore[assignment]


@contextmanager
def serving(script: Script, *, healthy: bool = True) -> Iterator[str]:
    """Serves the script, and gRPC health, on a free port; yields host:port."""
    server = grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(script, server)
    adapters_pb2_grpc.add_AdapterServiceServicer_to_server(script, server)
    checker = health.HealthServicer()
    status = health_pb2.HealthCheckResponse
    checker.set("", status.SERVING if healthy else status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        script.cancelled.set()
        server.stop(None).wait()
