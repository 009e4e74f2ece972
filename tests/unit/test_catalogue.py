"""The catalogue: what it keeps, whom it refuses, and that no end of the process breaks it."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

import catalogue_child
from deltaplane_controlplane.catalogue import Catalogue, StoredAdapter
from deltaplane_controlplane.errors import FailedPreconditionError, InternalError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import Tier

MANIFEST = AdapterManifest(
    source="/adapters/a",
    digest="d1",
    rank=16,
    alpha=32.0,
    rslora=True,
    target_modules=("q_proj", "v_proj"),
    num_layers=2,
    source_bytes=10,
    host_bytes=20,
    base_model="base",
    rank_pattern={"q_proj": 8},
)
OTHER = replace(MANIFEST, digest="d2", rank_pattern={})
KILLS = 30


@contextmanager
def opened(path: Path | str) -> Iterator[Catalogue]:
    catalogue = Catalogue(path)
    try:
        yield catalogue
    finally:
        catalogue.close()


def contents(path: Path) -> dict[str, StoredAdapter]:
    with opened(path) as catalogue:
        return {stored.name: stored for stored in catalogue.load()}


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with opened(path) as catalogue:
        assert catalogue.register("b", OTHER, {}, 1.0) == (1, 1)
        assert catalogue.register("a", MANIFEST, {"team": "law"}, 2.0) == (1, 2)
        assert catalogue.add_version("a", OTHER, {"team": "tax"}, 3.0, keep=True) == (2, 3)
        assert catalogue.set_pin("a", Tier.HOST, 4.0) == 4
    found = contents(path)
    assert list(found) == ["a", "b"]
    assert found["a"] == StoredAdapter(
        "a", 2, {"team": "tax"}, Tier.HOST, 2.0, 4.0, 4, {1: MANIFEST, 2: OTHER}
    )
    assert found["b"] == StoredAdapter("b", 1, {}, None, 1.0, 1.0, 1, {1: OTHER})


def test_versions_are_kept_or_dropped_and_numbers_outlive_the_adapter(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with opened(path) as catalogue:
        catalogue.register("a", MANIFEST, {}, 1.0)
        catalogue.add_version("a", OTHER, {}, 2.0, keep=False)
        catalogue.add_version("a", MANIFEST, {}, 3.0, keep=True)
        catalogue.set_current("a", 2, 4.0)
        catalogue.change("a", 2, replace(OTHER, source="/moved"), {"x": "y"}, 5.0)
    stored = contents(path)["a"]
    assert (stored.current, sorted(stored.versions), stored.labels) == (2, [2, 3], {"x": "y"})
    assert stored.versions[2].source == "/moved"
    with opened(path) as catalogue:
        catalogue.delete("a")
        assert list(catalogue.load()) == []
        assert catalogue.register("a", MANIFEST, {}, 6.0)[0] == 4


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with opened(path), pytest.raises(FailedPreconditionError, match="another server uses it"):
        Catalogue(path)
    contents(path)


def test_files_that_are_no_catalogue_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, not at all" * 100)
    with pytest.raises(FailedPreconditionError, match="not a database"):
        Catalogue(tmp_path / "text")
    with pytest.raises(FailedPreconditionError, match="unable to open"):
        Catalogue(tmp_path / "missing" / "catalogue.db")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(FailedPreconditionError, match="has schema 99, this deltaplane knows 1"):
        Catalogue(tmp_path / "newer")


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.db"
    with opened(path) as catalogue:
        catalogue.register("a", MANIFEST, {}, 1.0)
        with pytest.raises(InternalError, match="nothing was changed"):
            catalogue.register("a", MANIFEST, {}, 2.0)
        with pytest.raises(InternalError, match="nothing was changed"):
            catalogue.set_current("a", 7, 2.0)
        assert catalogue.register("b", MANIFEST, {}, 3.0) == (1, 2)
    assert contents(path)["a"].current == 1


def test_kill_9_leaves_the_state_before_or_after(tmp_path: Path) -> None:
    """Children register, pin, update and delete as fast as they can, each until it is killed somewhere."""
    path = tmp_path / "catalogue.db"
    draw = random.Random(15)
    done = 0
    command = [sys.executable, catalogue_child.__file__, str(path)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True) as parent,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(KILLS):
            print(done, file=parent.stdin, flush=True)
            pid = int(parent.stdout.readline())
            for _ in range(draw.randrange(5)):
                done = int(parent.stdout.readline())
            time.sleep(draw.uniform(0.0, 0.005))
            os.kill(pid, signal.SIGKILL)
            while (line := parent.stdout.readline().strip()) != "dead":
                done = int(line)
            found = {name: (stored.current, stored.pinned_tier) for name, stored in contents(path).items()}
            assert found in (catalogue_child.state_after(done), catalogue_child.state_after(done + 1))
            done += found != catalogue_child.state_after(done)
        parent.stdin.close()
    assert done > KILLS, "the children got somewhere"
