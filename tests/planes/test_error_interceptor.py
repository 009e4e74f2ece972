"""What a caller gets of what a handler raises: unary and streaming, over a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs

from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.interceptor import DETAILS_KEY, ErrorInterceptor

SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "unary_written")
Context = grpc.aio.ServicerContext[bytes, bytes]
Raiser = Callable[[Context], Awaitable[None]]


def handlers(act: Raiser) -> grpc.GenericRpcHandler:
    """A service with one method of each shape; each answers once where it can, and then acts."""

    async def unary(request: object, context: Context) -> bytes:
        await act(context)
        return b"answer"

    async def stream(request: object, context: Context) -> AsyncIterator[bytes]:
        yield b"answer"
        await act(context)

    async def written(request: object, context: Context) -> None:
        await context.write(b"answer")
        await act(context)

    behaviors: dict[str, tuple[Any, Any]] = {
        "unary_unary": (grpc.unary_unary_rpc_method_handler, unary),
        "unary_stream": (grpc.unary_stream_rpc_method_handler, stream),
        "stream_unary": (grpc.stream_unary_rpc_method_handler, unary),
        "stream_stream": (grpc.stream_stream_rpc_method_handler, stream),
        "unary_written": (grpc.unary_stream_rpc_method_handler, written),
    }
    return grpc.method_handlers_generic_handler(
        "test.Test", {shape: make(behavior) for shape, (make, behavior) in behaviors.items()}
    )


@asynccontextmanager
async def serving(act: Raiser) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handlers(act),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def start(channel: grpc.aio.Channel, shape: str, name: str = "") -> Any:
    """Begins to call a method."""
    make = getattr(channel, shape.replace("written", "stream"))
    method = make(f"/test.Test/{name or shape}")
    return method(iter([b"request"]) if shape.startswith("stream") else b"request")


async def call(channel: grpc.aio.Channel, shape: str, name: str = "") -> list[bytes]:
    """Calls a method and answers what it sent."""
    return await collect(start(channel, shape, name), shape)


async def collect(started: Any, shape: str) -> list[bytes]:
    if shape in ("unary_unary", "stream_unary"):
        return [await started]
    return [message async for message in started]


def raising(error: Exception) -> Raiser:
    async def act(context: Context) -> None:
        raise error

    return act


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    details = dict(error.trailing_metadata())[DETAILS_KEY]
    return status_pb2.Status.FromString(details)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("no such adapter"), grpc.StatusCode.NOT_FOUND),
        (FailedPreconditionError("it failed: äöü"), grpc.StatusCode.FAILED_PRECONDITION),
        (ResourceExhaustedError("full", retry_after_s=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (InvalidArgumentError.for_field("name", "is bad"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_our_errors_keep_code_message_and_details(
    shape: str, error: DeltaplaneError, code: grpc.StatusCode
) -> None:
    async with serving(raising(error)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, shape)
    assert (caught.value.code(), caught.value.details()) == (code, error.message)
    status = status_of(caught.value)
    assert (status.code, status.message) == (code.value[0], error.message)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("deltaplane", error.reason)


@pytest.mark.parametrize("shape", SHAPES)
async def test_other_exceptions_are_internal_and_logged_without_what_they_hold(shape: str) -> None:
    prompt = "the secret prompt"

    async def act(context: Context) -> None:
        secret = prompt
        raise KeyError(len(secret))

    with capture_logs() as logs:
        async with serving(act) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, shape)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    [line] = [entry for entry in logs if entry["event"] == "rpc.failed"]
    assert line["error_id"] in (caught.value.details() or "")
    assert (line["method"], line["error"]) == (f"/test.Test/{shape}", "KeyError")
    assert "in act" in line["traceback"]
    assert prompt not in str(line)
    assert "17" not in (caught.value.details() or "").split(line["error_id"])[0]


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_abort_of_the_handler_passes(shape: str) -> None:
    async def act(context: Context) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "as the handler says", (("key", "value"),))

    with capture_logs() as logs:
        async with serving(act) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, shape)
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.DATA_LOSS,
        "as the handler says",
    )
    assert dict(caught.value.trailing_metadata())["key"] == "value"
    assert logs == []


async def test_trailers_of_the_handler_are_kept() -> None:
    async def act(context: Context) -> None:
        context.set_trailing_metadata((("key", "value"),))
        raise NotFoundError("no")

    async with serving(act) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert dict(caught.value.trailing_metadata())["key"] == "value"
    assert status_of(caught.value).code == 5


@pytest.mark.parametrize("shape", SHAPES)
async def test_cancellation_reaches_the_handler_and_is_no_error(shape: str) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def act(context: Context) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with capture_logs() as logs:
        async with serving(act) as channel:
            started = start(channel, shape)
            collecting = asyncio.create_task(collect(started, shape))
            await asyncio.wait_for(begun.wait(), 30)
            started.cancel()
            await asyncio.wait_for(ended.wait(), 30)
            with pytest.raises(asyncio.CancelledError):
                await collecting
    assert logs == []


@pytest.mark.parametrize("shape", SHAPES)
async def test_what_does_not_fail_is_untouched(shape: str) -> None:
    async def act(context: Context) -> None:
        pass

    async with serving(act) as channel:
        assert await call(channel, shape) == [b"answer"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary", "Unknown")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
