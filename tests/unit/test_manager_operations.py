"""What administrators do that takes its time: fetches, loads, evictions and deletions as operations."""

import uuid
from pathlib import Path

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.events import AdapterEvent, Subscription
from deltaplane_controlplane.operation import Operation
from deltaplane_controlplane.operation_views import OperationKind, OperationState
from deltaplane_controlplane.versions import AdapterState, Tier


def told(subscription: Subscription) -> list[tuple[str, AdapterState]]:
    return [(event.type.name, event.adapter.state) for event in subscription.read()]


def wait_for_fetches(plane: ControlPlane, count: int) -> None:
    eventually(lambda: plane.fetcher.fetches == count, f"fetch {count}")


class TestFetch:
    def test_an_adapter_that_is_fetched_is_shown_and_not_served(self, plane: ControlPlane) -> None:
        plane.fetcher.gate.clear()
        with plane.manager.subscribe(lambda: None) as subscription:
            operation = plane.manager.calls.register("far", "fake://x", labels={"team": "law"})
            shown = plane.manager.get("far")
            assert (shown.state, shown.version, shown.manifest.source) == (
                AdapterState.FETCHING,
                0,
                "fake://x",
            )
            assert shown.operation == operation.id == plane.manager.calls.begun(operation).operation
            assert [v.name for v in plane.manager.list_adapters(filter="state=FETCHING").adapters] == ["far"]
            assert plane.manager.count_states()[AdapterState.FETCHING] == 1
            assert plane.manager.capacity().registered_adapters == 0
            wait_for_fetches(plane, 1)
            eventually(lambda: operation.view().stage == "fetch")
            assert (operation.view().done_bytes, operation.view().total_bytes) == (50, 100)
            for refused in (
                lambda: plane.manager.lease("far"),
                lambda: plane.manager.load("far"),
                lambda: plane.manager.pin("far"),
                lambda: plane.manager.delete("far"),
            ):
                with pytest.raises(FailedPreconditionError, match="are being fetched: wait") as caught:
                    refused()
                assert caught.value.reason == "ADAPTER_FETCHING"
            plane.fetcher.gate.set()
            view = operation.wait(30)
            assert (view.state, view.version, view.labels) == (AdapterState.REGISTERED, 1, {"team": "law"})
            assert (view.manifest.source, view.operation) == ("fake://x@1", "")
            assert view.manifest.fetch_ms > 0
            assert told(subscription) == [
                ("FETCHING", AdapterState.FETCHING),
                ("REGISTERED", AdapterState.REGISTERED),
            ]
        plane.run("far")

    def test_a_fetch_that_fails_leaves_nothing(self, plane: ControlPlane) -> None:
        with plane.manager.subscribe(lambda: None) as subscription:
            with pytest.raises(InvalidArgumentError, match="there is no fake://missing"):
                plane.manager.register("far", "fake://missing")
            events: list[AdapterEvent] = subscription.read()
        assert [event.type.name for event in events] == ["FETCHING", "DELETED"]
        assert events[1].reason == "not fetched: source: there is no fake://missing"
        with pytest.raises(NotFoundError):
            plane.manager.get("far")

    def test_equal_calls_share_one_fetch(self, plane: ControlPlane) -> None:
        plane.fetcher.gate.clear()
        first = plane.manager.calls.register("far", "fake://x")
        assert plane.manager.calls.register("far", "fake://x") is first
        other = plane.manager.calls.register("far", "fake://y")
        assert other is not first
        wait_for_fetches(plane, 2)
        first.leave()
        assert first.view().state is OperationState.RUNNING
        other.leave()
        with pytest.raises(CancelledError, match="callers have gone away"):
            other.end.result(30)
        plane.fetcher.gate.set()
        assert first.wait(30).manifest.source == "fake://x@1"
        assert (plane.fetcher.fetches, plane.fetcher.abandoned) == (2, 1)

    def test_a_fetch_that_nobody_wants_any_more_ends(self, plane: ControlPlane) -> None:
        plane.fetcher.gate.clear()
        operation = plane.manager.calls.register("far", "fake://x")
        wait_for_fetches(plane, 1)
        operation.leave()
        with pytest.raises(CancelledError):
            operation.end.result(30)
        assert plane.fetcher.abandoned == 1
        with pytest.raises(NotFoundError):
            plane.manager.get("far")
        plane.fetcher.gate.set()
        assert plane.manager.register("far", "fake://x").version == 1

    def test_one_that_is_kept_goes_on_and_can_be_cancelled(self, plane: ControlPlane) -> None:
        plane.fetcher.gate.clear()
        operation = plane.manager.calls.register("far", "fake://x")
        operation.keep()
        operation.leave()
        wait_for_fetches(plane, 1)
        assert operation.view().state is OperationState.RUNNING
        plane.manager.operations.cancel(operation.id)
        with pytest.raises(CancelledError):
            operation.end.result(30)
        assert plane.manager.operations.get(operation.id).view().state is OperationState.CANCELLED
        with pytest.raises(NotFoundError):
            plane.manager.get("far")

    def test_the_first_of_two_sources_wins_the_name(self, plane: ControlPlane) -> None:
        plane.fetcher.gate.clear()
        slow = plane.manager.calls.register("a", "fake://x")
        assert plane.add("a").version == 1
        assert plane.manager.get("a").state is AdapterState.REGISTERED
        plane.fetcher.gate.set()
        with pytest.raises(AlreadyExistsError):
            slow.wait(30)
        assert plane.manager.get("a").manifest.source == str(plane.root / "a")

    def test_while_a_deleted_one_of_the_name_drains(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.manager.delete("a")
        plane.fetcher.gate.clear()
        operation = plane.manager.calls.register("a", "fake://x")
        shown = plane.manager.get("a")
        assert (shown.state, shown.operation) == (AdapterState.DRAINING, operation.id)
        plane.fetcher.gate.set()
        assert operation.wait(30).version == 2
        lease.release()
        assert plane.manager.get("a").other_versions == ()

    def test_the_old_version_serves_while_a_new_one_is_fetched(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.run("a")
        plane.fetcher.gate.clear()
        with plane.manager.subscribe(lambda: None) as subscription:
            operation = plane.manager.calls.update("a", source="fake://x")
            assert told(subscription) == [("FETCHING", AdapterState.RESIDENT)]
            assert plane.manager.get("a").operation == operation.id
            plane.run("a")
            assert plane.manager.get("a").version == 1
            plane.fetcher.gate.set()
            assert operation.wait(30).version == 2
            with pytest.raises(InvalidArgumentError, match=r"adapter\.source: there is no fake://missing"):
                plane.manager.update("a", source="fake://missing")
            events = subscription.read()
        assert (events[-1].type.name, events[-1].adapter.state) == ("FAILED", AdapterState.REGISTERED)
        assert events[-1].reason.startswith("not fetched: ")
        assert plane.manager.get("a").version == 2
        plane.run("a")

    def test_validate_only_fetches_and_shows_nothing(self, plane: ControlPlane) -> None:
        with plane.manager.subscribe(lambda: None) as subscription:
            view = plane.manager.register("far", "fake://x", validate_only=True)
            assert (view.version, view.manifest.source) == (0, "fake://x@1")
            assert subscription.read() == []
        assert plane.manager.list_adapters().total_size == 0

    def test_a_local_register_that_answers_at_once(self, plane: ControlPlane) -> None:
        folder = plane.folder("a")
        operation = plane.manager.calls.register("a", folder, is_shown=True)
        view = plane.manager.calls.begun(operation, folder)
        assert (view.name, view.operation) == ("a", operation.id)
        assert view.state in (AdapterState.FETCHING, AdapterState.REGISTERED)
        assert operation.wait(30).state is AdapterState.REGISTERED

    def test_what_was_under_way_is_absent_after_a_restart(self, tmp_path: Path) -> None:
        path = tmp_path / "catalogue.db"
        with ControlPlane(tmp_path, catalogue=path) as plane:
            plane.fetcher.gate.clear()
            operation = plane.manager.calls.register("far", "fake://x")
            operation.keep()
            wait_for_fetches(plane, 1)
            plane.manager.close()
            with pytest.raises(UnavailableError):
                operation.end.result(0)
        with ControlPlane(tmp_path, catalogue=path) as plane:
            assert plane.manager.list_adapters().total_size == 0
            with pytest.raises(NotFoundError, match="earlier run of the server"):
                plane.manager.operations.get(operation.id)

    def test_a_key_joins_the_operation_and_a_failed_one_is_forgotten(self, plane: ControlPlane) -> None:
        key = str(uuid.uuid4())
        plane.fetcher.gate.clear()
        first = plane.manager.calls.register("far", "fake://x", idempotency_key=key)
        assert plane.manager.calls.register("far", "fake://x", idempotency_key=key) is first
        with pytest.raises(InvalidArgumentError, match="came with another request"):
            plane.manager.calls.load("far", idempotency_key=key)
        plane.manager.operations.cancel(first.id)
        again = plane.manager.calls.register("far", "fake://x", idempotency_key=key)
        assert again is not first
        plane.fetcher.gate.set()
        assert again.wait(30).version == 1
        with pytest.raises(CancelledError):
            first.wait(30)


@pytest.mark.parametrize(("source", "stages"), [("fake://x", ["fetch", "check"]), ("a", ["check"])])
def test_files_are_fetched_and_checked_in_stages(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, source: str, stages: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Operation, "report", lambda _, stage, done, total: seen.append(stage))
    plane.manager.register("a", source if "://" in source else plane.folder(source))
    assert list(dict.fromkeys(seen)) == stages


class TestLoad:
    def test_stages(self, tmp_path: Path) -> None:
        with ControlPlane(tmp_path, loader_threads=1) as plane:
            plane.add("a", "b")
            plane.loader.gate.clear()
            plane.pool.gate.clear()
            first, second = plane.manager.calls.load("a"), plane.manager.calls.load("b")
            eventually(lambda: first.view().stage == "read")
            assert second.view().stage == "queue"
            assert plane.manager.get("a").operation == first.id
            plane.loader.gate.set()
            eventually(lambda: first.view().stage == "copy")
            plane.pool.gate.set()
            view = first.wait(30)
            assert (view.state, view.tiers) == (AdapterState.RESIDENT, (Tier.HOST, Tier.DEVICE))
            assert view.last_load is not None
            assert view.create_time is not None
            assert view.last_load.end >= view.create_time
            second.wait(30)

    def test_cancelling_leaves_the_load_to_others(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        mine, theirs = plane.manager.calls.load("a"), plane.manager.calls.load("a")
        plane.manager.operations.cancel(mine.id)
        with pytest.raises(CancelledError):
            mine.wait(0)
        plane.loader.gate.set()
        assert theirs.wait(30).state is AdapterState.RESIDENT
        assert plane.loader.packs.total() == 1

    def test_a_kept_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.manager.update("a", source=plane.folder("b"), keep_previous=True)
        view = plane.manager.calls.load("a", Tier.HOST, version=1).wait(30)
        assert (view.state, view.tiers) == (AdapterState.REGISTERED, ())
        assert [(v.number, v.state, v.tiers) for v in view.other_versions] == [
            (1, AdapterState.HOST, (Tier.HOST,))
        ]
        with pytest.raises(NotFoundError, match="no version 7"):
            plane.manager.calls.load("a", version=7)


class TestEvict:
    def test_as_soon_as_nothing_uses_it(self, plane: ControlPlane) -> None:
        plane.add("a")
        leases = [plane.manager.lease("a") for _ in range(2)]
        for lease in leases:
            plane.activate(lease)
        operation = plane.manager.calls.evict("a", Tier.HOST, when_idle=True)
        assert (operation.kind, operation.view().stage) == (OperationKind.EVICT, "idle")
        leases[0].release()
        assert plane.resident() == {"a"}
        assert operation.view().state is OperationState.RUNNING
        leases[1].release()
        view = operation.wait(30)
        assert (view.state, view.tiers) == (AdapterState.REGISTERED, ())
        assert view.last_eviction is not None
        assert (view.last_eviction.tier, view.last_eviction.reason) == (Tier.HOST, "by an administrator")
        assert view.evictions == 1

    def test_a_load_under_way_ends_first(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        loading = plane.manager.calls.load("a")
        leaving = plane.manager.calls.evict("a", when_idle=True)
        plane.loader.gate.set()
        assert leaving.wait(30).state is AdapterState.HOST
        loading.wait(30)

    def test_what_nothing_uses_goes_at_once(self, plane: ControlPlane) -> None:
        plane.add("a")
        assert plane.manager.calls.evict("a", when_idle=True).wait(30).state is AdapterState.REGISTERED
        plane.run("a")
        assert plane.manager.calls.evict("a", when_idle=True).wait(30).state is AdapterState.HOST

    def test_cancelling_leaves_it_where_it_is(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.activate(lease)
        operation = plane.manager.calls.evict("a", when_idle=True)
        plane.manager.operations.cancel(operation.id)
        with pytest.raises(CancelledError):
            operation.wait(0)
        lease.release()
        assert plane.resident() == {"a"}

    def test_pins_refuse_it_then_and_later(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.activate(lease)
        operation = plane.manager.calls.evict("a", Tier.HOST, when_idle=True)
        plane.manager.pin("a", Tier.HOST)
        with pytest.raises(FailedPreconditionError, match="pinned in tier HOST"):
            plane.manager.calls.evict("a", Tier.HOST, when_idle=True)
        lease.release()
        with pytest.raises(FailedPreconditionError, match="pinned in tier HOST"):
            operation.wait(30)
        assert plane.resident() == {"a"}

    def test_one_that_is_deleted_meanwhile_is_out_of_every_tier(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.activate(lease)
        operation = plane.manager.calls.evict("a", when_idle=True)
        plane.manager.delete("a")
        lease.release()
        with pytest.raises(NotFoundError):
            operation.wait(30)

    def test_a_version_that_drains(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.activate(lease)
        plane.manager.update("a", source=plane.folder("b"))
        lease.deactivate()
        view = plane.manager.calls.evict("a", version=1).wait(30)
        assert [(v.number, v.tiers) for v in view.other_versions] == [(1, (Tier.HOST,))]
        lease.release()

    def test_for_whom_it_went(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        for name in ("a", "b", "c"):
            plane.run(name)
        eviction = plane.manager.get("a").last_eviction
        assert eviction is not None
        assert (eviction.tier, eviction.reason) == (Tier.DEVICE, "room for c@1")


class TestDelete:
    def test_ends_when_the_last_lease_does(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        view, operation = plane.manager.calls.delete("a")
        assert operation is not None
        assert (view.state, view.operation) == (AdapterState.DRAINING, operation.id)
        assert (operation.view().stage, operation.view().result) == ("drain", None)
        operation.leave()
        assert operation.view().state is OperationState.RUNNING
        lease.release()
        gone = operation.end.result(30)
        assert (gone.name, gone.version, gone.state, gone.leases) == ("a", 1, AdapterState.DRAINING, 0)
        assert plane.manager.operations.get(operation.id).view().state is OperationState.SUCCEEDED

    def test_what_nobody_holds_is_gone_at_once(self, plane: ControlPlane) -> None:
        plane.add("a")
        view, operation = plane.manager.calls.delete("a")
        assert (view.state, operation) == (AdapterState.DRAINING, None)

    def test_all_of_its_versions(self, plane: ControlPlane) -> None:
        plane.add("a")
        old = plane.manager.lease("a")
        plane.manager.update("a", source=plane.folder("b"))
        new = plane.manager.lease("a")
        _, operation = plane.manager.calls.delete("a")
        assert operation is not None
        again = plane.manager.calls.delete("a", drain_timeout_s=0)[1]
        assert again is not None
        eventually(lambda: sorted(plane.expelled, key=str) == [old.uid, new.uid])
        new.release()
        assert not operation.has_ended
        old.release()
        assert operation.end.result(30).name == again.end.result(30).name == "a"

    def test_while_the_name_is_registered_anew(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        _, operation = plane.manager.calls.delete("a")
        assert operation is not None
        plane.manager.register("a", plane.folder("b"))
        lease.release()
        assert operation.end.result(30).version == 1, "the one that was deleted, not its successor"
        assert plane.manager.get("a").version == 2


def test_nothing_is_begun_where_too_many_operations_are_under_way(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.add("a")
    lease = plane.manager.lease("a")
    plane.activate(lease)
    before = plane.manager.get("a")

    def full() -> None:
        raise ResourceExhaustedError("4 operations are under way")

    monkeypatch.setattr(plane.manager.operations, "check_room", full)
    for begin in (
        lambda: plane.manager.calls.register("b", plane.folder("b")),
        lambda: plane.manager.calls.load("a", Tier.HOST),
        lambda: plane.manager.calls.pin("a"),
        lambda: plane.manager.calls.pin("a", at_once=True),
        lambda: plane.manager.calls.evict("a", when_idle=True),
        lambda: plane.manager.calls.delete("a"),
    ):
        with pytest.raises(ResourceExhaustedError, match="operations are under way"):
            begin()
    lease.release()
    after = plane.manager.get("a")
    assert (after.etag, after.state, after.pins) == (before.etag, before.state, before.pins)
    assert plane.manager.list_adapters().total_size == 1


def test_the_same_request_twice_is_made_once(plane: ControlPlane) -> None:
    plane.add("a")
    plane.manager.update("a", source=plane.folder("b"), keep_previous=True)
    manager, key = plane.manager, [str(uuid.uuid4()) for _ in range(7)]
    back = manager.rollback("a", idempotency_key=key[0])
    assert manager.rollback("a", idempotency_key=key[0]) == back
    assert manager.get("a").version == 1
    for _ in range(2):
        manager.pin("a", idempotency_key=key[1])
    pinned = manager.get("a")
    unpinned = manager.unpin("a", idempotency_key=key[2])
    assert int(unpinned.etag) == int(pinned.etag) + 1
    manager.pin("a")
    assert manager.unpin("a", idempotency_key=key[2]) == unpinned
    assert manager.get("a").pins == {Tier.DEVICE}, "the second unpin was the first one's echo"
    manager.unpin("a")
    manager.calls.evict("a", idempotency_key=key[3]).wait(30)
    manager.load("a")
    manager.calls.evict("a", idempotency_key=key[3]).wait(30)
    assert plane.resident() == {"a"}
    deleted = manager.delete("a", idempotency_key=key[4])
    plane.add("a")
    assert manager.delete("a", idempotency_key=key[4]) == deleted
    assert manager.get("a").version == 3


def test_validate_only_checks_and_changes_nothing(plane: ControlPlane) -> None:
    manager = plane.manager
    view = plane.add("a")
    plane.add("b")
    manager.update("a", source=plane.folder("c"), keep_previous=True)
    before = manager.list_adapters()

    back = manager.rollback("a", validate_only=True)
    assert (back.version, back.manifest.digest) == (0, view.manifest.digest)
    assert manager.pin("a", validate_only=True).pins == frozenset()
    assert manager.calls.load("a", validate_only=True).wait(30).state is AdapterState.REGISTERED
    assert manager.unpin("a", validate_only=True) == manager.get("a")
    assert manager.delete("a", validate_only=True) == manager.get("a")
    assert manager.calls.evict("a", validate_only=True).wait(30) == manager.get("a")
    assert manager.list_adapters() == before

    manager.pin("b")
    after = manager.list_adapters()
    with pytest.raises(FailedPreconditionError, match="1 of 2 slots are pinned"):
        manager.pin("a", validate_only=True)
    with pytest.raises(FailedPreconditionError, match="pinned in tier DEVICE"):
        manager.calls.evict("b", validate_only=True)
    with pytest.raises(FailedPreconditionError, match="pinned in tier DEVICE"):
        manager.delete("b", validate_only=True)
    with pytest.raises(AbortedError):
        manager.unpin("b", etag="0", validate_only=True)
    with pytest.raises(NotFoundError, match="no version 9"):
        manager.rollback("a", version=9, validate_only=True)
    assert manager.list_adapters() == after
