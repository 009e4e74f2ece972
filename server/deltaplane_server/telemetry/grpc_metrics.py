"""The grpc_server_* metrics that dashboards know (grpc-ecosystem/go-grpc-middleware), for grpc.aio."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

_LABELS = ("grpc_type", "grpc_service", "grpc_method")
_CODES = {key: code for code in grpc.StatusCode for key in (code, code.value[0])}
"""By themselves and by their numbers, which is how grpc.aio has them."""

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServerMetrics:
    """Counts of calls and messages. Methods that the server does not have are not counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"grpc_server_{name}", text, (*_LABELS, *labels), registry=registry)

        self.started = counter("started", "Calls that began.")
        self.handled = counter("handled", "Calls that ended, by code.", "grpc_code")
        self.received = counter("msg_received", "Messages received from clients.")
        self.sent = counter("msg_sent", "Messages sent to clients.")
        self.seconds = Histogram(
            "grpc_server_handling_seconds",
            "How long calls took.",
            _LABELS,
            buckets=_SECONDS,
            registry=registry,
        )
        self._refused = Counter(
            "deltaplane_unauthenticated_calls",
            "Calls that brought no token that is accepted, by reason; they count nowhere else.",
            ("grpc_service", "reason"),
            registry=registry,
        )

    def count_refused(self, service: str, reason: str) -> None:
        """Counts a call to a port whose token was not accepted. service: which the port is for."""
        self._refused.labels(service, reason).inc()

    def interceptor(self) -> grpc.aio.ServerInterceptor:
        """To be the outermost one of a server, but for one that refuses calls."""
        return _Interceptor(self)


class _Method:
    """Where the figures of one method go."""

    def __init__(self, metrics: GrpcServerMetrics, kind: str, path: str) -> None:
        _, service, method = path.split("/", 2)
        labels = (kind, service, method)
        self._handled = metrics.handled
        self._labels = labels
        self._started = metrics.started.labels(*labels)
        self._seconds = metrics.seconds.labels(*labels)
        self.received = metrics.received.labels(*labels)
        self.sent = metrics.sent.labels(*labels)

    @contextmanager
    def measure(self, context: Context) -> Iterator[None]:
        """Counts a call and how it ended."""
        self._started.inc()
        begin = time.perf_counter()
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = answered_code(context)
        except BaseException as error:
            code = failed_code(error, context)
            raise
        finally:
            self._seconds.observe(time.perf_counter() - begin)
            self._handled.labels(*self._labels, _go_name(code)).inc()


def answered_code(context: Context) -> grpc.StatusCode:
    """The code that a handler has set; OK where it set none."""
    value: Any = context.code()
    return _CODES.get(value, grpc.StatusCode.OK)


def failed_code(error: BaseException, context: Context) -> grpc.StatusCode:
    """The code with which a call ends whose handler raised `error`."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        remaining = context.time_remaining()
        late = remaining is not None and remaining <= 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
    if isinstance(error, grpc.aio.AbortError):
        return answered_code(context)
    return grpc.StatusCode.UNKNOWN


def _go_name(code: grpc.StatusCode) -> str:
    """Codes as Go spells them, which is what dashboards look for: "OK", "NotFound", "Canceled"."""
    if code is grpc.StatusCode.OK:
        return "OK"
    return "Canceled" if code is grpc.StatusCode.CANCELLED else code.name.title().replace("_", "")


class _Interceptor(grpc.aio.ServerInterceptor):
    """Has a method's handler found, and wrapped by the interceptors inside this one, for its first call."""

    def __init__(self, metrics: GrpcServerMetrics) -> None:
        self._metrics = metrics
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        path = handler_call_details.method
        measured = self._handlers.get(path)
        if measured is None and (handler := await continuation(handler_call_details)) is not None:
            measured = _measured(handler, _Method(self._metrics, _kind(handler), path))
            self._handlers[path] = measured
        return measured


def _kind(handler: Any) -> str:
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            return "unary"
        case True, False:
            return "client_stream"
        case False, True:
            return "server_stream"
        case _:
            return "bidi_stream"


def _measured(handler: Any, method: _Method) -> Any:
    """The handler, with its calls and messages counted."""
    shapes = ("unary", "stream")
    name = f"{shapes[handler.request_streaming]}_{shapes[handler.response_streaming]}"
    behavior = getattr(handler, name)
    requests = _counted_stream if handler.request_streaming else _counted_one

    async def answer(request: Any, context: Context) -> Any:
        with method.measure(context):
            response = await behavior(requests(request, method), context)
            method.sent.inc()
            return response

    async def write(request: Any, context: Context) -> None:
        with method.measure(context):
            await behavior(requests(request, method), _CountingContext(context, method))

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        with method.measure(context):
            async with aclosing(behavior(requests(request, method), context)) as responses:
                async for response in responses:
                    method.sent.inc()
                    yield response

    measured: Callable[[Any, Context], Any] = answer
    if handler.response_streaming:  # by a generator, or by a coroutine that writes, such as Generate
        measured = stream if inspect.isasyncgenfunction(behavior) else write
    make = getattr(grpc, f"{name}_rpc_method_handler")
    return make(measured, handler.request_deserializer, handler.response_serializer)


class _CountingContext:
    """The context of a handler that writes its messages itself."""

    def __init__(self, context: Context, method: _Method) -> None:
        self._context = context
        self._sent = method.sent

    def write(self, message: Any) -> Awaitable[None]:
        self._sent.inc()
        return self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _counted_one(request: Any, method: _Method) -> Any:
    method.received.inc()
    return request


async def _counted_stream(requests: AsyncIterator[Any], method: _Method) -> AsyncIterator[Any]:
    async for request in requests:
        method.received.inc()
        yield request
