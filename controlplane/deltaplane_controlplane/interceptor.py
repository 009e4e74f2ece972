"""Turns what a gRPC handler raises into the status that its caller gets. Both planes use it."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from deltaplane_controlplane.errors import DeltaplaneError
from deltaplane_controlplane.status import to_status
from deltaplane_controlplane.unforeseen import unforeseen

_Req = TypeVar("_Req")
_Res = TypeVar("_Res")
_Context = grpc.aio.ServicerContext[Any, Any]

DETAILS_KEY = "grpc-status-details-bin"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers errors of asyncio handlers as `status.CODES` says, whether they stream or not.

    Anything that is no DeltaplaneError becomes INTERNAL: the caller gets an id, the log the traceback under
    that id. gRPC's own AbortError and the cancellation of a call pass untouched.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[_Req, _Res] | None]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Req, _Res] | None":
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, handler_call_details.method)


def _guarded(handler: Any, method: str) -> Any:
    """The same handler, whose errors are answered. A handler that is not asyncio's is left alone."""
    shape = _SHAPES[handler.request_streaming, handler.response_streaming]
    behavior = getattr(handler, shape)
    if inspect.isasyncgenfunction(behavior):
        behavior = _guard_generator(behavior, method)
    elif inspect.iscoroutinefunction(behavior):
        behavior = _guard_coroutine(behavior, method)
    make = getattr(grpc, f"{shape}_rpc_method_handler")
    return make(behavior, handler.request_deserializer, handler.response_serializer)


_SHAPES = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def _guard_coroutine(
    behavior: Callable[[Any, _Context], Awaitable[Any]], method: str
) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


def _guard_generator(
    behavior: Callable[[Any, _Context], AsyncIterator[Any]], method: str
) -> Callable[[Any, _Context], AsyncIterator[Any]]:
    async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return stream


async def _abort(context: _Context, error: Exception, method: str) -> NoReturn:
    await abort_with(context, error if isinstance(error, DeltaplaneError) else unforeseen(error, method))


async def abort_with(context: _Context, error: DeltaplaneError) -> NoReturn:
    """Ends a call with the status of an error, by raising gRPC's own AbortError."""
    status = to_status(error)
    trailers = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(_code(status.code), status.message, trailers)


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)
