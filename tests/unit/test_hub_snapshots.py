"""Adapters in the cache of the Hugging Face hub, whose files are links: read where the command line names
them, through the links as they led then, and nowhere else."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from adapter_files import make_loader, write_adapter
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.errors import FailedPreconditionError, InvalidArgumentError
from deltaplane_controlplane.manager import AdapterManager, ManagerConfig
from deltaplane_controlplane.sources import AllowedRoots
from deltaplane_controlplane.versions import AdapterState, Tier
from deltaplane_controlplane.views import AdapterView
from deltaplane_server.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from fakes import FakePool
from hub_cache import COMMIT, cached_snapshot

REPOSITORY = "hub/models--org--a"
FILES = (CONFIG_FILE, WEIGHTS_FILE)


def snapshot(cache: Path, name: str = "a", *, is_shared: bool = False) -> Path:
    """That of a good adapter."""
    return cached_snapshot(cache, write_adapter(cache.parent / "made" / name), name, is_shared=is_shared)


@dataclass
class Plane:
    """A manager with a loader of real files. cache: of the hub. root: from where others may register."""

    cache: Path
    root: Path
    manager: AdapterManager

    def load(self, folder: Path, name: str = "a") -> AdapterView:
        self.manager.register_trusted(name, str(folder))
        return self.manager.load(name, Tier.HOST, timeout_s=30)

    def refusal(self, act: Callable[[], object]) -> str:
        with pytest.raises((InvalidArgumentError, FailedPreconditionError)) as caught:
            act()
        return caught.value.message


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    cache, root = tmp_path / "hub", tmp_path / "root"
    cache.mkdir()
    root.mkdir()
    manager = AdapterManager(
        loader=make_loader(),
        pool=FakePool(),
        config=ManagerConfig(max_lora_rank=16, host_cache_bytes=1 << 30, allowed_roots=(root,)),
        catalogue=Catalogue(":memory:"),
    )
    yield Plane(cache, root, manager)
    manager.close()
    manager.check_integrity()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_snapshot_that_the_command_line_names_is_served(plane: Plane, is_shared: bool) -> None:
    folder = snapshot(plane.cache, is_shared=is_shared)
    view = plane.load(folder)
    assert (view.state, view.manifest.source) == (AdapterState.HOST, str(folder))
    assert view.manifest.digest == make_loader().inspect(write_adapter(plane.root / "same")).digest


def test_a_cache_behind_a_link_is_as_good(plane: Plane, tmp_path: Path) -> None:
    folder = snapshot(plane.cache)
    (tmp_path / "home").symlink_to(plane.cache)
    assert plane.load(tmp_path / "home" / folder.relative_to(plane.cache)).state is AdapterState.HOST


def test_no_other_snapshot_is_let_in_by_it(plane: Plane) -> None:
    plane.load(snapshot(plane.cache))
    other = snapshot(plane.cache, "other")
    blobs = other.parent.parent / "blobs"
    for source in (other, blobs, blobs / "1", plane.cache / "blobs", plane.cache):
        assert "outside of the allowed roots" in plane.refusal(
            partial(plane.manager.register, "b", str(source))
        )


def test_a_folder_of_a_root_is_not_read_through_links(plane: Plane) -> None:
    """Though all of the cache is in the root: who writes there could have them lead to what others keep."""
    folder = snapshot(plane.root)
    assert f"{CONFIG_FILE} is a symbolic link" in plane.refusal(
        lambda: plane.manager.register("b", str(folder))
    )


@pytest.mark.parametrize("place", ["elsewhere", f"{REPOSITORY}", f"{REPOSITORY}/blobs.old", "hub/blobs.old"])
@pytest.mark.parametrize("name", FILES)
def test_what_lies_elsewhere_is_not_read(plane: Plane, tmp_path: Path, name: str, place: str) -> None:
    folder = snapshot(plane.cache)
    moved = tmp_path / place / "moved"
    moved.parent.mkdir(parents=True, exist_ok=True)
    (folder / name).resolve().rename(moved)
    (folder / name).unlink()
    (folder / name).symlink_to(moved)
    assert f"{name} is a symbolic link" in plane.refusal(lambda: plane.load(folder))


def test_only_a_snapshot_has_blobs(tmp_path: Path) -> None:
    good = snapshot(tmp_path / "hub")
    roots = AllowedRoots()
    assert roots.blobs(good) == {}, "nobody trusts it"
    roots.trust(good)
    assert set(roots.blobs(good)) == set(FILES)
    for name in ("models--org--a/other", "datasets--org--a/snapshots", "snapshots/snapshots"):
        folder = tmp_path / "hub" / name / COMMIT
        folder.parent.mkdir(parents=True, exist_ok=True)
        good.rename(folder)
        roots.trust(folder)
        assert roots.blobs(folder) == {}
        folder.rename(good)


def test_a_link_that_is_changed_later_is_not_followed(plane: Plane) -> None:
    folder = snapshot(plane.cache)
    plane.load(folder)
    plane.manager.evict("a", Tier.HOST)
    other = snapshot(plane.cache, "other")
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(other / WEIGHTS_FILE)
    load = partial(plane.manager.load, "a", Tier.HOST, timeout_s=30)
    assert f"{WEIGHTS_FILE}' lies outside of the allowed roots" in plane.refusal(load)


def test_a_blob_that_becomes_a_link_is_not_read(plane: Plane) -> None:
    folder = snapshot(plane.cache)
    roots = AllowedRoots()
    roots.trust(folder)
    blob = (folder / WEIGHTS_FILE).resolve()
    loader, links = make_loader(), roots.blobs(folder)
    manifest = loader.inspect(folder, links)
    assert loader.pack(manifest, links).nbytes == manifest.host_bytes
    moved = blob.rename(plane.cache / "moved")
    blob.symlink_to(moved)
    assert "is a symbolic link" in plane.refusal(lambda: loader.inspect(folder, links))
    assert "is a symbolic link" in plane.refusal(lambda: loader.pack(manifest, links))
    blob.unlink()
    assert f"has no {WEIGHTS_FILE}" in plane.refusal(lambda: loader.inspect(folder, links))
    blobs = blob.parent.rename(plane.cache / "moved blobs")
    moved.rename(blobs / blob.name)
    blob.parent.symlink_to(blobs)
    assert (folder / WEIGHTS_FILE).is_file()
    assert "cannot be opened" in plane.refusal(lambda: loader.inspect(folder, links))


def test_other_links_of_a_trusted_folder_open_nothing(plane: Plane, tmp_path: Path) -> None:
    """What is behind them lies outside of all roots, for everybody else."""
    folder = write_adapter(tmp_path / "named")
    secret = write_adapter(tmp_path / "others" / "secret")
    (folder / "more").symlink_to(secret.parent)
    (folder / "README.md").symlink_to(tmp_path / "none")
    assert plane.load(folder).state is AdapterState.HOST
    for source in (secret, secret.parent, folder / "more" / "secret"):
        assert "outside of the allowed roots" in plane.refusal(
            partial(plane.manager.register, "b", str(source))
        )
