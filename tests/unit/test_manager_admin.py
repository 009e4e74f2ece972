"""What administrators do: register, update, delete, roll back, load, evict, pin."""

import os
import threading
import uuid
from pathlib import Path

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.capacity import MAX_RANKS
from deltaplane_controlplane.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.versions import AdapterState, Tier
from fakes import write_adapter


def field_of(caught: pytest.ExceptionInfo[InvalidArgumentError]) -> str:
    return caught.value.violations[0].field


class TestRegister:
    def test_tells_what_it_found(self, plane: ControlPlane) -> None:
        view = plane.manager.register("a", plane.folder("a", rank=12, nbytes=77), labels={"team": "law"})
        assert (view.name, view.version, view.state) == ("a", 1, AdapterState.REGISTERED)
        assert (view.manifest.rank, view.device_bytes, view.host_bytes) == (12, 2000, 77)
        assert view.labels == {"team": "law"}
        assert view.create_time == view.update_time
        assert plane.loader.packs.total() == 0, "nothing is loaded unless asked for"

    def test_the_same_files_change_nothing(self, plane: ControlPlane) -> None:
        first = plane.add("a")
        assert plane.manager.register("a", plane.folder("a"), labels={"x": "y"}) == first

    def test_other_files_are_refused(self, plane: ControlPlane) -> None:
        plane.add("a")
        with pytest.raises(AlreadyExistsError, match=r"registered with other files .*: update it instead"):
            plane.manager.register("a", plane.folder("a", content="other"))
        assert plane.manager.get("a").version == 1

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ä", "a b", "x" * 129, "a\n"])
    def test_bad_names(self, plane: ControlPlane, name: str) -> None:
        with pytest.raises(InvalidArgumentError, match="1 to 128 characters") as caught:
            plane.manager.register(name, plane.folder("a"))
        assert field_of(caught) == "name"
        assert plane.loader.inspections == 0

    @pytest.mark.parametrize("name", ["a", "A.b_c-9", "...", "x" * 128])
    def test_good_names(self, plane: ControlPlane, name: str) -> None:
        assert plane.manager.register(name, plane.folder("a")).name == name

    def test_bad_labels(self, plane: ControlPlane) -> None:
        for labels in ({"": "x"}, {"a b": "x"}, {"a": "x" * 257}, {f"{i}": "" for i in range(65)}):
            with pytest.raises(InvalidArgumentError):
                plane.manager.register("a", plane.folder("a"), labels=labels)

    def test_too_many_labels_are_not_looked_at_one_by_one(self, plane: ControlPlane) -> None:
        with pytest.raises(InvalidArgumentError) as caught:
            plane.manager.register("a", plane.folder("a"), labels={f"a b {i}": "" for i in range(10_000)})
        assert [violation.field for violation in caught.value.violations] == ["labels"]
        assert "10000 labels" in caught.value.message

    def test_a_rank_over_the_limit_names_both_numbers(self, plane: ControlPlane) -> None:
        with pytest.raises(InvalidArgumentError, match="rank 65 is over --max-lora-rank 64") as caught:
            plane.add("a", rank=65)
        assert caught.value.reason == "ADAPTER_TOO_LARGE"

    def test_more_pages_than_there_are(self, tmp_path: Path) -> None:
        with (
            ControlPlane(tmp_path, num_pages=2) as plane,
            pytest.raises(InvalidArgumentError, match=r"takes 3 .* the device has 2: raise --adapter-pages"),
        ):
            plane.add("a", rank=24)

    def test_more_bytes_than_the_host_cache(self, plane: ControlPlane) -> None:
        with pytest.raises(InvalidArgumentError, match=r"takes 1001 bytes .* the host cache has 1000"):
            plane.add("a", nbytes=1001)

    def test_an_unexpected_digest(self, plane: ControlPlane) -> None:
        folder = plane.folder("a")
        with pytest.raises(
            InvalidArgumentError, match=r"the files have SHA-256 [0-9a-f]{64}, not 00"
        ) as caught:
            plane.manager.register("a", folder, expected_digest="00")
        assert field_of(caught) == "expected_digest"
        digest = plane.manager.register("a", folder).manifest.digest
        assert plane.manager.register("b", folder, expected_digest=digest.upper()).version == 1

    def test_validate_only_changes_nothing(self, plane: ControlPlane) -> None:
        view = plane.manager.register("a", plane.folder("a"), validate_only=True)
        assert (view.version, view.manifest.rank) == (0, 8)
        with pytest.raises(NotFoundError):
            plane.manager.get("a")
        plane.add("a")
        with pytest.raises(AlreadyExistsError):
            plane.manager.register("a", plane.folder("a", content="other"), validate_only=True)

    def test_load_tier(self, plane: ControlPlane) -> None:
        plane.manager.register("a", plane.folder("a"), load_tier=Tier.DEVICE)
        eventually(lambda: plane.resident() == {"a"})

    def test_an_idempotency_key_gets_the_first_answer_again(self, plane: ControlPlane) -> None:
        key = str(uuid.uuid4())
        first = plane.manager.register("a", plane.folder("a"), idempotency_key=key)
        plane.manager.delete("a")
        assert plane.manager.register("a", plane.folder("a"), idempotency_key=key) == first
        with pytest.raises(NotFoundError):
            plane.manager.get("a")
        with pytest.raises(InvalidArgumentError, match="came with another request"):
            plane.manager.register("b", plane.folder("b"), idempotency_key=key)


class TestSources:
    def test_outside_of_the_allowed_roots(self, plane: ControlPlane, tmp_path: Path) -> None:
        outside = write_adapter(tmp_path / "outside")
        sneaky = f"{plane.root}/../outside"
        for source in (str(outside), sneaky, "/etc", "/nonexistent/folder"):
            with pytest.raises(InvalidArgumentError, match="outside of the allowed roots") as caught:
                plane.manager.register("a", source)
            assert str(plane.root) in caught.value.message
            assert field_of(caught) == "source"
        assert plane.loader.inspections == 0

    def test_links_lead_nowhere_else(self, plane: ControlPlane, tmp_path: Path) -> None:
        outside = write_adapter(tmp_path / "outside")
        (plane.root / "link").symlink_to(outside)
        folder = plane.root / "folder"
        folder.mkdir()
        (folder / "adapter_config.json").symlink_to(outside / "adapter_config.json")
        for source in (plane.root / "link", folder):
            with pytest.raises(InvalidArgumentError, match="outside of the allowed roots"):
                plane.manager.register("a", str(source))

    def test_links_inside_are_followed(self, plane: ControlPlane) -> None:
        real = Path(plane.folder("real"))
        (plane.root / "link").symlink_to(real)
        assert plane.manager.register("a", str(plane.root / "link")).manifest.source == str(real)

    @pytest.mark.parametrize("source", ["", "a", "./a", "~/a", "/a\0b"])
    def test_paths_that_are_not_absolute(self, plane: ControlPlane, source: str) -> None:
        with pytest.raises(InvalidArgumentError, match="not an absolute path"):
            plane.manager.register("a", source)

    def test_missing_folders_and_files(self, plane: ControlPlane) -> None:
        (plane.root / "file").touch()
        with pytest.raises(InvalidArgumentError, match="there is no folder"):
            plane.manager.register("a", str(plane.root / "missing"))
        with pytest.raises(InvalidArgumentError, match="is not a folder"):
            plane.manager.register("a", str(plane.root / "file"))

    def test_a_link_that_turns_outside_later_is_not_followed(
        self, plane: ControlPlane, tmp_path: Path
    ) -> None:
        plane.add("a")
        outside = write_adapter(tmp_path / "outside", content="a")
        (plane.root / "a").rename(tmp_path / "away")
        (plane.root / "a").symlink_to(outside)
        with pytest.raises(FailedPreconditionError, match="outside of the allowed roots"):
            plane.manager.load("a")
        assert plane.loader.packs.total() == 0

    def test_nor_is_one_that_turns_while_it_is_read(self, plane: ControlPlane, tmp_path: Path) -> None:
        plane.add("a")
        outside = write_adapter(tmp_path / "outside", content="a")
        plane.loader.gate.clear()
        arrival = plane.manager.start_load("a")
        eventually(lambda: plane.loader.packs.total() == 1)
        (plane.root / "a").rename(tmp_path / "away")
        (plane.root / "a").symlink_to(outside)
        plane.loader.gate.set()
        with pytest.raises(FailedPreconditionError, match="outside of the allowed roots"):
            arrival.result(30)
        assert plane.manager.capacity().host.used_bytes == 0

    def test_a_trusted_folder_may_lie_anywhere(self, plane: ControlPlane, tmp_path: Path) -> None:
        cache = write_adapter(tmp_path / "blobs")
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        (snapshot / "adapter_config.json").symlink_to(cache / "adapter_config.json")
        assert plane.manager.register_trusted("a", str(snapshot)).version == 1
        plane.run("a")
        with pytest.raises(InvalidArgumentError, match="outside of the allowed roots"):
            plane.manager.register("b", str(cache))

    def test_a_trusted_adapter_takes_over_its_name(self, plane: ControlPlane) -> None:
        plane.add("a")
        assert plane.manager.register_trusted("a", plane.folder("a")).version == 1
        view = plane.manager.register_trusted("a", plane.folder("a", content="other"))
        assert (view.version, view.other_versions) == (2, ())


class TestUpdate:
    def test_requests_under_way_end_on_the_old_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        old_digest = plane.digest("a")
        old = plane.manager.lease("a")
        old_slot = plane.activate(old)
        view = plane.manager.update("a", source=plane.folder("a", content="new"))
        assert view.version == 2
        assert [(v.number, v.state, v.leases) for v in view.other_versions] == [(1, AdapterState.DRAINING, 1)]
        new = plane.manager.lease("a")
        new_slot = plane.activate(new)
        assert new.uid != old.uid
        assert plane.weights_in(old_slot) == old_digest
        assert plane.weights_in(new_slot) == plane.digest("a") != old_digest
        with pytest.raises(NotFoundError, match="has no version 1; there is 2"):
            plane.manager.lease("a", 1)
        old.release()
        new.release()
        assert plane.manager.get("a").other_versions == ()
        assert plane.manager.capacity().free_slots == 1

    def test_a_waiting_request_still_gets_its_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.manager.load("a", Tier.HOST)
        digest = plane.digest("a")
        waiting = plane.manager.lease("a")
        plane.manager.update("a", source=plane.folder("b"))
        assert plane.weights_in(plane.activate(waiting)) == digest
        waiting.release()

    def test_bad_files_leave_the_old_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.run("a")
        with pytest.raises(InvalidArgumentError) as caught:
            plane.manager.update("a", source=plane.folder("b", rank=128))
        assert field_of(caught) == "adapter.source"
        assert plane.manager.get("a").version == 1
        assert plane.manager.lease("a").members[0].hit
        plane.manager.delete("a", drain_timeout_s=0)

    def test_labels_and_etags(self, plane: ControlPlane) -> None:
        first = plane.add("a")
        second = plane.manager.update("a", labels={"team": "law"}, etag=first.etag)
        assert (second.version, second.labels) == (1, {"team": "law"})
        assert second.etag != first.etag
        with pytest.raises(AbortedError, match="it was changed meanwhile"):
            plane.manager.update("a", labels={}, etag=first.etag)
        assert plane.manager.update("a", labels={}).labels == {}

    def test_every_change_has_an_etag_of_its_own(self, plane: ControlPlane) -> None:
        manager, folder = plane.manager, plane.folder("a")
        changes = [
            manager.register("a", folder),
            manager.update("a", labels={"x": "1"}),
            manager.update("a", source=plane.folder("b"), keep_previous=True),
            manager.rollback("a"),
            manager.pin("a", Tier.HOST),
            manager.unpin("a"),
            manager.delete("a"),
            manager.register("a", folder),
        ]
        assert len({view.etag for view in changes if view}) == len(changes)

    def test_validate_only_and_nothing_to_change(self, plane: ControlPlane) -> None:
        plane.add("a")
        view = plane.manager.update("a", source=plane.folder("b", rank=16), validate_only=True)
        assert (view.version, view.manifest.rank) == (0, 16)
        assert plane.manager.get("a").manifest.rank == 8
        with pytest.raises(InvalidArgumentError, match="nothing to change"):
            plane.manager.update("a")
        with pytest.raises(NotFoundError):
            plane.manager.update("b", labels={})

    def test_the_same_files_elsewhere_are_the_same_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        moved = plane.folder("moved", content="a")
        view = plane.manager.update("a", source=moved)
        assert (view.version, view.manifest.source) == (1, moved)

    def test_a_key_sent_twice_makes_one_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        key = str(uuid.uuid4())
        for _ in range(2):
            view = plane.manager.update("a", source=plane.folder("b"), idempotency_key=key)
        assert view.version == plane.manager.get("a").version == 2


class TestRollback:
    def test_back_and_forth(self, plane: ControlPlane) -> None:
        plane.add("a")
        digest = plane.digest("a")
        plane.manager.update("a", source=plane.folder("b"), keep_previous=True)
        plane.manager.update("a", source=plane.folder("c"), keep_previous=True)
        assert plane.manager.lease("a", 1).versions[0].number == 1
        assert plane.manager.rollback("a").version == 2
        back = plane.manager.rollback("a")
        assert (back.version, back.manifest.digest) == (1, digest)
        assert [v.number for v in back.other_versions] == [2, 3]
        with pytest.raises(NotFoundError, match="no earlier version; there is 2, 3, 1"):
            plane.manager.rollback("a")
        assert plane.manager.rollback("a", version=3).version == 3
        with pytest.raises(NotFoundError, match="no version 4"):
            plane.manager.rollback("a", version=4)
        with pytest.raises(AbortedError):
            plane.manager.rollback("a", version=1, etag=back.etag)
        plane.manager.delete("a", drain_timeout_s=0)

    def test_what_was_not_kept_is_gone(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.manager.update("a", source=plane.folder("b"))
        with pytest.raises(NotFoundError):
            plane.manager.rollback("a")


class TestDelete:
    def test_what_it_had_is_free(self, plane: ControlPlane) -> None:
        before = plane.manager.capacity()
        plane.add("a")
        plane.run("a")
        assert plane.manager.capacity() != before
        plane.manager.delete("a")
        assert plane.manager.capacity() == before
        with pytest.raises(NotFoundError):
            plane.manager.get("a")
        plane.settle()
        assert plane.pool.bound == {}

    def test_requests_under_way_go_on(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        slot = plane.activate(lease)
        view = plane.manager.delete("a")
        assert view is not None
        assert (view.state, view.leases) == (AdapterState.DRAINING, 1)
        assert "requests that end on it: 1" in view.state_reason
        with pytest.raises(NotFoundError):
            plane.manager.lease("a")
        assert lease.activate() == slot
        assert plane.manager.get("a").state is AdapterState.DRAINING
        assert plane.expelled == plane.gone == []
        lease.release()
        assert plane.gone == [lease.uid]
        with pytest.raises(NotFoundError):
            plane.manager.get("a")

    def test_a_new_adapter_of_the_name_never_meets_the_old_one(self, plane: ControlPlane) -> None:
        plane.add("a")
        old = plane.manager.lease("a")
        old_slot = plane.activate(old)
        old_digest = plane.digest("a")
        plane.manager.delete("a")
        view = plane.manager.register("a", plane.folder("a", content="other"))
        assert view.version == 2
        assert [v.number for v in view.other_versions] == [1]
        new = plane.manager.lease("a")
        assert plane.weights_in(plane.activate(new)) == view.manifest.digest
        assert plane.weights_in(old_slot) == old_digest
        assert old.uid != new.uid
        old.release()
        new.release()
        assert plane.manager.get("a").other_versions == ()

    def test_numbers_are_never_used_twice(self, plane: ControlPlane) -> None:
        for number in range(1, 5):
            assert plane.add("a").version == number
            plane.manager.delete("a")

    def test_the_timeout_expels(self, plane: ControlPlane) -> None:
        plane.add("a", "b")
        running, waiting = plane.manager.lease("a"), plane.manager.lease("a")
        slot = plane.activate(running)
        plane.manager.delete("a", drain_timeout_s=0)
        eventually(lambda: plane.expelled == [running.uid])
        assert running.activate() == slot, "the engine has not aborted it yet"
        with pytest.raises(FailedPreconditionError, match="drain timeout has passed"):
            waiting.activate()
        running.release()
        waiting.release()
        with pytest.raises(NotFoundError):
            plane.manager.get("a")

    def test_deleting_again_sets_a_new_timeout(self, plane: ControlPlane) -> None:
        plane.add("a")
        lease = plane.manager.lease("a")
        plane.manager.delete("a", drain_timeout_s=1000)
        plane.manager.delete("a", drain_timeout_s=0)
        eventually(lambda: plane.expelled == [lease.uid])
        lease.release()

    def test_a_timeout_that_was_put_off_does_not_expel(self, plane: ControlPlane) -> None:
        plane.add("a", "b")
        patient, marker = plane.manager.lease("a"), plane.manager.lease("b")
        plane.manager.delete("a", drain_timeout_s=0.01)
        plane.manager.delete("a", drain_timeout_s=1000)
        plane.manager.delete("b", drain_timeout_s=0.02)
        eventually(lambda: plane.expelled == [marker.uid])
        for lease in (patient, marker):
            lease.release()

    def test_refusals(self, plane: ControlPlane) -> None:
        view = plane.add("a")
        plane.manager.pin("a", Tier.HOST)
        with pytest.raises(AbortedError):
            plane.manager.delete("a", etag=view.etag)
        with pytest.raises(FailedPreconditionError, match="pinned in tier HOST: unpin it first, or force"):
            plane.manager.delete("a")
        with pytest.raises(InvalidArgumentError, match="not between 0 and 86400"):
            plane.manager.delete("a", drain_timeout_s=-1)
        plane.manager.delete("a", force=True)
        assert plane.manager.delete("a", allow_missing=True) is None
        with pytest.raises(NotFoundError):
            plane.manager.delete("a")

    def test_while_it_loads(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        arrival = plane.manager.start_load("a")
        plane.manager.delete("a")
        plane.loader.gate.set()
        with pytest.raises(FailedPreconditionError, match="was deleted"):
            arrival.result(30)
        eventually(lambda: plane.manager.list_adapters().total_size == 0)
        assert plane.manager.capacity().host.used_bytes == 0


class TestLoadAndEvict:
    def test_tiers(self, plane: ControlPlane) -> None:
        plane.add("a")
        assert plane.manager.load("a", Tier.HOST).state is AdapterState.HOST
        view = plane.manager.load("a")
        assert view.state is AdapterState.RESIDENT
        assert view.last_load is not None
        assert plane.manager.load("a").loads == 1
        assert plane.manager.evict("a").state is AdapterState.HOST
        assert plane.manager.evict("a").state is AdapterState.HOST
        assert plane.manager.evict("a", Tier.HOST).state is AdapterState.REGISTERED
        plane.manager.load("a")
        assert plane.manager.evict("a", Tier.HOST).state is AdapterState.REGISTERED

    def test_a_load_to_the_device_may_join_one_to_the_host(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        arrivals = [plane.manager.start_load("a", tier) for tier in (Tier.HOST, Tier.DEVICE, Tier.HOST)]
        assert plane.manager.get("a").state is AdapterState.LOADING
        plane.loader.gate.set()
        for arrival in arrivals:
            arrival.result(30)
        assert plane.manager.get("a").state is AdapterState.RESIDENT
        assert plane.loader.packs.total() == 1

    def test_no_room(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        leases = [plane.manager.lease(name) for name in ("a", "b")]
        for lease in leases:
            plane.activate(lease)
        with pytest.raises(ResourceExhaustedError, match=r"1 rank pages .*; 2 of 2 slots and 2 of 8"):
            plane.manager.load("c")
        assert plane.manager.get("c").state is AdapterState.HOST
        with pytest.raises(FailedPreconditionError, match="sequences that use it: 1"):
            plane.manager.evict("a")
        for lease in leases:
            lease.release()
        assert plane.manager.load("c").state is AdapterState.RESIDENT

    def test_a_waiter_who_goes_does_not_end_the_load(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        with pytest.raises(DeadlineExceededError):
            plane.manager.load("a", timeout_s=0.01)
        assert not plane.manager.start_load("a").cancel()
        with pytest.raises(FailedPreconditionError, match="a load is under way"):
            plane.manager.evict("a")
        plane.loader.gate.set()
        plane.manager.load("a")
        assert plane.loader.packs.total() == 1

    def test_a_failed_reload_to_host_memory_leaves_what_is_resident(self, plane: ControlPlane) -> None:
        plane.add("a", nbytes=600)
        plane.add("b", nbytes=600)
        plane.run("a")
        plane.run("b")
        write_adapter(plane.root / "a", content="changed")
        with pytest.raises(FailedPreconditionError, match="has changed"):
            plane.manager.load("a", Tier.HOST)
        assert plane.manager.get("a").state is AdapterState.RESIDENT
        plane.run("a")


class TestPin:
    def test_a_pinned_adapter_stays(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        view = plane.manager.pin("a")
        assert (view.state, view.pinned_tier, view.lru_position) == (AdapterState.RESIDENT, Tier.DEVICE, None)
        assert plane.manager.slots()[0].pinned
        for name in ("b", "c", "b"):
            plane.run(name)
        assert "a" in plane.resident()
        with pytest.raises(FailedPreconditionError, match="pinned in tier DEVICE; unpin it first"):
            plane.manager.evict("a")
        assert plane.manager.unpin("a").pinned_tier is None
        assert plane.manager.unpin("a").pinned_tier is None
        plane.manager.evict("a")

    def test_the_last_slot_cannot_be_pinned(self, plane: ControlPlane) -> None:
        plane.add("a", "b")
        plane.manager.pin("a")
        with pytest.raises(FailedPreconditionError, match="1 of 2 slots are pinned, and one must stay free"):
            plane.manager.pin("b")
        assert plane.manager.get("b").state is AdapterState.REGISTERED
        assert plane.manager.pin("a").pinned_tier is Tier.DEVICE

    def test_pages_and_bytes_bound_pins_too(self, tmp_path: Path) -> None:
        with ControlPlane(tmp_path, num_slots=3, num_pages=4, host_bytes=150) as plane:
            plane.add("a", "b", rank=24)
            plane.manager.pin("a")
            with pytest.raises(FailedPreconditionError, match="takes 3 rank pages, and 3 of 4 are pinned"):
                plane.manager.pin("b")
            plane.manager.pin("a", Tier.HOST)
            with pytest.raises(FailedPreconditionError, match="takes 100 bytes, and 100 of 150 are pinned"):
                plane.manager.pin("b", Tier.HOST)

    def test_a_pin_that_fails_changes_nothing(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        leases = [plane.manager.lease(name) for name in ("a", "b")]
        for lease in leases:
            plane.activate(lease)
        etag = plane.manager.get("c").etag
        with pytest.raises(ResourceExhaustedError):
            plane.manager.pin("c")
        write_adapter(plane.root / "d", content="d")
        plane.add("d")
        (plane.root / "d").rename(plane.root / "gone")
        with pytest.raises(FailedPreconditionError):
            plane.manager.pin("d", Tier.HOST)
        assert plane.manager.get("c").etag == etag
        assert plane.manager.get("c").pinned_tier is None
        assert plane.manager.get("d").pinned_tier is None
        for lease in leases:
            lease.release()

    def test_without_waiting_it_arrives_when_there_is_room(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        leases = [plane.manager.lease(name) for name in ("a", "b")]
        for lease in leases:
            plane.activate(lease)
        assert plane.manager.pin("c", wait=False).pinned_tier is Tier.DEVICE
        plane.settle()
        assert "c" not in plane.resident()
        leases[0].release()
        eventually(lambda: "c" in plane.resident())
        leases[1].release()

    def test_a_pin_follows_the_current_version(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.manager.pin("a")
        plane.manager.update("a", source=plane.folder("b"), keep_previous=True)
        eventually(lambda: plane.manager.get("a").state is AdapterState.RESIDENT)
        view = plane.manager.get("a")
        assert (view.version, view.pinned_tier, view.lru_position) == (2, Tier.DEVICE, None)
        plane.manager.rollback("a")
        eventually(lambda: plane.manager.get("a").state is AdapterState.RESIDENT)
        slots = {slot.version: slot.pinned for slot in plane.manager.slots()}
        assert slots == {1: True, 2: False}

    def test_a_host_pin_keeps_host_memory(self, tmp_path: Path) -> None:
        with ControlPlane(tmp_path, host_bytes=200) as plane:
            plane.add("a", "b", "c")
            plane.manager.pin("a", Tier.HOST)
            for name in ("b", "c", "b"):
                plane.manager.load(name, Tier.HOST)
            assert plane.manager.get("a").state is AdapterState.HOST
            assert plane.manager.capacity().host.held_bytes == 100

    def test_a_pin_whose_load_fails_is_not_tried_for_ever(self, tmp_path: Path) -> None:
        with ControlPlane(tmp_path, host_bytes=100) as plane:
            plane.add("a", "b")
            plane.run("a")
            plane.run("b")
            write_adapter(plane.root / "a", content="changed")
            plane.manager.pin("a", Tier.HOST, wait=False)
            eventually(lambda: plane.manager.stats().load_failures == 1)
            plane.settle()
            plane.run("b")
            assert plane.manager.stats().load_failures == 1
            assert plane.manager.get("a").state is AdapterState.RESIDENT

    def test_nobody_evicts_what_is_about_to_be_pinned(self, plane: ControlPlane) -> None:
        plane.add("a", "b", "c")
        version, arrival = plane.manager._pinning.hold("a", Tier.DEVICE, number=None, etag="")
        arrival.result(30)
        for name in ("b", "c", "b"):
            plane.run(name)
        assert "a" in plane.resident()
        with pytest.raises(FailedPreconditionError, match="an administrator is pinning it"):
            plane.manager.evict("a")
        plane.manager._pinning.end_hold(version)
        plane.manager.evict("a")

    def test_deleting_while_a_pin_waits(self, plane: ControlPlane) -> None:
        plane.add("a")
        plane.loader.gate.clear()
        failure: list[Exception] = []

        def pin() -> None:
            try:
                plane.manager.pin("a")
            except (FailedPreconditionError, NotFoundError) as error:
                failure.append(error)

        pinning = threading.Thread(target=pin)
        pinning.start()
        eventually(lambda: plane.manager.loading == 1)
        plane.manager.delete("a")
        plane.loader.gate.set()
        pinning.join(30)
        assert len(failure) == 1


class TestQuestions:
    def test_pages_of_a_list(self, plane: ControlPlane) -> None:
        names = [f"a{i:02}" for i in range(7)]
        plane.add(*reversed(names))
        seen: list[str] = []
        token = ""
        for size in (3, 3, 1):
            page = plane.manager.list_adapters(page_size=3, page_token=token)
            assert (len(page.adapters), page.total_size) == (size, 7)
            seen += [view.name for view in page.adapters]
            token = page.next_page_token
        assert (seen, token) == (names, "")

    def test_filters(self, plane: ControlPlane) -> None:
        plane.add("law-1", "law-2", "tale")
        plane.manager.update("law-2", labels={"team": "le gal"})
        plane.manager.pin("tale")

        def names(filter: str) -> list[str]:
            return [view.name for view in plane.manager.list_adapters(filter=filter).adapters]

        assert names("") == ["law-1", "law-2", "tale"]
        assert names("state=RESIDENT") == names("pinned=true") == ["tale"]
        assert names("name:law* AND pinned=false") == ["law-1", "law-2"]
        assert names('labels.team="le gal"') == ["law-2"]

    def test_filters_of_files(self, plane: ControlPlane) -> None:
        plane.add("plain")
        source = plane.folder("dora", rank=16, features=("bias", "dora"))
        digest = plane.manager.register("dora", source).manifest.digest

        def names(filter: str) -> list[str]:
            return [view.name for view in plane.manager.list_adapters(filter=filter).adapters]

        assert names("features:dora") == names("features:bias AND rank=16") == names("rank>=9") == ["dora"]
        assert names(f"digest={digest.upper()}") == names(f"digest:{digest[:12]}*") == ["dora"]
        assert names("rank<=8") == ["plain"]
        assert names('base_model=""') == ["dora", "plain"]
        assert names("features:lm_head") == names("base_model=other") == []

    def test_bad_lists(self, plane: ControlPlane) -> None:
        with pytest.raises(InvalidArgumentError, match="page_size"):
            plane.manager.list_adapters(page_size=-1)
        with pytest.raises(InvalidArgumentError, match="page_token"):
            plane.manager.list_adapters(page_token="nonsense")
        plane.add("a", "b")
        token = plane.manager.list_adapters(page_size=1).next_page_token
        with pytest.raises(InvalidArgumentError, match="keep the filter"):
            plane.manager.list_adapters(page_token=token, filter="pinned=true")

    def test_capacity_by_rank(self, plane: ControlPlane) -> None:
        plane.add("a", rank=24)
        plane.run("a")
        capacity = plane.manager.capacity()
        assert [r.rank for r in capacity.by_rank] == [8, 16, 32, 64]
        assert [(r.pages, r.fit_free, r.fit_available) for r in capacity.by_rank] == [
            (1, 1, 2),
            (2, 1, 2),
            (4, 1, 2),
            (8, 0, 1),
        ]
        assert (capacity.free_slots, capacity.available_slots, capacity.free_rank_pages) == (1, 2, 5)
        assert (capacity.device.used_bytes, capacity.device.held_bytes) == (3000, 0)
        lease = plane.manager.lease("a")
        plane.activate(lease)
        assert plane.manager.capacity((64,)).by_rank[0].fit_available == 0
        assert plane.manager.capacity().device.held_bytes == 3000
        lease.release()
        for ranks in ((0,), (67,)):
            with pytest.raises(InvalidArgumentError, match="is not between 1 and --max-lora-rank 64"):
                plane.manager.capacity(ranks)
        assert len(plane.manager.capacity((8,) * MAX_RANKS).by_rank) == MAX_RANKS
        with pytest.raises(InvalidArgumentError, match=f"at most {MAX_RANKS} at once"):
            plane.manager.capacity((8,) * (MAX_RANKS + 1))

    @pytest.mark.parametrize(("num_pages", "num_fit"), [(8, 2), (11, 3), (12, 4)])
    def test_capacity_with_dora(self, tmp_path: Path, num_pages: int, num_fit: int) -> None:
        """It takes what one more rank does: fewer fit than there are slots, unless there are pages."""
        with ControlPlane(tmp_path, num_slots=4, num_pages=num_pages, host_bytes=9000) as plane:
            alone, with_dora = plane.manager.capacity((16, 17)).by_rank
            assert (alone.pages, alone.fit_free, alone.fit_available, alone.fit_pinned) == (2, 4, 4, 3)
            assert (with_dora.pages, with_dora.fit_free, with_dora.fit_available) == (3, num_fit, num_fit)
            assert (alone.fit_host, with_dora.fit_host) == (4, 3)
            assert (with_dora.fit_pinned, with_dora.rank) == (min(num_fit, 3), 17)
            names = [f"a{number}" for number in range(num_fit + 1)]
            for name in names:
                folder = plane.folder(name, rank=16, features=["dora"])
                assert plane.manager.register(name, folder).manifest.num_pages == 3
            leases = [plane.manager.lease(name) for name in names[:num_fit]]
            for lease in leases:
                plane.activate(lease)
            with pytest.raises(ResourceExhaustedError) as caught:
                plane.manager.load(names[num_fit])
            assert caught.value.message.endswith(
                f"it needs a slot and 3 rank pages on the device; {num_fit} of 4 slots and {3 * num_fit} of "
                f"{num_pages} rank pages are pinned or in use"
            )
            for lease in leases:
                lease.release()

    def test_capacity_of_the_highest_rank_with_dora_and_biases(self, plane: ControlPlane) -> None:
        by_rank = plane.manager.capacity((64, 65, 66)).by_rank
        assert [(fit.pages, fit.fit_available) for fit in by_rank] == [(8, 1), (9, 0), (9, 0)]

    def test_stats_name_who_runs_and_who_waits(self, plane: ControlPlane) -> None:
        plane.add("a", "b")
        running, waiting = plane.manager.lease("a"), plane.manager.lease("b")
        plane.activate(running)
        stats = plane.manager.stats()
        assert (stats.running, stats.waiting) == (("a",), ("b",))
        assert (stats.registered, stats.resident, stats.misses, stats.hits) == (2, 1, 2, 0)
        for lease in (running, waiting):
            lease.release()


def test_a_folder_that_cannot_be_read_is_told(plane: ControlPlane) -> None:
    os.symlink("loop", plane.root / "loop")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        plane.manager.register("a", str(plane.root / "loop"))
