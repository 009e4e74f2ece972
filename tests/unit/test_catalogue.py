"""The catalogue: what it keeps and whom it refuses."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deltaplane_controlplane.catalogue import Catalogue, StoredAdapter
from deltaplane_controlplane.errors import FailedPreconditionError, InternalError
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import NO_PINS, Tier

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
    num_pages=3,
    base_model="base",
    rank_pattern={"q_proj": 8},
    features=("bias", "dora"),
)
OTHER = replace(MANIFEST, digest="d2", rank_pattern={}, num_pages=2, features=())


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
        assert catalogue.set_pins("a", None, frozenset(Tier), 4.0) == 4
        assert catalogue.set_pins("a", 1, frozenset((Tier.HOST,)), 5.0) == 5
    found = contents(path)
    assert list(found) == ["a", "b"]
    assert found["a"] == StoredAdapter(
        name="a",
        current=2,
        labels={"team": "tax"},
        pins=frozenset(Tier),
        create_time=2.0,
        update_time=5.0,
        revision=5,
        versions={1: MANIFEST, 2: OTHER},
        version_pins={1: frozenset((Tier.HOST,))},
    )
    assert found["b"] == StoredAdapter("b", 1, {}, NO_PINS, 1.0, 1.0, 1, {1: OTHER}, {})
    with opened(path) as catalogue:
        catalogue.set_current("a", 1, 6.0)
    assert contents(path)["a"].version_pins == {}, "the pins of a version end when it becomes current"


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


def test_a_file_of_the_first_schema_opens(tmp_path: Path) -> None:
    """Its manifests have neither pages nor features, an adapter has one pin, earlier versions have none."""
    path = tmp_path / "catalogue.db"
    with opened(path) as catalogue:
        for name, rank in (("a", 16), ("b", 17)):
            catalogue.register(name, replace(MANIFEST, rank=rank), {"team": "law"}, 1.0)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE versions SET manifest = json_remove(manifest, '$.num_pages', '$.features')")
        db.execute("ALTER TABLE versions DROP COLUMN pins")
        db.execute("ALTER TABLE adapters DROP COLUMN pins")
        check = "CHECK (pinned_tier IN ('host', 'device'))"
        db.execute(f"ALTER TABLE adapters ADD COLUMN pinned_tier TEXT {check}")
        db.execute("UPDATE adapters SET pinned_tier = 'device' WHERE name = 'b'")
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):
        found = contents(path)
        assert found["a"].versions == {1: replace(MANIFEST, num_pages=2, features=())}
        assert found["b"].versions == {1: replace(MANIFEST, rank=17, num_pages=3, features=())}
        assert [stored.labels for stored in found.values()] == [{"team": "law"}] * 2
        assert [stored.pins for stored in found.values()] == [NO_PINS, {Tier.DEVICE}]


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
    with pytest.raises(FailedPreconditionError, match="has schema 99, this deltaplane knows 2"):
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
