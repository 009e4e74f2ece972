"""What a manager finds again after a restart."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.errors import FailedPreconditionError, NotFoundError
from deltaplane_controlplane.manager import AdapterManager, ManagerConfig
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import AdapterState, Tier
from fakes import FakeLoader, FakePool

MANY = 10_000


def test_adapters_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, catalogue=path) as plane:
        plane.add("a", "b", "gone")
        plane.manager.update("b", labels={"team": "law"})
        plane.manager.update("b", source=plane.folder("c"), keep_previous=True)
        plane.manager.delete("gone")
        before = plane.manager.list_adapters()
    with ControlPlane(tmp_path, catalogue=path) as plane:
        assert plane.manager.list_adapters() == before
        assert plane.loader.inspections == plane.loader.packs.total() == 0, "start-up reads no weights"
        assert plane.manager.lease("b").versions[0].number == 2
        assert plane.manager.rollback("b").version == 1
        assert plane.add("gone").version == 2, "numbers are never used twice"
        assert plane.run("a") == 0
        plane.manager.delete("b", drain_timeout_s=0)


def test_pinned_adapters_are_loaded_at_start(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, catalogue=path) as plane:
        plane.add("a", "b", "c")
        plane.manager.pin("a")
        plane.manager.pin("b", Tier.HOST)
    with ControlPlane(tmp_path, catalogue=path) as plane:
        assert plane.resident() == set()
        plane.manager.start()
        eventually(lambda: plane.resident() == {"a"})
        eventually(lambda: plane.manager.get("b").state is AdapterState.HOST)
        assert plane.manager.get("c").state is AdapterState.REGISTERED


def test_pins_beyond_new_limits_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, num_slots=3, catalogue=path) as plane:
        plane.add("a", "b")
        plane.manager.pin("a")
        plane.manager.pin("b")
    with ControlPlane(tmp_path, num_slots=2, catalogue=path) as plane:
        plane.manager.start()
        plane.settle()
        pins = [plane.manager.get(name).pinned_tier for name in ("a", "b")]
        assert sorted(pins, key=str) == [None, Tier.DEVICE]


def test_a_folder_that_vanished_fails_at_first_use(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, catalogue=path) as plane:
        plane.add("a")
    (tmp_path / "adapters" / "a").rename(tmp_path / "adapters" / "b")
    with ControlPlane(tmp_path, catalogue=path) as plane:
        lease = plane.manager.lease("a")
        with pytest.raises(FailedPreconditionError, match="there is no folder"):
            plane.activate(lease)
        assert plane.manager.get("a").state is AdapterState.FAILED
        lease.release()


def test_an_adapter_over_new_limits_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, catalogue=path) as plane:
        plane.add("a", rank=32)
    with ControlPlane(tmp_path, catalogue=path, max_lora_rank=16) as plane:
        assert plane.manager.get("a").state is AdapterState.FAILED
        with pytest.raises(FailedPreconditionError, match="rank 32 is over --max-lora-rank 16"):
            plane.manager.lease("a")
        with pytest.raises(FailedPreconditionError, match="rank 32 is over --max-lora-rank 16"):
            plane.manager.load("a")


def test_a_draining_adapter_is_gone_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with ControlPlane(tmp_path, catalogue=path) as plane:
        plane.add("a")
        plane.manager.lease("a")
        plane.manager.delete("a")
        assert plane.manager.get("a").state is AdapterState.DRAINING
    with ControlPlane(tmp_path, catalogue=path) as plane, pytest.raises(NotFoundError):
        plane.manager.get("a")


def test_ten_thousand_adapters_cost_little(tmp_path: Path) -> None:
    catalogue = Catalogue(":memory:")
    manifest = AdapterManifest(
        "", "", 16, 32.0, False, ("q_proj", "k_proj", "v_proj", "o_proj"), 32, 10**7, 10**7, 2, "base/model"
    )
    for i in range(MANY):
        source, digest = f"/models/adapters/tenant-{i:05}", f"{i:064x}"
        catalogue.register(f"tenant-{i:05}", replace(manifest, source=source, digest=digest), {}, 1.0)
    config = ManagerConfig(max_lora_rank=64, host_cache_bytes=10**9, allowed_roots=(tmp_path,))
    tracemalloc.start()
    manager = AdapterManager(loader=FakeLoader(), pool=FakePool(), config=config, catalogue=catalogue)
    cost, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cost < 4096 * MANY
    assert manager.list_adapters(page_size=1).total_size == MANY
    manager.check_integrity()
    manager.close()
