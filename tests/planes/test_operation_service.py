"""Calls that take their time, and OperationService, over a real server: deadlines, waits, cancellations."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from admin_server import serving_admin
from control_plane import ControlPlane, eventually
from deltaplane import AdapterClient, AsyncAdapterClient
from deltaplane.errors import (
    CallCancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1 import operations_pb2 as ops
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub
from deltaplane.v1.operations_pb2_grpc import OperationServiceStub
from deltaplane_controlplane.operation_views import OperationKind, OperationState
from fakes import write_adapter

if TYPE_CHECKING:
    from deltaplane.v1.adapters_pb2_grpc import AdapterServiceAsyncStub

SHORT_S = 0.1


@pytest_asyncio.fixture
async def address(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[str]:
    async with serving_admin(plane, tmp_path) as address:
        yield address


@pytest_asyncio.fixture
async def stub(address: str) -> AsyncIterator["AdapterServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield AdapterServiceStub(channel)


@pytest_asyncio.fixture
async def client(address: str) -> AsyncIterator[AsyncAdapterClient]:
    async with AsyncAdapterClient(address) as client:
        yield client


def test_every_kind_and_state_has_its_word_on_the_wire() -> None:
    for kind in OperationKind:
        assert ops.OperationKind.Value(f"OPERATION_KIND_{kind.name}")
    for state in OperationState:
        assert ops.OperationState.Value(f"OPERATION_STATE_{state.name}")


async def test_every_field_of_one_under_way_and_at_its_end(
    plane: ControlPlane, client: AsyncAdapterClient
) -> None:
    plane.fetcher.gate.clear()
    begun = await client.register("far", "fake://x", return_immediately=True)
    assert (begun.name, begun.source, begun.state) == ("far", "fake://x", pb.ADAPTER_STATE_FETCHING)
    await asyncio.to_thread(eventually, lambda: plane.fetcher.fetches == 1)
    running = await client.operations.get(begun.operation)
    assert (running.id, running.adapter) == (begun.operation, "far")
    assert (running.kind, running.state) == (ops.OPERATION_KIND_REGISTER, ops.OPERATION_STATE_RUNNING)
    assert running.progress == ops.OperationProgress(stage="fetch", done_bytes=50, total_bytes=100)
    assert running.HasField("create_time")
    assert not running.HasField("end_time")
    assert running.WhichOneof("result") is None
    assert (await client.get("far")).operation == begun.operation

    waiting = asyncio.ensure_future(client.operations.wait(begun.operation))
    plane.fetcher.gate.set()
    adapter = await waiting
    assert (adapter.state, adapter.source) == (pb.ADAPTER_STATE_REGISTERED, "fake://x@1")
    ended = await client.operations.get(begun.operation)
    assert (ended.state, ended.adapter_result) == (ops.OPERATION_STATE_SUCCEEDED, adapter)
    assert ended.end_time.ToNanoseconds() >= ended.create_time.ToNanoseconds()
    loaded = await client.load("far")
    assert loaded.last_load.fetch_ms > 0
    assert loaded.last_load.HasField("end_time")


async def test_an_error_is_the_one_the_call_would_have_had(
    plane: ControlPlane, client: AsyncAdapterClient
) -> None:
    plane.add("a")
    begun = await client.update("a", source="fake://missing", return_immediately=True)
    with pytest.raises(InvalidArgumentError) as caught:
        await client.operations.wait(begun.operation)
    assert [violation.field for violation in caught.value.violations] == ["adapter.source"]
    ended = await client.operations.get(begun.operation)
    assert ended.state == ops.OPERATION_STATE_FAILED
    status = status_pb2.Status.FromString(ended.error.SerializeToString())
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "deltaplane"
    assert (await client.get("a")).version == 1


async def test_waits_end_at_their_timeout_or_at_the_end(
    plane: ControlPlane, client: AsyncAdapterClient, address: str
) -> None:
    plane.add("a")
    plane.loader.gate.clear()
    begun = await client.load("a", return_immediately=True)
    assert begun.state == pb.ADAPTER_STATE_LOADING
    with pytest.raises(DeadlineExceededError, match=r"is still under way after 0\.1 s"):
        await client.operations.wait(begun.operation, timeout=SHORT_S)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = OperationServiceStub(channel)
        early = await stub.WaitOperation(
            ops.WaitOperationRequest(id=begun.operation, timeout=Duration(nanos=10**6))
        )
        assert (early.state, early.progress.stage) == (ops.OPERATION_STATE_RUNNING, "read")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WaitOperation(ops.WaitOperationRequest(id=begun.operation), timeout=SHORT_S)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WaitOperation(
                ops.WaitOperationRequest(id=begun.operation, timeout=Duration(seconds=-1))
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    waits = [asyncio.ensure_future(client.operations.wait(begun.operation)) for _ in range(3)]
    plane.loader.gate.set()
    assert {adapter.state for adapter in await asyncio.gather(*waits)} == {pb.ADAPTER_STATE_RESIDENT}


async def test_lists_and_cancellations(plane: ControlPlane, client: AsyncAdapterClient) -> None:
    plane.fetcher.gate.clear()
    begun = [await client.register(f"far-{i}", f"fake://{i}", return_immediately=True) for i in range(3)]
    ids = [adapter.operation for adapter in reversed(begun)]
    assert [op.id async for op in client.operations.list(page_size=1)] == ids
    assert [op.adapter async for op in client.operations.list("adapter=far-1 AND done=false")] == ["far-1"]
    with pytest.raises(InvalidArgumentError):
        [op async for op in client.operations.list("nonsense")]
    await client.operations.cancel(ids[0])
    with pytest.raises(CallCancelledError, match="was cancelled"):
        await client.operations.wait(ids[0])
    assert (await client.operations.cancel(ids[0])).state == ops.OPERATION_STATE_CANCELLED
    with pytest.raises(NotFoundError):
        await client.get("far-2")
    with pytest.raises(NotFoundError, match="there is no operation 'nobody'"):
        await client.operations.get("nobody")
    plane.fetcher.gate.set()
    for operation in ids[1:]:
        await client.operations.wait(operation)
    assert [adapter.name async for adapter in client.list()] == ["far-0", "far-1"]


class TestDeadlines:
    """A call whose deadline passes leaves a state that the order of events explains."""

    async def test_a_register_is_not_made(self, plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
        plane.fetcher.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RegisterAdapter(
                pb.RegisterAdapterRequest(name="far", source="fake://x"), timeout=SHORT_S
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.to_thread(eventually, lambda: plane.fetcher.abandoned == 1)
        await asyncio.to_thread(eventually, lambda: plane.manager.list_adapters().total_size == 0)
        assert plane.manager.operations.list_operations().total_size == 0

    async def test_unless_another_waits_for_it(
        self, plane: ControlPlane, stub: "AdapterServiceAsyncStub"
    ) -> None:
        plane.fetcher.gate.clear()
        request = pb.RegisterAdapterRequest(name="far", source="fake://x")
        patient = asyncio.ensure_future(stub.RegisterAdapter(request))
        await asyncio.to_thread(eventually, lambda: plane.fetcher.fetches == 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.RegisterAdapter(request, timeout=SHORT_S)
        plane.fetcher.gate.set()
        assert (await patient).version == 1
        assert (plane.fetcher.fetches, plane.fetcher.abandoned) == (1, 0)

    async def test_an_update_leaves_the_old_version(
        self, plane: ControlPlane, stub: "AdapterServiceAsyncStub"
    ) -> None:
        plane.add("a")
        plane.fetcher.gate.clear()
        request = pb.UpdateAdapterRequest(adapter=pb.Adapter(name="a", source="fake://x"))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.UpdateAdapter(request, timeout=SHORT_S)
        await asyncio.to_thread(eventually, lambda: plane.fetcher.abandoned == 1)
        adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"))
        assert (adapter.version, len(adapter.other_versions), adapter.operation) == (1, 0, "")

    async def test_a_pin_is_not_made(self, plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
        plane.add("a")
        plane.loader.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.PinAdapter(pb.PinAdapterRequest(name="a"), timeout=SHORT_S)
        plane.loader.gate.set()
        await asyncio.to_thread(plane.settle)
        adapter = await stub.EvictAdapter(pb.EvictAdapterRequest(name="a"))
        assert (adapter.state, list(adapter.pinned_tiers)) == (pb.ADAPTER_STATE_HOST, [])

    async def test_an_eviction_is_not_made(
        self, plane: ControlPlane, stub: "AdapterServiceAsyncStub"
    ) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        await asyncio.to_thread(plane.activate, lease)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.EvictAdapter(pb.EvictAdapterRequest(name="a", when_idle=True), timeout=SHORT_S)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.to_thread(
            eventually, lambda: plane.manager.operations.list_operations().total_size == 0
        )
        lease.release()
        assert (await stub.GetAdapter(pb.GetAdapterRequest(name="a"))).state == pb.ADAPTER_STATE_RESIDENT

    async def test_a_deletion_goes_on(self, plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a", wait_until_gone=True), timeout=SHORT_S)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"))
        assert (adapter.state, adapter.leases) == (pb.ADAPTER_STATE_DRAINING, 1)
        lease.release()
        await asyncio.to_thread(eventually, lambda: plane.manager.list_adapters().total_size == 0)


async def test_a_delete_that_waits(plane: ControlPlane, client: AsyncAdapterClient) -> None:
    plane.add("a", "b")
    lease = plane.manager.lease("a")
    gone = asyncio.ensure_future(client.delete("a", wait_until_gone=True))
    await asyncio.to_thread(eventually, lambda: plane.manager.get("a").operation != "")
    shown = await client.get("a")
    operation = shown.operation
    assert shown.state == pb.ADAPTER_STATE_DRAINING
    with pytest.raises(FailedPreconditionError, match="a deletion is not taken back"):
        await client.operations.cancel(operation)
    lease.release()
    assert (await gone).name == "a"
    assert (await client.operations.wait(operation)).name == "a"
    assert (await client.delete("b", wait_until_gone=True)).operation == ""
    assert (await client.delete("nobody", wait_until_gone=True, allow_missing=True)).name == "nobody"


async def test_fields_of_versions_pins_and_evictions(plane: ControlPlane, client: AsyncAdapterClient) -> None:
    plane.add("a")
    await client.update("a", source=plane.folder("b", rank=16), keep_previous=True)
    pinned = await client.pin("a", "host", version=1)
    (old,) = pinned.other_versions
    assert (old.version, old.rank, old.source) == (1, 8, str(plane.root / "a"))
    assert (list(old.tiers), list(old.pinned_tiers)) == ([pb.ADAPTER_TIER_HOST], [pb.ADAPTER_TIER_HOST])
    assert list(pinned.pinned_tiers) == []
    await client.pin("a", "host")
    both = await client.pin("a", "device")
    assert list(both.pinned_tiers) == list(both.tiers) == [pb.ADAPTER_TIER_HOST, pb.ADAPTER_TIER_DEVICE]
    assert not both.HasField("last_eviction")
    capacity = await client.capacity([8])
    assert (capacity.pinned_slots, capacity.max_pinned_slots, capacity.pinned_rank_pages) == (1, 1, 2)
    assert capacity.by_rank[0].fit_pinned == 0
    await client.unpin("a", "device")
    evicted = await client.evict("a")
    assert list(evicted.pinned_tiers) == list(evicted.tiers) == [pb.ADAPTER_TIER_HOST]
    assert (evicted.last_eviction.tier, evicted.last_eviction.reason) == (
        pb.ADAPTER_TIER_DEVICE,
        "by an administrator",
    )
    assert evicted.last_eviction.HasField("time")
    await client.unpin("a", version=1)
    assert list((await client.rollback("a")).tiers) == [pb.ADAPTER_TIER_HOST]


async def test_keys_and_checks_over_the_wire(plane: ControlPlane, client: AsyncAdapterClient) -> None:
    plane.add("a")
    key = str(uuid.uuid4())
    first = await client.pin("a", "host", idempotency_key=key)
    assert await client.pin("a", "host", idempotency_key=key) == first
    with pytest.raises(InvalidArgumentError, match="came with another request"):
        await client.unpin("a", idempotency_key=key)
    assert (await client.evict("a", "device", validate_only=True)).state == pb.ADAPTER_STATE_HOST
    with pytest.raises(FailedPreconditionError):
        await client.evict("a", "host", validate_only=True)
    await client.delete("a", force=True, validate_only=True)
    assert (await client.get("a")).state == pb.ADAPTER_STATE_HOST


async def test_the_blocking_client_waits_and_cancels(plane: ControlPlane, address: str) -> None:
    def use() -> None:
        with AdapterClient(address) as client:
            plane.fetcher.gate.clear()
            begun = client.register("far", "fake://x", return_immediately=True)
            assert [op.id for op in client.operations.list("done=false")] == [begun.operation]
            assert client.operations.get(begun.operation).adapter == "far"
            with pytest.raises(DeadlineExceededError):
                client.operations.wait(begun.operation, timeout=SHORT_S)
            client.operations.cancel(begun.operation)
            with pytest.raises(CallCancelledError):
                client.operations.wait(begun.operation)
            plane.fetcher.gate.set()
            again = client.register("far", "fake://x", return_immediately=True)
            assert client.operations.wait(again.operation, timeout=30).version == 1

    await asyncio.to_thread(use)


async def test_a_watch_tells_of_those_that_enter_and_leave_its_filter(
    plane: ControlPlane, client: AsyncAdapterClient
) -> None:
    plane.add("a", "b", "c")
    plane.manager.load("a")
    async with client.watch("state=RESIDENT", timeout=60) as events:
        seen = [await anext(aiter(events)) for _ in range(2)]
        assert [event.adapter.name for event in seen] == ["a", ""]
        for step in (
            lambda: plane.manager.load("b"),
            lambda: plane.manager.update("c", labels={"not": "seen"}),
            lambda: plane.manager.evict("a"),
            lambda: plane.manager.update("a", labels={"not": "seen"}),
            lambda: plane.manager.load("a"),
            lambda: plane.manager.delete("b"),
        ):
            await asyncio.to_thread(step)
        plane.add("d")
        await asyncio.to_thread(plane.manager.load, "d")
        changes = [await anext(aiter(events)) for _ in range(5)]
    told = [(event.adapter.name, event.left_filter) for event in changes]
    assert told == [("b", False), ("a", True), ("a", False), ("b", True), ("d", False)]
    token = changes[1].resume_token
    async with client.watch("state=RESIDENT", resume_token=token, timeout=60) as events:
        changes = [await anext(aiter(events)) for _ in range(4)]
    again = [(event.adapter.name, event.left_filter) for event in changes]
    assert again == [("a", True), ("a", False), ("b", True), ("d", True)], "what passed before is not known"


async def test_a_watcher_that_reads_too_slowly_is_cut_off_with_a_reason(
    plane: ControlPlane, stub: "AdapterServiceAsyncStub"
) -> None:
    plane.add("a")
    watch = aiter(stub.WatchAdapters(pb.WatchAdaptersRequest()))
    assert (await anext(watch)).type == pb.ADAPTER_EVENT_TYPE_SNAPSHOT
    labels = {f"key-{i}": "x" * 256 for i in range(64)}

    def change() -> None:
        for i in range(4000):
            plane.manager.update("a", labels=labels | {"key-0": str(i)})

    await asyncio.to_thread(change)
    last = pb.WatchAdaptersResponse()

    async def read_to_the_end() -> None:
        async for event in watch:
            last.CopyFrom(event)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    assert info.reason == "WATCHER_TOO_SLOW"
    resumed = stub.WatchAdapters(pb.WatchAdaptersRequest(resume_token=last.resume_token))
    async for event in resumed:
        if event.adapter.labels["key-0"] == "3999":
            break
    resumed.cancel()


async def test_watches_are_bounded_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    """Also where it ends while the server waits for its client to read."""

    async def try_to_watch(stub: "AdapterServiceAsyncStub") -> str:
        """Why not; empty, and watching, where it may."""
        call = stub.WatchAdapters(pb.WatchAdaptersRequest())
        try:
            assert (await anext(aiter(call))).type == pb.ADAPTER_EVENT_TYPE_SNAPSHOT
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        calls.append(call)
        return ""

    calls: list[grpc.aio.UnaryStreamCall[pb.WatchAdaptersRequest, pb.WatchAdaptersResponse]] = []
    labels = {f"key-{i}": "x" * 256 for i in range(64)}
    with ControlPlane(tmp_path, max_watches=2) as plane:
        plane.add("a")
        async with serving_admin(plane, tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
            assert [await try_to_watch(AdapterServiceStub(channel)) for _ in range(2)] == ["", ""]
            for i in range(200):
                await asyncio.to_thread(plane.manager.update, "a", labels=labels | {"key-0": str(i)})
            for call in calls.copy():
                why = await try_to_watch(AdapterServiceStub(channel))
                assert why.startswith("RESOURCE_EXHAUSTED: 2 watches are open, which is all that --max-wat")
                call.cancel()
                async with asyncio.timeout(30):
                    while await try_to_watch(AdapterServiceStub(channel)):
                        pass
            for call in calls:
                call.cancel()


async def test_many_watchers_see_the_same(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    async def watch() -> list[str]:
        call = stub.WatchAdapters(pb.WatchAdaptersRequest())
        names: list[str] = []
        async for event in call:
            if event.type == pb.ADAPTER_EVENT_TYPE_REGISTERED:
                names.append(event.adapter.name)
            if len(names) == 10:
                break
            ready.release()
        call.cancel()
        return names

    ready = asyncio.Semaphore(0)
    watchers = [asyncio.ensure_future(watch()) for _ in range(100)]
    for _ in watchers:
        await ready.acquire()
    wanted = [f"a{i}" for i in range(10)]
    for name in wanted:
        await asyncio.to_thread(plane.manager.register, name, str(write_adapter(plane.root / name)))
    assert await asyncio.gather(*watchers) == [wanted] * 100
