"""The grpc_server_* metrics over a real grpc.aio server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from deltaplane_server.telemetry.grpc_metrics import GrpcServerMetrics

SERVICE = "test.Service"


async def unary(request: bytes, context: Any) -> bytes:
    match request:
        case b"abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        case b"raise":
            raise RuntimeError("broken")
    return request


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield request
    if request == b"endless":
        await asyncio.Event().wait()


async def written(request: bytes, context: Any) -> None:
    await context.send_initial_metadata(())
    await context.write(request)
    await context.write(request)


async def collect(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([request async for request in requests])


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def channel(registry: CollectorRegistry) -> AsyncIterator[Any]:
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Written": grpc.unary_stream_rpc_method_handler(written),
        "Collect": grpc.stream_unary_rpc_method_handler(collect),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server = grpc.aio.server(interceptors=[GrpcServerMetrics(registry).interceptor()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def value(registry: CollectorRegistry, name: str, kind: str, method: str, **labels: str) -> float | None:
    labels |= {"grpc_type": kind, "grpc_service": SERVICE, "grpc_method": method}
    return registry.get_sample_value(f"grpc_server_{name}", labels)


async def eventually(read: Callable[[], float | None], expected: float) -> None:
    """Waits until a figure is there: a server counts a call shortly after its client has the answer."""
    for _ in range(1000):
        if read() == expected:
            return
        await asyncio.sleep(0.01)
    assert read() == expected


CALLS: list[tuple[str, str, Callable[[Any], Awaitable[object]], int, int]] = [
    ("unary", "Unary", lambda channel: channel.unary_unary(f"/{SERVICE}/Unary")(b"x"), 1, 1),
    (
        "server_stream",
        "Stream",
        lambda channel: drained(channel.unary_stream(f"/{SERVICE}/Stream")(b"x")),
        1,
        3,
    ),
    (
        "server_stream",
        "Written",
        lambda channel: drained(channel.unary_stream(f"/{SERVICE}/Written")(b"x")),
        1,
        2,
    ),
    (
        "client_stream",
        "Collect",
        lambda channel: channel.stream_unary(f"/{SERVICE}/Collect")([b"x"] * 4),
        4,
        1,
    ),
    (
        "bidi_stream",
        "Echo",
        lambda channel: drained(channel.stream_stream(f"/{SERVICE}/Echo")([b"x"] * 2)),
        2,
        2,
    ),
]


async def drained(call: Any) -> list[bytes]:
    return [response async for response in call]


@pytest.mark.parametrize(
    ("kind", "method", "call", "received", "sent"), CALLS, ids=[call[1] for call in CALLS]
)
async def test_calls_and_messages_are_counted(
    registry: CollectorRegistry,
    channel: Any,
    kind: str,
    method: str,
    call: Callable[[Any], Awaitable[object]],
    received: int,
    sent: int,
) -> None:
    await call(channel)
    await eventually(lambda: value(registry, "handled_total", kind, method, grpc_code="OK"), 1)
    assert value(registry, "started_total", kind, method) == 1
    assert value(registry, "handling_seconds_count", kind, method) == 1
    assert value(registry, "msg_received_total", kind, method) == received
    assert value(registry, "msg_sent_total", kind, method) == sent


@pytest.mark.parametrize(("request_", "code"), [(b"abort", "NotFound"), (b"raise", "Unknown")])
async def test_failed_calls_are_counted_by_code(
    registry: CollectorRegistry, channel: Any, request_: bytes, code: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(f"/{SERVICE}/Unary")(request_)
    await eventually(lambda: value(registry, "handled_total", "unary", "Unary", grpc_code=code), 1)


async def test_a_cancelled_stream_is_counted(registry: CollectorRegistry, channel: Any) -> None:
    call = channel.unary_stream(f"/{SERVICE}/Stream")(b"endless")
    await call.read()
    call.cancel()
    await eventually(
        lambda: value(registry, "handled_total", "server_stream", "Stream", grpc_code="Canceled"), 1
    )


async def test_a_deadline_is_counted(registry: CollectorRegistry, channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await drained(channel.unary_stream(f"/{SERVICE}/Stream")(b"endless", timeout=0.2))
    counted = {"grpc_code": "DeadlineExceeded"}
    await eventually(lambda: value(registry, "handled_total", "server_stream", "Stream", **counted), 1)


async def test_unknown_methods_make_no_labels(registry: CollectorRegistry, channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Nonsense")(b"x")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert value(registry, "started_total", "unary", "Nonsense") is None
