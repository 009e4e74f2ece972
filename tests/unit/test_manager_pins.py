"""Pins of each tier, of the adapter and of versions kept for a rollback; what they leave room for."""

from pathlib import Path

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
)
from deltaplane_controlplane.versions import NO_PINS, AdapterState, Tier
from fakes import write_adapter

BOTH = frozenset(Tier)
HOST, DEVICE = frozenset((Tier.HOST,)), frozenset((Tier.DEVICE,))


def kept(plane: ControlPlane, *, tier: Tier | None = None) -> None:
    """Makes adapter "a" with version 2 current and version 1 kept, and pinned in a tier."""
    plane.add("a")
    plane.manager.update("a", source=plane.folder("a2"), keep_previous=True)
    if tier is not None:
        plane.manager.pin("a", tier, version=1)


class TestTiers:
    def test_each_has_a_pin_of_its_own(self, plane: ControlPlane) -> None:
        plane.add("a")
        assert plane.manager.pin("a", Tier.HOST).pins == HOST
        assert plane.manager.pin("a", Tier.DEVICE).pins == BOTH
        assert plane.manager.get("a").pinned_tier is Tier.DEVICE
        view = plane.manager.unpin("a", Tier.DEVICE)
        assert (view.pins, view.state) == (HOST, AdapterState.RESIDENT)
        assert plane.manager.evict("a").state is AdapterState.HOST
        with pytest.raises(FailedPreconditionError, match="pinned in tier HOST; unpin it first"):
            plane.manager.evict("a", Tier.HOST)
        assert plane.manager.unpin("a", Tier.DEVICE).pins == HOST, "there is none there"
        assert plane.manager.unpin("a").pins == NO_PINS
        assert plane.manager.evict("a", Tier.HOST).state is AdapterState.REGISTERED

    def test_a_device_pin_says_nothing_of_host_memory(self, tmp_path: Path) -> None:
        with ControlPlane(tmp_path, host_bytes=100) as plane:
            plane.add("a", "b")
            plane.manager.pin("a")
            plane.manager.load("b", Tier.HOST)
            view = plane.manager.get("a")
            assert (view.pins, view.tiers) == (DEVICE, (Tier.DEVICE,))
            with pytest.raises(FailedPreconditionError, match="pinned in tier DEVICE; unpin it first"):
                plane.manager.evict("a", Tier.HOST)

    def test_unpin_takes_both_away(self, plane: ControlPlane) -> None:
        plane.add("a")
        for tier in Tier:
            plane.manager.pin("a", tier)
        assert plane.manager.unpin("a").pins == NO_PINS

    def test_filters(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        plane.manager.pin("a")
        plane.manager.pin("b", Tier.HOST)

        def names(filter: str) -> list[str]:
            return [view.name for view in plane.manager.list_adapters(filter=filter).adapters]

        assert [names(f"pinned={value}") for value in ("true", "false", "device", "host")] == [
            ["a", "b"],
            ["c"],
            ["a"],
            ["b"],
        ]

    def test_etags(self, plane: ControlPlane) -> None:
        first = plane.add("a")
        second = plane.manager.pin("a", etag=first.etag)
        for wait in (True, False):
            with pytest.raises(AbortedError):
                plane.manager.pin("a", Tier.HOST, etag=first.etag, wait=wait)
        with pytest.raises(AbortedError):
            plane.manager.unpin("a", etag=first.etag)
        assert plane.manager.unpin("a", etag=second.etag).pins == NO_PINS

    def test_both_are_there_again_after_a_restart(self, tmp_path: Path) -> None:
        path = tmp_path / "catalogue.db"
        with ControlPlane(tmp_path, catalogue=path) as plane:
            plane.add("a", "b")
            for tier in Tier:
                plane.manager.pin("a", tier)
            kept_source = plane.folder("b2")
            plane.manager.update("b", source=kept_source, keep_previous=True)
            plane.manager.pin("b", Tier.HOST, version=1)
        with ControlPlane(tmp_path, catalogue=path) as plane:
            assert plane.manager.get("a").pins == BOTH
            plane.manager.start()
            eventually(lambda: plane.manager.get("a").tiers == (Tier.HOST, Tier.DEVICE))
            eventually(lambda: plane.manager.get("b").other_versions[0].tiers == (Tier.HOST,))
            assert plane.manager.get("b").other_versions[0].pins == HOST


class TestAtOnce:
    """Pins that are made before the adapter arrives."""

    def test_the_operation_ends_at_the_arrival(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        leases = [plane.manager.lease(name) for name in ("a", "b")]
        for lease in leases:
            plane.activate(lease)
        operation = plane.manager.calls.pin("c", at_once=True)
        assert plane.manager.get("c").pins == DEVICE
        eventually(lambda: operation.view().stage == "room")
        leases[0].release()
        assert operation.wait(30).state is AdapterState.RESIDENT
        leases[1].release()

    def test_unpinning_ends_it(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        operation = plane.manager.calls.pin("a", at_once=True)
        plane.manager.unpin("a")
        with pytest.raises(AbortedError, match="is not pinned any more"):
            operation.wait(30)
        plane.loader.gate.set()

    def test_a_load_that_fails_ends_it_and_leaves_the_pin(self, plane: ControlPlane) -> None:
        plane.add("a")
        write_adapter(plane.root / "a", content="changed")
        operation = plane.manager.calls.pin("a", at_once=True)
        with pytest.raises(FailedPreconditionError, match="has changed"):
            operation.wait(30)
        assert plane.manager.get("a").pins == DEVICE
        plane.manager.update("a", source=plane.folder("b"))
        eventually(lambda: plane.manager.get("a").state is AdapterState.RESIDENT)

    def test_cancelling_ends_the_wait_and_leaves_the_pin(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        operation = plane.manager.calls.pin("a", at_once=True)
        plane.manager.operations.cancel(operation.id)
        with pytest.raises(CancelledError):
            operation.wait(0)
        plane.loader.gate.set()
        eventually(lambda: plane.manager.get("a").state is AdapterState.RESIDENT)
        assert plane.manager.get("a").pins == DEVICE


def test_a_pin_that_waits_and_is_cancelled_is_not_made(plane: ControlPlane) -> None:
    plane.add("a")
    plane.loader.gate.clear()
    operation = plane.manager.calls.pin("a")
    operation.leave()
    with pytest.raises(CancelledError):
        operation.end.result(0)
    plane.loader.gate.set()
    plane.settle()
    view = plane.manager.get("a")
    assert (view.pins, view.state) == (NO_PINS, AdapterState.RESIDENT)
    assert plane.manager.evict("a").state is AdapterState.HOST, "nothing holds it"


class TestKeptVersions:
    def test_one_that_is_pinned_is_ready_for_the_rollback(self, plane: ControlPlane) -> None:
        kept(plane, tier=Tier.HOST)
        (old,) = plane.manager.get("a").other_versions
        assert (old.pins, old.tiers, old.state) == (HOST, (Tier.HOST,), AdapterState.HOST)
        with pytest.raises(FailedPreconditionError, match="a@1 cannot be evicted: it is pinned in tier HOST"):
            plane.manager.calls.evict("a", Tier.HOST, version=1)
        packs = plane.loader.packs.total()
        view = plane.manager.rollback("a")
        assert (view.version, view.tiers, view.pins) == (1, (Tier.HOST,), NO_PINS)
        assert plane.manager.load("a").state is AdapterState.RESIDENT
        assert plane.loader.packs.total() == packs, "its files were not read again"

    def test_on_the_device_it_serves_at_once(self, plane: ControlPlane) -> None:
        kept(plane, tier=Tier.DEVICE)
        assert plane.manager.rollback("a").state is AdapterState.RESIDENT
        assert plane.manager.lease("a").members[0].hit
        plane.manager.delete("a", drain_timeout_s=0)

    def test_it_counts_against_the_pins_that_are_allowed(self, plane: ControlPlane) -> None:
        kept(plane, tier=Tier.DEVICE)
        with pytest.raises(FailedPreconditionError, match="1 of 2 slots are pinned"):
            plane.manager.pin("a")
        assert plane.manager.unpin("a", version=1).other_versions[0].pins == NO_PINS
        plane.manager.pin("a")

    def test_a_delete_has_to_force_it(self, plane: ControlPlane) -> None:
        kept(plane, tier=Tier.HOST)
        with pytest.raises(FailedPreconditionError, match="version 1 of adapter 'a' is pinned in tier HOST"):
            plane.manager.delete("a")
        plane.manager.delete("a", force=True)
        assert plane.manager.capacity().host.used_bytes == 0

    def test_what_is_refused(self, plane: ControlPlane) -> None:
        kept(plane)
        with pytest.raises(NotFoundError, match="no version 3"):
            plane.manager.pin("a", version=3)
        with pytest.raises(FailedPreconditionError, match="version 2 of adapter 'a' is the current one"):
            plane.manager.pin("a", version=2)

    def test_an_update_gives_the_current_version_s_pins_to_the_new_one(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.manager.pin("a", Tier.HOST)
        view = plane.manager.update("a", source=plane.folder("b"), keep_previous=True)
        assert (view.pins, view.other_versions[0].pins) == (HOST, NO_PINS)
        eventually(lambda: plane.manager.get("a").tiers == (Tier.HOST,))


def test_capacity_counts_pins_by_slots_and_pages(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=4, num_pages=8) as plane:
        plane.add("a", "b", rank=24)
        empty = plane.manager.capacity((8, 16, 64))
        assert (empty.pinned_slots, empty.max_pinned_slots, empty.pinned_rank_pages) == (0, 3, 0)
        assert [r.fit_pinned for r in empty.by_rank] == [3, 3, 1]
        plane.manager.pin("a")
        plane.run("b")
        one = plane.manager.capacity((8, 16, 24, 64))
        assert (one.pinned_slots, one.pinned_rank_pages) == (1, 3)
        assert [r.fit_pinned for r in one.by_rank] == [2, 2, 1, 0]
        assert [r.fit_available for r in one.by_rank] == [3, 2, 1, 0], "b may go, a may not"
        assert [r.fit_free for r in one.by_rank] == [2, 1, 0, 0]


def test_capacity_is_exact(tmp_path: Path) -> None:
    """As many adapters of a rank as it says fit, and one more does not."""
    with ControlPlane(tmp_path, num_slots=6, num_pages=10, host_bytes=10_000) as plane:
        plane.add("pinned", rank=16)
        plane.add("warm", rank=24)
        plane.manager.pin("pinned")
        plane.run("warm")
        (sixteen,) = plane.manager.capacity((16,)).by_rank
        leases = []
        for index in range(sixteen.fit_available):
            plane.add(f"new-{index}", rank=16)
            leases.append(plane.manager.lease(f"new-{index}"))
            plane.activate(leases[-1])
        assert plane.manager.capacity((16,)).by_rank[0].fit_available == 0
        plane.add("more", rank=16)
        leases.append(plane.manager.lease("more"))
        assert leases[-1].activate() is None
        plane.settle()
        assert leases[-1].waits_for_room
        for lease in leases:
            lease.release()
