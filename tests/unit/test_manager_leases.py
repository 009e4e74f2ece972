"""Leases: what they keep, what they wait for, and what they never see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.versions import AdapterState, Tier
from deltaplane_server.scheduling.lease import AdapterLease
from fakes import write_adapter


def test_a_lease_becomes_active_with_the_weights_of_its_version(plane: ControlPlane) -> None:
    plane.add("a")
    lease = plane.manager.lease("a")
    [member] = lease.members
    assert (lease.adapter, member.version.number, member.hit, lease.slot) == ("a", 1, False, None)
    slot = plane.activate(lease)
    assert lease.slot == slot == lease.activate()
    assert plane.weights_in(slot) == plane.digest("a")
    view = plane.manager.get("a")
    assert (view.state, view.leases, view.running, view.slot) == (AdapterState.RESIDENT, 1, 1, slot)
    lease.deactivate()
    assert plane.manager.get("a").running == 0
    lease.release()
    lease.release()
    view = plane.manager.get("a")
    assert (view.leases, view.running, view.hits, view.misses, view.loads) == (0, 0, 0, 1, 1)
    assert plane.manager.lease("a").members[0].hit


def test_it_fits_the_scheduler(plane: ControlPlane) -> None:
    plane.add("a")
    lease: AdapterLease = plane.manager.lease("a")
    assert not lease.resident
    assert not lease.waits_for_room
    assert lease.uid != 0
    lease.release()


def test_an_active_version_is_never_evicted(plane: ControlPlane) -> None:
    plane.add("a", "b", "c")
    running = [plane.manager.lease(name) for name in ("a", "b")]
    slots = [plane.activate(lease) for lease in running]
    waiting = plane.manager.lease("c")
    assert waiting.activate() is None
    plane.settle()
    assert waiting.activate() is None
    assert waiting.waits_for_room
    assert plane.manager.get("c").state is AdapterState.HOST
    assert "wait for room on the device: 1" in plane.manager.get("c").state_reason
    assert [plane.weights_in(slot) for slot in slots] == [plane.digest("a"), plane.digest("b")]

    before = plane.ready
    running[0].deactivate()
    assert plane.ready > before, "the engine is told that there may be room"
    assert plane.activate(waiting) == slots[0]
    assert plane.weights_in(slots[0]) == plane.digest("c")
    assert running[0].activate() is None, "it has to ask for a slot again"
    for lease in (*running, waiting):
        lease.release()


def test_a_load_takes_room_from_the_least_recently_used(plane: ControlPlane) -> None:
    plane.add("a", "b", "c")
    plane.run("a")
    slot = plane.run("b")
    plane.run("a")
    positions = {name: plane.manager.get(name).lru_position for name in ("a", "b", "c")}
    assert positions == {"a": 1, "b": 0, "c": None}
    assert {view.name: view.lru_position for view in plane.manager.list_adapters().adapters} == positions
    assert plane.run("c") == slot
    assert plane.resident() == {"a", "c"}
    assert plane.manager.get("b").evictions == 1
    assert plane.manager.get("b").state is AdapterState.HOST


def test_a_version_that_is_in_use_has_no_place_in_the_order(plane: ControlPlane) -> None:
    plane.add("a")
    lease = plane.manager.lease("a")
    plane.activate(lease)
    assert plane.manager.get("a").lru_position is None
    lease.release()
    assert plane.manager.get("a").lru_position == 0


def test_fifty_requests_for_a_cold_adapter_load_it_once(plane: ControlPlane) -> None:
    plane.add("a")
    plane.loader.gate.clear()
    with ThreadPoolExecutor(50) as threads:
        leases = list(threads.map(lambda _: plane.manager.lease("a"), range(50)))
        assert list(threads.map(lambda lease: lease.activate(), leases)) == [None] * 50
        plane.loader.gate.set()
        slots = set(threads.map(plane.activate, leases))
    assert len(slots) == 1
    assert plane.loader.packs[plane.digest("a")] == 1
    assert plane.pool.copies == 1
    assert plane.manager.get("a").running == 50
    for lease in leases:
        lease.release()


def test_a_request_takes_a_load_to_host_memory_further(plane: ControlPlane) -> None:
    plane.add("a")
    plane.loader.gate.clear()
    arrival = plane.manager.start_load("a", Tier.HOST)
    lease = plane.manager.lease("a")
    assert lease.activate() is None
    plane.loader.gate.set()
    eventually(lambda: lease.resident)
    arrival.result(30)
    lease.release()


def test_files_are_read_once_while_the_adapter_stays_in_host_memory(plane: ControlPlane) -> None:
    plane.add("a", "b", "c")
    for name in ("a", "b", "c", "a", "b", "c"):
        plane.run(name)
    assert set(plane.loader.packs.values()) == {1}
    assert plane.pool.copies == 6


@pytest.mark.parametrize("num_rounds", [20])
def test_two_cold_adapters_with_one_slot_do_not_evict_each_other_unused(
    tmp_path: Path, num_rounds: int
) -> None:
    with ControlPlane(tmp_path, num_slots=1) as plane:
        plane.add("a", "b")
        served = {"a": 0, "b": 0}

        def serve(name: str) -> None:
            for _ in range(num_rounds):
                plane.run(name)
                served[name] += 1

        threads = [threading.Thread(target=serve, args=(name,)) for name in served]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert served == {"a": num_rounds, "b": num_rounds}
        assert plane.pool.copies <= 2 * num_rounds, "no load was in vain"


def test_what_was_loaded_for_a_request_waits_for_it(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=1) as plane:
        plane.add("a", "b")
        first, second = plane.manager.lease("a"), plane.manager.lease("b")
        assert first.activate() is None
        plane.settle()
        assert first.resident
        assert second.activate() is None
        plane.settle()
        assert second.activate() is None, "the first has not had its turn"
        assert plane.manager.get("a").lru_position is None
        assert first.activate() == 0
        first.release()
        assert plane.activate(second) == 0
        second.release()


def test_asking_ends_with_deactivate(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=1) as plane:
        plane.add("a", "b")
        first, second = plane.manager.lease("a"), plane.manager.lease("b")
        first.activate()
        plane.settle()
        first.deactivate()
        assert plane.activate(second) == 0, "nobody asks for the first any more"
        for lease in (first, second):
            lease.release()


def test_a_lease_that_never_asked_keeps_nobody_out(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=1) as plane:
        plane.add("a", "b")
        plane.run("a")
        queued = plane.manager.lease("a")
        assert queued.members[0].hit
        assert plane.run("b") == 0
        assert queued.activate() is None
        queued.release()


def test_room_goes_to_who_asked_first(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=1) as plane:
        plane.add("a", "b", "c")
        running = plane.manager.lease("a")
        plane.activate(running)
        early, late = plane.manager.lease("b"), plane.manager.lease("c")
        early.activate()
        late.activate()
        plane.settle()
        running.release()
        assert late.activate() is None
        plane.settle()
        assert (early.resident, late.resident) == (True, False)
        assert early.activate() == 0
        early.release()
        assert plane.activate(late) == 0
        late.release()


def test_a_cold_adapter_does_not_delay_a_warm_one(plane: ControlPlane) -> None:
    plane.add("warm", "cold")
    plane.run("warm")
    plane.loader.gate.clear()
    cold = plane.manager.lease("cold")
    assert cold.activate() is None
    assert not cold.waits_for_room
    warm = plane.manager.lease("warm")
    assert warm.activate() is not None
    plane.loader.gate.set()
    for lease in (warm, cold):
        lease.release()


def test_a_copy_does_not_wait_behind_the_reading_of_files(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, loader_threads=1) as plane:
        plane.add("in-memory", "slow", "slower")
        plane.manager.load("in-memory", Tier.HOST)
        plane.loader.gate.clear()
        slow = [plane.manager.start_load(name) for name in ("slow", "slower")]
        plane.run("in-memory")
        assert not any(future.done() for future in slow)
        plane.loader.gate.set()


def test_a_fork_holds_the_same_version(plane: ControlPlane) -> None:
    plane.add("a")
    lease = plane.manager.lease("a")
    plane.activate(lease)
    fork = lease.fork()
    plane.manager.update("a", source=plane.folder("a", content="new"))
    assert (fork.uid, fork.versions, fork.slot) == (lease.uid, lease.versions, None)
    assert fork.activate() == lease.slot
    lease.release()
    assert plane.manager.get("a").other_versions[0].leases == 1
    with pytest.raises(InternalError, match="released and is used again"):
        lease.fork()
    with pytest.raises(InternalError, match="released and is used again"):
        lease.activate()
    fork.release()
    assert plane.manager.get("a").other_versions == ()


def test_an_unknown_adapter_or_version_is_not_found(plane: ControlPlane) -> None:
    plane.add("a")
    with pytest.raises(NotFoundError, match="there is no adapter 'b'"):
        plane.manager.lease("b")
    with pytest.raises(NotFoundError, match="has no version 7; there is 1"):
        plane.manager.lease("a", 7)


def test_an_adapter_whose_folder_vanished_fails_with_the_reason_and_heals(plane: ControlPlane) -> None:
    plane.add("a", "good")
    plane.run("good")
    (plane.root / "a").rename(plane.root / "away")
    lease = plane.manager.lease("a")
    with pytest.raises(FailedPreconditionError, match="there is no folder"):
        plane.activate(lease)
    view = plane.manager.get("a")
    assert view.state is AdapterState.FAILED
    assert "there is no folder" in view.state_reason
    with pytest.raises(FailedPreconditionError, match="there is no folder") as caught:
        plane.manager.lease("a")
    assert caught.value.reason == "ADAPTER_LOAD_FAILED"
    assert plane.resident() == {"good"}

    (plane.root / "away").rename(plane.root / "a")
    healed = plane.manager.register("a", str(plane.root / "a"))
    assert (healed.version, healed.state) == (1, AdapterState.REGISTERED)
    plane.activate(lease)
    lease.release()


def test_files_that_changed_fail_and_evict_nobody(plane: ControlPlane) -> None:
    plane.add("a", "b", "changed")
    plane.run("a")
    plane.run("b")
    write_adapter(plane.root / "changed", content="other")
    lease = plane.manager.lease("changed")
    with pytest.raises(FailedPreconditionError, match="has changed since it was registered"):
        plane.activate(lease)
    lease.release()
    assert plane.resident() == {"a", "b"}
    assert plane.manager.get("a").evictions == plane.manager.get("b").evictions == 0
    assert plane.manager.stats().load_failures == 1

    healed = plane.manager.register("changed", str(plane.root / "changed"))
    assert (healed.version, healed.state) == (2, AdapterState.REGISTERED)
    plane.run("changed")


def test_a_copy_that_fails_gives_its_room_back(plane: ControlPlane) -> None:
    plane.add("a")
    plane.pool.fail_copies = True
    lease = plane.manager.lease("a")
    with pytest.raises(FailedPreconditionError, match="RuntimeError: the device is broken"):
        plane.activate(lease)
    lease.release()
    capacity = plane.manager.capacity()
    assert (capacity.free_slots, capacity.free_rank_pages) == (2, 8)
    plane.pool.fail_copies = False
    assert plane.manager.load("a").state is AdapterState.RESIDENT, "an administrator may try again"


def test_rank_pages_bound_the_device(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=4, num_pages=4) as plane:
        plane.add("small", "small2", rank=8)
        plane.add("large", rank=24)
        plane.run("small")
        plane.run("small2")
        plane.run("large")
        assert plane.resident() == {"small2", "large"}
        assert plane.manager.get("large").pages == (0, 2, 3)


def test_pages_of_features_count_as_those_of_ranks(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=4, num_pages=4) as plane:
        view = plane.manager.register("dora", plane.folder("dora", rank=8, features=("dora", "lm_head")))
        assert (view.manifest.num_pages, view.device_bytes) == (3, 3000)
        plane.add("small", "small2")
        plane.run("small")
        plane.run("small2")
        plane.run("dora")
        assert plane.resident() == {"small2", "dora"}
        assert plane.manager.get("dora").pages == (0, 2, 3)
        with pytest.raises(InvalidArgumentError, match="rank 16 with bias, dora, lm_head takes 5 rank pages"):
            plane.manager.register("x", plane.folder("x", rank=16, features=("bias", "dora", "lm_head")))
        capacity = plane.manager.capacity([8])
        assert (capacity.by_rank[0].pages, capacity.by_rank[0].fit_available) == (1, 4)


def test_an_adapter_that_cannot_fit_beside_the_pinned_ones_is_refused(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=3, num_pages=4) as plane:
        plane.add("pinned", rank=16)
        plane.add("large", rank=24)
        plane.manager.pin("pinned")
        lease = plane.manager.lease("large")
        with pytest.raises(FailedPreconditionError, match="needs 3 rank pages, and 2 of the 4"):
            lease.activate()
        with pytest.raises(ResourceExhaustedError, match="needs 3 rank pages, and 2 of the 4"):
            plane.manager.load("large")
        lease.release()


def test_a_full_host_cache_does_not_keep_adapters_from_the_device(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, host_bytes=100) as plane:
        plane.add("a", "b")
        plane.manager.pin("a", Tier.HOST)
        plane.run("b")
        assert plane.manager.get("b").state is AdapterState.RESIDENT
        with pytest.raises(ResourceExhaustedError, match="100 bytes of host memory; of 100, 100 are pinned"):
            plane.manager.load("b", Tier.HOST)
        assert plane.manager.evict("b").state is AdapterState.REGISTERED


def test_what_waits_for_the_device_stays_in_host_memory(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=1, host_bytes=100) as plane:
        plane.add("a", "b", "c")
        running, early, late = (plane.manager.lease(name) for name in ("a", "b", "c"))
        plane.activate(running)
        early.activate()
        plane.settle()
        assert late.activate() is None
        plane.settle()
        assert plane.manager.get("b").state is AdapterState.HOST
        assert plane.loader.packs[plane.digest("c")] == 0, "there would be nowhere to put it"
        running.release()
        for lease in (early, late):
            plane.activate(lease)
            lease.release()


def test_host_memory_is_bounded_and_gives_way_in_order_of_use(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, host_bytes=250) as plane:
        plane.add("a", "b", "c")
        for name in ("a", "b", "c"):
            plane.manager.load(name, Tier.HOST)
        assert plane.manager.get("a").state is AdapterState.REGISTERED
        assert plane.manager.capacity().host.used_bytes == 200
        plane.run("b")
        plane.run("a")
        assert plane.manager.get("c").state is AdapterState.REGISTERED


def test_a_closed_manager_refuses_requests_and_ends_loads(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, loader_threads=1)
    plane.add("a", "b")
    held = plane.manager.lease("a")
    plane.loader.gate.clear()
    arrivals = [plane.manager.start_load(name) for name in ("a", "b")]
    closing = threading.Thread(target=plane.manager.close)
    closing.start()
    eventually(lambda: _is_closed(plane), "the end of service")
    plane.loader.gate.set()
    closing.join(30)
    for arrival in arrivals:
        with pytest.raises(UnavailableError):
            arrival.result(30)
    with pytest.raises(UnavailableError):
        plane.manager.lease("a")
    with pytest.raises(UnavailableError):
        held.activate()
    held.release()
    plane.manager.close()


def _is_closed(plane: ControlPlane) -> bool:
    try:
        plane.manager.lease("a").release()
    except UnavailableError:
        return True
    return False
