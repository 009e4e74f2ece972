"""Leases on several adapters at once: all or none, and never one against the other for ever."""

import random
import threading
from pathlib import Path

import pytest

from control_plane import ControlPlane
from deltaplane_controlplane.composition import MAX_COMPOSITION_ROWS
from deltaplane_controlplane.errors import FailedPreconditionError, NotFoundError
from deltaplane_controlplane.versions import AdapterState
from deltaplane_kernels.lora_segments import MAX_BLEND_ROWS
from deltaplane_server.scheduling.lease import AdapterLease


def test_a_composition_is_active_with_all_its_weights(plane: ControlPlane) -> None:
    plane.add("a", "b")
    lease = plane.manager.compose({"b": -0.5, "a": 2.0})
    assert (lease.adapter, lease.slot) == ("a+b", None)
    slots = plane.activate(lease)
    assert isinstance(slots, tuple)
    assert lease.slot == slots == lease.activate()
    weights = {plane.weights_in(slot): weight for slot, weight in slots}
    assert weights == {plane.digest("a"): 2.0, plane.digest("b"): -0.5}
    assert [(m.version.adapter.name, m.weight, m.hit) for m in lease.members] == [
        ("a", 2.0, False),
        ("b", -0.5, False),
    ]
    for name in ("a", "b"):
        view = plane.manager.get(name)
        assert (view.state, view.leases, view.running, view.misses) == (AdapterState.RESIDENT, 1, 1, 1)
    lease.release()
    lease.release()
    for name in ("a", "b"):
        view = plane.manager.get(name)
        assert (view.leases, view.running, view.lru_position is None) == (0, 0, False)
    again = plane.manager.compose({"a": 1.0, "b": 1.0})
    assert all(member.hit for member in again.members)
    again.release()
    assert plane.manager.stats().hits == 2


def test_it_fits_the_scheduler(plane: ControlPlane) -> None:
    plane.add("a", "b")
    lease: AdapterLease = plane.manager.compose({"a": 1.0, "b": 1.0})
    assert not lease.resident
    assert not lease.waits_for_room
    lease.release()


def test_identity_is_versions_and_weights_in_any_order(plane: ControlPlane) -> None:
    plane.add("a", "b")
    same = [{"a": 0.7, "b": 0.3}, {"b": 0.3, "a": 0.7}]
    others: list[dict[str, float]] = [{"a": 0.3, "b": 0.7}, {"a": 0.7}, {"a": 0.7, "b": -0.3}, {"a": 1.0}]
    leases = [plane.manager.compose(weights) for weights in same + others]
    leases.append(plane.manager.lease("b"))
    leases.append(leases[0].fork())
    uids = [lease.uid for lease in leases]
    assert uids[0] == uids[1] == uids[-1]
    assert len(set(uids)) == len(others) + 2
    plane.manager.update("a", source=plane.folder("a", content="new files"))
    leases.append(plane.manager.compose(same[0]))
    assert leases[-1].uid not in uids
    for lease in leases:
        lease.release()


def test_one_adapter_of_weight_one_is_that_adapter(plane: ControlPlane) -> None:
    plane.add("a")
    plain = plane.manager.lease("a")
    alone, scaled = (plane.manager.compose({"a": weight}) for weight in (1.0, 0.5))
    assert alone.uid == plain.uid
    slot = plane.activate(plain)
    assert alone.activate() == slot
    assert scaled.activate() == ((slot, 0.5),)
    for lease in (plain, alone, scaled):
        lease.release()


def test_all_are_leased_or_none(plane: ControlPlane) -> None:
    plane.add("a", "b")
    with pytest.raises(NotFoundError, match="'nobody'") as missing:
        plane.manager.compose({"a": 1.0, "nobody": 1.0, "b": 1.0})
    assert missing.value.metadata["adapter"] == "nobody"
    plane.folder("b", content="changed behind our back")
    with pytest.raises(FailedPreconditionError):
        plane.manager.load("b")
    with pytest.raises(FailedPreconditionError, match="adapter b@1 cannot be loaded"):
        plane.manager.compose({"a": 1.0, "b": 1.0})
    assert [plane.manager.get(name).leases for name in ("a", "b")] == [0, 0]
    assert plane.manager.stats().misses == 0


def test_a_member_that_fails_to_load_ends_the_wait(plane: ControlPlane) -> None:
    plane.add("a", "b")
    plane.folder("b", content="changed behind our back")
    lease = plane.manager.compose({"a": 1.0, "b": 1.0})
    with pytest.raises(FailedPreconditionError, match="b@1"):
        plane.activate(lease)
    plane.settle()
    assert plane.manager.get("a").lru_position == 0, "nothing keeps the other one"
    lease.release()


def test_what_cannot_be_added_up_is_refused_by_name(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=3, num_pages=50, max_lora_rank=256, host_bytes=10_000) as plane:
        plane.add("a", "b", "c", "d")
        plane.add("large", rank=MAX_COMPOSITION_ROWS - 8)
        plane.manager.register("dora", plane.folder("dora", features=("dora", "lm_head")))
        refusals = {
            "dora@1 has dora, lm_head": {"a": 1.0, "dora": 1.0},
            "264 rank rows .a@1 8, b@1 8, large@1 248., and 256 fit": {"a": 1.0, "b": 1.0, "large": 1.0},
            "4 are given, and 3 fit the slots": dict.fromkeys("abcd", 1.0),
        }
        for message, weights in refusals.items():
            with pytest.raises(FailedPreconditionError, match=message):
                plane.manager.compose(weights)
        with pytest.raises(FailedPreconditionError, match="dora@1 has"):
            plane.manager.compose({"dora": 0.5})
        for weights in ({"a": 1.0, "large": 1.0}, {"dora": 1.0}):
            lease = plane.manager.compose(weights)
            plane.activate(lease)
            lease.release()


def test_the_kernels_take_what_is_let_in() -> None:
    assert MAX_COMPOSITION_ROWS == MAX_BLEND_ROWS


def test_a_small_device_bounds_the_rows(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_pages=2) as plane:
        plane.add("a")
        plane.add("b", rank=16)
        with pytest.raises(FailedPreconditionError, match=r"24 rank rows .* and 16 fit a step"):
            plane.manager.compose({"a": 1.0, "b": 1.0})


def test_it_waits_for_the_last_of_its_adapters_and_holds_none_until_then(plane: ControlPlane) -> None:
    """With two slots."""
    plane.add("a", "b", "c")
    running = plane.manager.lease("a")
    plane.activate(running)
    waiting = plane.manager.compose({"b": 1.0, "c": 1.0})
    for _ in range(2):
        assert waiting.activate() is None
        plane.settle()
    assert plane.resident() in ({"a", "b"}, {"a", "c"})
    assert waiting.waits_for_room
    assert [plane.manager.get(name).running for name in "bc"] == [0, 0]
    assert plane.manager.stats().waiting == ("b", "c")

    before = plane.ready
    running.release()
    assert plane.ready > before, "the engine is told that there may be room"
    plane.activate(waiting)
    assert plane.resident() == {"b", "c"}
    waiting.release()


def test_what_it_has_gathered_stays_for_it(plane: ControlPlane) -> None:
    """`b` is idle and yet waits for `c`; one that asks later cannot have its slot."""
    plane.add("a", "b", "c", "d")
    running = plane.manager.lease("a")
    plane.activate(running)
    plane.run("b")
    waiting, later = plane.manager.compose({"b": 1.0, "c": 1.0}), plane.manager.lease("d")
    assert waiting.activate() is None
    assert plane.manager.get("b").lru_position is None
    assert later.activate() is None
    plane.settle()
    assert later.activate() is None
    assert later.waits_for_room
    with pytest.raises(FailedPreconditionError, match="requests about to: 1"):
        plane.manager.evict("b")
    waiting.deactivate()
    plane.activate(later)
    assert plane.resident() == {"a", "d"}
    for lease in (running, waiting, later):
        lease.release()


def test_of_two_that_hold_what_the_other_needs_the_earlier_gets_all(tmp_path: Path) -> None:
    """Four pages: while one runs on two of them, each of the others gathers one, and misses three."""
    with ControlPlane(tmp_path, num_slots=4, num_pages=4) as plane:
        plane.add("a", "c")
        plane.add("running", rank=16)
        plane.add("b", "d", rank=24)
        running = plane.manager.lease("running")
        plane.activate(running)
        first, second = (plane.manager.compose(dict.fromkeys(names, 1.0)) for names in ("ab", "cd"))
        for lease in (first, second, first, second):
            assert lease.activate() is None
            plane.settle()
        assert plane.resident() == {"running", "a", "c"}
        running.release()
        assert second.activate() is None
        plane.settle()
        assert second.activate() is None, "the other one asked earlier"
        plane.activate(first)
        assert plane.resident() == {"a", "b"}
        first.release()
        plane.activate(second)
        assert plane.resident() == {"c", "d"}
        second.release()


def test_nothing_that_an_earlier_one_gathers_goes_for_it(tmp_path: Path) -> None:
    """Both gather `z`; what makes room for `b` is `c`, which the later one gathers alone."""
    with ControlPlane(tmp_path, num_slots=4, num_pages=4) as plane:
        plane.add("c", "z")
        plane.add("running", rank=16)
        plane.add("b", rank=24)
        running = plane.manager.lease("running")
        plane.activate(running)
        first, second = (plane.manager.compose(dict.fromkeys(names, 1.0)) for names in ("bz", "cz"))
        for lease in (first, second):
            assert lease.activate() is None
            plane.settle()
        assert plane.resident() == {"running", "c", "z"}
        running.release()
        plane.activate(first)
        assert (plane.manager.get("z").loads, plane.manager.get("c").evictions) == (1, 1)
        first.release()
        plane.activate(second)
        second.release()


def test_one_that_asked_alone_earlier_gets_what_a_composition_has_gathered(tmp_path: Path) -> None:
    """Of three pages it needs all; while one is in use, the others go to a composition that comes later."""
    with ControlPlane(tmp_path, num_slots=4, num_pages=3) as plane:
        plane.add("a", "b", "c")
        plane.add("large", rank=24)
        running = plane.manager.lease("a")
        plane.activate(running)
        large, later = plane.manager.lease("large"), plane.manager.compose({"b": 1.0, "c": 1.0})
        for lease in (large, later):
            assert lease.activate() is None
            plane.settle()
        assert plane.resident() == {"a", "b", "c"}
        running.release()
        plane.activate(large)
        assert plane.resident() == {"large"}
        large.release()
        plane.activate(later)
        later.release()


def test_an_ask_ends_when_one_has_had_it(plane: ControlPlane) -> None:
    """Another lease of the same kind has no claim on what it does not ask for again."""
    plane.add("a", "b", "c")
    first = plane.manager.compose({"a": 1.0, "b": 1.0})
    second = first.fork()
    assert first.activate() is second.activate() is None
    plane.activate(first)
    first.release()
    assert plane.run("c") is not None
    assert not second.resident
    plane.activate(second)
    second.release()


def test_it_ends_on_the_versions_that_it_began_with(plane: ControlPlane) -> None:
    plane.add("a", "b")
    lease = plane.manager.compose({"a": 1.0, "b": 1.0})
    slots = plane.activate(lease)
    digests = {plane.digest("a"), plane.digest("b")}
    plane.manager.update("a", source=plane.folder("a", content="new files"))
    plane.manager.delete("b", drain_timeout_s=0.0)
    assert isinstance(slots, tuple)
    assert {plane.weights_in(slot) for slot, _ in slots} == digests
    plane_uids = {version.uid for version in lease.versions}
    assert plane.gone == []
    lease.release()
    plane.settle()
    assert set(plane.gone) == plane_uids


def test_what_can_never_fit_beside_the_pinned_ones_is_refused(tmp_path: Path) -> None:
    with ControlPlane(tmp_path, num_slots=3, num_pages=4) as plane:
        plane.add("a", "b", "c", "pinned")
        plane.add("large", rank=24)
        plane.manager.pin("pinned")
        for weights, message in (
            (dict.fromkeys("abc", 1.0), "a@1, b@1, c@1 needs 3 slots, and 1 of the 3"),
            ({"a": 1.0, "large": 1.0}, "a@1, large@1 needs 4 rank pages, and 1 of the 4"),
        ):
            lease = plane.manager.compose(weights)
            with pytest.raises(FailedPreconditionError, match=message):
                lease.activate()
            lease.release()
        for names in (("a", "b"), ("pinned", "a", "c"), ("pinned", "large")):
            lease = plane.manager.compose(dict.fromkeys(names, 1.0))
            plane.activate(lease)
            lease.release()


@pytest.mark.parametrize("seed", range(4))
def test_all_that_ask_have_their_turn(tmp_path: Path, seed: int) -> None:
    """Threads that each ask for two or three of six adapters of several sizes, in two slots more than one of
    them needs; some ask for one."""
    names = "abcdef"
    with ControlPlane(tmp_path, num_slots=4, num_pages=6, host_bytes=350) as plane:
        for index, name in enumerate(names):
            plane.add(name, rank=8 * (1 + index % 2))

        def serve(number: int) -> None:
            draw = random.Random(f"{seed}-{number}")
            for _ in range(15):
                wanted = draw.sample(names, draw.choice((1, 2, 3)))
                lease = plane.manager.compose({name: draw.choice((0.5, 1.0)) for name in wanted})
                slots = plane.activate(lease)
                terms = ((slots, 1.0),) if isinstance(slots, int) else slots
                found = {plane.weights_in(slot): weight for slot, weight in terms}
                assert found == {m.version.manifest.digest: m.weight for m in lease.members}
                lease.release()
            served.append(number)

        served: list[int] = []
        threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(served) == list(range(6))
