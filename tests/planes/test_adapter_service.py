"""AdapterService over a real server, with an adapter manager over fakes behind it."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc import error_details_pb2, status_pb2

from admin_server import serving_admin
from control_plane import ControlPlane, eventually
from deltaplane.v1 import adapters_pb2 as pb
from deltaplane.v1.adapters_pb2_grpc import AdapterServiceStub
from deltaplane_controlplane.conversion import to_adapter, to_slot, to_watch
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.interceptor import DETAILS_KEY
from deltaplane_controlplane.versions import AdapterState, Tier
from deltaplane_controlplane.watch import Change

if TYPE_CHECKING:
    from deltaplane.v1.adapters_pb2_grpc import AdapterServiceAsyncStub


@pytest_asyncio.fixture
async def stub(plane: ControlPlane, tmp_path: Path) -> AsyncIterator["AdapterServiceAsyncStub"]:
    async with serving_admin(plane, tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        yield AdapterServiceStub(channel)


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, status_pb2.Status]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = dict(caught.value.trailing_metadata())[DETAILS_KEY]
    return caught.value.code(), status_pb2.Status.FromString(details)


def info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


def fields_of(status: status_pb2.Status) -> list[str]:
    request = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(request)
    return [violation.field for violation in request.field_violations]


async def test_register_get_and_every_field(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    request = pb.RegisterAdapterRequest(
        name="a",
        source=plane.folder("a", rank=12, nbytes=77, features=("bias", "dora")),
        labels={"team": "law"},
        load_tier=pb.ADAPTER_TIER_DEVICE,
        idempotency_key=str(uuid.uuid4()),
    )
    await stub.RegisterAdapter(request)
    await stub.LoadAdapter(pb.LoadAdapterRequest(name="a"))
    adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"))
    assert (adapter.name, adapter.version, adapter.state) == ("a", 1, pb.ADAPTER_STATE_RESIDENT)
    assert (adapter.rank, adapter.alpha, adapter.num_layers) == (12, 16.0, 2)
    assert (adapter.host_bytes, adapter.device_bytes) == (77, 4000)
    assert (adapter.slot, list(adapter.pages), adapter.lru_position) == (0, [0, 1, 2, 3], 0)
    assert list(adapter.features) == ["bias", "dora"]
    assert adapter.HasField("slot")
    assert list(adapter.target_modules) == ["q_proj", "v_proj"]
    assert dict(adapter.labels) == {"team": "law"}
    assert (adapter.loads, adapter.misses, len(adapter.digest)) == (1, 0, 64)
    assert adapter.last_load.pack_ms == 2.0
    assert adapter.create_time.ToDatetime() == adapter.update_time.ToDatetime()
    assert not adapter.HasField("last_use_time")


async def test_register_refusals(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    async def register(name: str, source: str) -> tuple[grpc.StatusCode, status_pb2.Status]:
        return await refusal(stub.RegisterAdapter(pb.RegisterAdapterRequest(name=name, source=source)))

    code, status = await register("a/b", plane.folder("a"))
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["name"])
    code, status = await register("a", "/etc")
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["source"])
    assert info_of(status).reason == "SOURCE_NOT_ALLOWED"
    code, status = await register("a", plane.folder("big", rank=65))
    assert "rank 65 is over --max-lora-rank 64" in status.message
    plane.add("a")
    code, status = await register("a", plane.folder("b"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert info_of(status).metadata["adapter"] == "a"
    code, status = await refusal(
        stub.RegisterAdapter(
            pb.RegisterAdapterRequest(name="c", source=plane.folder("c"), load_tier=9)  # type: ignore[arg-type]
        )
    )
    assert fields_of(status) == ["load_tier"]


async def test_list_pages_and_filters(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a", "b", "c")
    first = await stub.ListAdapters(pb.ListAdaptersRequest(page_size=2))
    assert ([a.name for a in first.adapters], first.total_size) == (["a", "b"], 3)
    second = await stub.ListAdapters(pb.ListAdaptersRequest(page_size=2, page_token=first.next_page_token))
    assert ([a.name for a in second.adapters], second.next_page_token) == (["c"], "")
    found = await stub.ListAdapters(pb.ListAdaptersRequest(filter="name:b*"))
    assert [a.name for a in found.adapters] == ["b"]
    code, status = await refusal(stub.ListAdapters(pb.ListAdaptersRequest(filter="nonsense")))
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["filter"])


async def test_update_rollback_and_masks(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a")
    lease = plane.manager.lease("a")
    updated = await stub.UpdateAdapter(
        pb.UpdateAdapterRequest(
            adapter=pb.Adapter(name="a", source=plane.folder("b"), labels={"not": "taken"}),
            update_mask=FieldMask(paths=["source"]),
            keep_previous=True,
        )
    )
    assert (updated.version, dict(updated.labels)) == (2, {})
    assert [(v.version, v.leases, v.state) for v in updated.other_versions] == [
        (1, 1, pb.ADAPTER_STATE_REGISTERED)
    ]
    labelled = await stub.UpdateAdapter(
        pb.UpdateAdapterRequest(adapter=pb.Adapter(name="a", labels={"x": "y"}), etag=updated.etag)
    )
    assert (labelled.version, dict(labelled.labels)) == (2, {"x": "y"})
    code, status = await refusal(
        stub.UpdateAdapter(pb.UpdateAdapterRequest(adapter=labelled, etag=updated.etag))
    )
    assert (code, info_of(status).reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    code, status = await refusal(
        stub.UpdateAdapter(
            pb.UpdateAdapterRequest(adapter=labelled, update_mask=FieldMask(paths=["rank", "source"]))
        )
    )
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["update_mask"])
    cleared = await stub.UpdateAdapter(
        pb.UpdateAdapterRequest(adapter=pb.Adapter(name="a"), update_mask=FieldMask(paths=["labels"]))
    )
    assert dict(cleared.labels) == {}
    back = await stub.RollbackAdapter(pb.RollbackAdapterRequest(name="a"))
    assert back.version == 1
    assert (await stub.RollbackAdapter(pb.RollbackAdapterRequest(name="a", version=2))).version == 2
    code, _ = await refusal(stub.RollbackAdapter(pb.RollbackAdapterRequest(name="a", version=0)))
    assert code is grpc.StatusCode.NOT_FOUND
    lease.release()


async def test_delete(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a", "b")
    lease = plane.manager.lease("a")
    gone = await stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a"))
    assert (gone.state, gone.leases) == (pb.ADAPTER_STATE_DRAINING, 1)
    assert plane.expelled == []
    await stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a", drain_timeout=Duration()))
    await asyncio.to_thread(eventually, lambda: plane.expelled == [lease.uid])
    lease.release()
    code, status = await refusal(stub.GetAdapter(pb.GetAdapterRequest(name="a")))
    assert (code, info_of(status).reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
    missing = await stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a", allow_missing=True))
    assert (missing.name, missing.version) == ("a", 0)
    code, _ = await refusal(stub.DeleteAdapter(pb.DeleteAdapterRequest(name="a")))
    assert code is grpc.StatusCode.NOT_FOUND
    await stub.PinAdapter(pb.PinAdapterRequest(name="b"))
    code, status = await refusal(stub.DeleteAdapter(pb.DeleteAdapterRequest(name="b")))
    assert (code, info_of(status).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_PINNED")
    code, status = await refusal(
        stub.DeleteAdapter(pb.DeleteAdapterRequest(name="b", drain_timeout=Duration(seconds=-1)))
    )
    assert fields_of(status) == ["drain_timeout"]
    await stub.DeleteAdapter(pb.DeleteAdapterRequest(name="b", force=True))


async def test_load_evict_pin(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a", "b", "c")
    host = await stub.LoadAdapter(pb.LoadAdapterRequest(name="a", tier=pb.ADAPTER_TIER_HOST))
    assert host.state == pb.ADAPTER_STATE_HOST
    pinned = await stub.PinAdapter(pb.PinAdapterRequest(name="a"))
    assert (pinned.state, pinned.pinned_tier) == (pb.ADAPTER_STATE_RESIDENT, pb.ADAPTER_TIER_DEVICE)
    code, status = await refusal(stub.EvictAdapter(pb.EvictAdapterRequest(name="a")))
    assert (code, info_of(status).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_IN_USE")
    code, status = await refusal(stub.PinAdapter(pb.PinAdapterRequest(name="b")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "1 of 2 slots are pinned" in status.message
    lease = plane.manager.lease("b")
    await asyncio.to_thread(plane.activate, lease)
    code, status = await refusal(stub.LoadAdapter(pb.LoadAdapterRequest(name="c")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0
    lease.release()
    unpinned = await stub.UnpinAdapter(pb.UnpinAdapterRequest(name="a"))
    assert unpinned.pinned_tier == pb.ADAPTER_TIER_UNSPECIFIED
    evicted = await stub.EvictAdapter(pb.EvictAdapterRequest(name="a", tier=pb.ADAPTER_TIER_HOST))
    assert evicted.state == pb.ADAPTER_STATE_REGISTERED
    assert not evicted.HasField("slot")
    assert not evicted.HasField("lru_position")


async def test_a_load_that_fails_tells_why(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a")
    (plane.root / "a").rename(plane.root / "away")
    code, status = await refusal(stub.LoadAdapter(pb.LoadAdapterRequest(name="a")))
    assert (code, info_of(status).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_LOAD_FAILED")
    assert "there is no folder" in status.message
    adapter = await stub.GetAdapter(pb.GetAdapterRequest(name="a"))
    assert adapter.state == pb.ADAPTER_STATE_FAILED
    assert "there is no folder" in adapter.state_reason


async def test_a_caller_who_goes_does_not_end_a_load(
    plane: ControlPlane, stub: "AdapterServiceAsyncStub"
) -> None:
    plane.add("a")
    plane.loader.gate.clear()
    begun = await stub.LoadAdapter(pb.LoadAdapterRequest(name="a", return_immediately=True))
    assert begun.state == pb.ADAPTER_STATE_LOADING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.LoadAdapter(pb.LoadAdapterRequest(name="a"), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    waiting = asyncio.ensure_future(stub.LoadAdapter(pb.LoadAdapterRequest(name="a")))
    # Questions are answered meanwhile.
    assert (await stub.GetAdapter(pb.GetAdapterRequest(name="a"))).state == pb.ADAPTER_STATE_LOADING
    waiting.cancel()
    plane.loader.gate.set()
    loaded = await stub.LoadAdapter(pb.LoadAdapterRequest(name="a"))
    assert loaded.state == pb.ADAPTER_STATE_RESIDENT
    assert plane.loader.packs.total() == 1


async def test_slots_and_capacity(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    plane.add("a", rank=24)
    lease = plane.manager.lease("a")
    await asyncio.to_thread(plane.activate, lease)
    slots = (await stub.ListSlots(pb.ListSlotsRequest())).slots
    assert [(s.slot, s.adapter, s.rank, s.running) for s in slots] == [(0, "a", 24, 1), (1, "", 0, 0)]
    assert slots[0].state == pb.ADAPTER_STATE_RESIDENT
    assert (list(slots[0].pages), slots[0].device_bytes) == ([0, 1, 2], 3000)
    assert not slots[0].HasField("lru_position")
    lease.release()
    slots = (await stub.ListSlots(pb.ListSlotsRequest())).slots
    assert (slots[0].HasField("lru_position"), slots[0].lru_position) == (True, 0)

    capacity = await stub.GetCapacity(pb.GetCapacityRequest())
    assert (capacity.slots, capacity.free_slots, capacity.available_slots) == (2, 1, 2)
    assert (capacity.rank_pages, capacity.free_rank_pages, capacity.rank_page_rows) == (8, 5, 8)
    assert (capacity.kv_pages, capacity.free_kv_pages, capacity.kv_page_size) == (100, 40, 16)
    assert {share.purpose: share.bytes for share in capacity.memory} == {"weights": 7, "kv_pages": 9}
    assert [r.rank for r in capacity.by_rank] == [8, 16, 32, 64]
    assert (capacity.device.used_bytes, capacity.host.used_bytes) == (3000, 100)
    asked = await stub.GetCapacity(pb.GetCapacityRequest(ranks=[40]))
    assert [(r.rank, r.pages, r.fit_free, r.fit_available) for r in asked.by_rank] == [(40, 5, 1, 1)]
    _, status = await refusal(stub.GetCapacity(pb.GetCapacityRequest(ranks=[8, 0])))
    assert fields_of(status) == ["ranks[1]"]


async def test_watch_sends_what_is_and_what_happens(
    plane: ControlPlane, stub: "AdapterServiceAsyncStub"
) -> None:
    plane.add("a", "b")
    watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), timeout=60)
    events = watch.__aiter__()
    kinds = [await anext(events) for _ in range(3)]
    assert [(e.type, e.adapter.name) for e in kinds] == [
        (pb.ADAPTER_EVENT_TYPE_SNAPSHOT, "a"),
        (pb.ADAPTER_EVENT_TYPE_SNAPSHOT, "b"),
        (pb.ADAPTER_EVENT_TYPE_SNAPSHOT_END, ""),
    ]
    assert not kinds[0].resume_token
    plane.add("c")
    registered = await anext(events)
    assert (registered.type, registered.adapter.name, registered.version) == (
        pb.ADAPTER_EVENT_TYPE_REGISTERED,
        "c",
        1,
    )
    plane.manager.load("c")
    assert (await anext(events)).type == pb.ADAPTER_EVENT_TYPE_LOADING
    loaded = await anext(events)
    assert (loaded.type, loaded.adapter.state) == (
        pb.ADAPTER_EVENT_TYPE_LOADED,
        pb.ADAPTER_STATE_RESIDENT,
    )
    watch.cancel()

    resumed = stub.WatchAdapters(
        pb.WatchAdaptersRequest(resume_token=registered.resume_token, filter="name:c*"), timeout=60
    )
    assert [(await anext(resumed.__aiter__())).type for _ in range(2)] == [
        pb.ADAPTER_EVENT_TYPE_LOADING,
        pb.ADAPTER_EVENT_TYPE_LOADED,
    ]
    resumed.cancel()


async def test_watch_refusals_and_its_end(plane: ControlPlane, stub: "AdapterServiceAsyncStub") -> None:
    async def first(request: pb.WatchAdaptersRequest) -> object:
        return await anext(stub.WatchAdapters(request, timeout=60).__aiter__())

    code, status = await refusal(first(pb.WatchAdaptersRequest(resume_token="nonsense")))
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["resume_token"])
    code, status = await refusal(first(pb.WatchAdaptersRequest(resume_token="00000000.5")))
    assert (code, info_of(status).reason) == (grpc.StatusCode.OUT_OF_RANGE, "RESUME_TOKEN_EXPIRED")
    code, status = await refusal(first(pb.WatchAdaptersRequest(filter="nonsense")))
    assert (code, fields_of(status)) == (grpc.StatusCode.INVALID_ARGUMENT, ["filter"])

    watch = stub.WatchAdapters(pb.WatchAdaptersRequest(), timeout=60)
    events = watch.__aiter__()
    assert (await anext(events)).type == pb.ADAPTER_EVENT_TYPE_SNAPSHOT_END
    await asyncio.to_thread(plane.manager.close)
    code, _ = await refusal(anext(events))
    assert code is grpc.StatusCode.UNAVAILABLE
    code, _ = await refusal(stub.UnpinAdapter(pb.UnpinAdapterRequest(name="a")))
    assert code is grpc.StatusCode.UNAVAILABLE


def test_every_state_tier_and_event_has_its_word_on_the_wire(plane: ControlPlane, tmp_path: Path) -> None:
    for state in AdapterState:
        assert pb.AdapterState.Value(f"ADAPTER_STATE_{state.name}")
    for tier in Tier:
        assert pb.AdapterTier.Value(f"ADAPTER_TIER_{tier.name}")
    for kind in EventType:
        assert pb.AdapterEventType.Value(f"ADAPTER_EVENT_TYPE_{kind.name}")
    view = plane.add("a")
    with plane.manager.subscribe(lambda: None) as subscription:
        plane.manager.pin("a", Tier.HOST)
        sent = [to_watch(Change(event, left_filter=False)) for event in subscription.read()]
    assert [event.reason for event in sent] == ["", "", ""]
    assert to_adapter(view).state == pb.ADAPTER_STATE_REGISTERED
    assert to_slot(plane.manager.slots()[0]) == pb.Slot(slot=0)
