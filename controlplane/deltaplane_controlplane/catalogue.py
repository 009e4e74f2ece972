"""Which adapters are registered, kept in SQLite and found again after a restart."""

import json
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltaplane_controlplane.errors import FailedPreconditionError, InternalError
from deltaplane_controlplane.ports import RANK_PAGE_ROWS, AdapterManifest
from deltaplane_controlplane.versions import NO_LABELS, NO_PINS, Tier

_SCHEMA_VERSION = 2

_SCHEMA = """
CREATE TABLE revision (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    value    INTEGER NOT NULL
);
INSERT INTO revision VALUES (1, 0);

-- Names that were ever used. Outlives the adapter, so that no version number is used twice for a name.
CREATE TABLE names (
    name          TEXT PRIMARY KEY,
    last_version  INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE adapters (
    name         TEXT PRIMARY KEY REFERENCES names (name),
    current      INTEGER NOT NULL,
    labels       TEXT NOT NULL,
    create_time  REAL NOT NULL,
    update_time  REAL NOT NULL,
    revision     INTEGER NOT NULL,
    pins         TEXT NOT NULL DEFAULT '',
    FOREIGN KEY (name, current) REFERENCES versions (name, number) DEFERRABLE INITIALLY DEFERRED
) WITHOUT ROWID;

-- The current version of each adapter and those kept for a rollback, which may have pins of their own.
CREATE TABLE versions (
    name      TEXT NOT NULL REFERENCES adapters (name) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    number    INTEGER NOT NULL,
    manifest  TEXT NOT NULL,
    pins      TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (name, number)
) WITHOUT ROWID;
"""

_FROM_VERSION_1 = f"""
-- Adapters were of LoRA in the layers alone, so that their ranks said which pages they take.
UPDATE versions SET manifest = json_set(
    manifest,
    '$.num_pages', (json_extract(manifest, '$.rank') + {RANK_PAGE_ROWS - 1}) / {RANK_PAGE_ROWS},
    '$.features', json('[]')
);

-- An adapter had one pin, and an earlier version none.
ALTER TABLE versions ADD COLUMN pins TEXT NOT NULL DEFAULT '';
ALTER TABLE adapters ADD COLUMN pins TEXT NOT NULL DEFAULT '';
UPDATE adapters SET pins = COALESCE(pinned_tier, '');
ALTER TABLE adapters DROP COLUMN pinned_tier;
"""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as the catalogue has it.

    versions: number to manifest; the current one is among them. version_pins: number to pins, of those that
    have pins of their own.
    """

    name: str
    current: int
    labels: Mapping[str, str]
    pins: frozenset[Tier]
    create_time: float
    update_time: float
    revision: int
    versions: Mapping[int, AdapterManifest]
    version_pins: Mapping[int, frozenset[Tier]]


class Catalogue:
    """A SQLite file with one writer. Every method is one transaction, on disk when it returns.

    path: a file, made where there is none, or ":memory:".
    Errors: FailedPreconditionError (in use by another process, not a catalogue, of a newer deltaplane);
    InternalError when a write fails, after which nothing is changed.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._lock = threading.Lock()
        self._db = self._open()

    def load(self) -> Iterator[StoredAdapter]:
        """All adapters, in order of name."""
        shared = _Interner()
        rows = self._db.execute(
            "SELECT name, current, labels, adapters.pins, create_time, update_time, revision,"
            " number, manifest, versions.pins FROM adapters JOIN versions USING (name) ORDER BY name, number"
        )
        for adapter, group in groupby(rows, lambda row: row[:7]):
            name, current, labels, pins, created, updated, revision = adapter
            versions = [row[7:] for row in group]
            yield StoredAdapter(
                name=name,
                current=current,
                labels=json.loads(labels) if labels != "{}" else NO_LABELS,
                pins=_pins(pins),
                create_time=created,
                update_time=updated,
                revision=revision,
                versions={number: shared.manifest(manifest) for number, manifest, _ in versions},
                version_pins={number: _pins(own) for number, _, own in versions if own} or _NO_PINS,
            )

    def register(
        self, name: str, manifest: AdapterManifest, labels: Mapping[str, str], now: float
    ) -> tuple[int, int]:
        """Adds an adapter. Answers the number of its version and the revision."""
        with self._transaction() as db:
            number, revision = self._next_version(name), self._next_revision()
            db.execute(
                "INSERT INTO adapters (name, current, labels, create_time, update_time, revision)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (name, number, _labels_json(labels), now, now, revision),
            )
            self._add_version(name, number, manifest)
        return number, revision

    def add_version(
        self, name: str, manifest: AdapterManifest, labels: Mapping[str, str], now: float, *, keep: bool
    ) -> tuple[int, int]:
        """Makes new files current, and keeps or drops those that were. Answers number and revision."""
        with self._transaction() as db:
            number, revision = self._next_version(name), self._next_revision()
            if not keep:
                db.execute(
                    "DELETE FROM versions WHERE name = :name"
                    " AND number = (SELECT current FROM adapters WHERE name = :name)",
                    {"name": name},
                )
            self._add_version(name, number, manifest)
            db.execute(
                "UPDATE adapters SET current = ?, labels = ?, update_time = ?, revision = ? WHERE name = ?",
                (number, _labels_json(labels), now, revision, name),
            )
        return number, revision

    def change(
        self, name: str, number: int, manifest: AdapterManifest, labels: Mapping[str, str], now: float
    ) -> int:
        """Writes labels, and where the files of a version are. Answers the revision."""
        with self._transaction() as db:
            revision = self._next_revision()
            db.execute(
                "UPDATE versions SET manifest = ? WHERE name = ? AND number = ?",
                (_manifest_json(manifest), name, number),
            )
            db.execute(
                "UPDATE adapters SET labels = ?, update_time = ?, revision = ? WHERE name = ?",
                (_labels_json(labels), now, revision, name),
            )
        return revision

    def set_current(self, name: str, number: int, now: float) -> int:
        """Makes a kept version current, which ends the pins of its own. Answers the revision."""
        with self._transaction() as db:
            revision = self._next_revision()
            db.execute("UPDATE versions SET pins = '' WHERE name = ? AND number = ?", (name, number))
            db.execute(
                "UPDATE adapters SET current = ?, update_time = ?, revision = ? WHERE name = ?",
                (number, now, revision, name),
            )
        return revision

    def set_pins(self, name: str, number: int | None, pins: frozenset[Tier], now: float) -> int:
        """Writes all pins of an adapter or, with a number, of a kept version. Answers the revision."""
        text = ",".join(sorted(tier.value for tier in pins))
        with self._transaction() as db:
            revision = self._next_revision()
            if number is None:
                db.execute("UPDATE adapters SET pins = ? WHERE name = ?", (text, name))
            else:
                db.execute("UPDATE versions SET pins = ? WHERE name = ? AND number = ?", (text, name, number))
            db.execute(
                "UPDATE adapters SET update_time = ?, revision = ? WHERE name = ?", (now, revision, name)
            )
        return revision

    def delete(self, name: str) -> int:
        """Removes an adapter and its versions, but for its last number. Answers the revision."""
        with self._transaction() as db:
            revision = self._next_revision()
            db.execute("DELETE FROM adapters WHERE name = ?", (name,))
        return revision

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._db.close()

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self._path, isolation_level=None, timeout=0, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            # The exclusive lock is taken by the first transaction and held until close or the end of the
            # process: one writer.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
            self._migrate(db)
        except sqlite3.Error as error:
            db.close()
            raise self._unusable(error) from error
        except FailedPreconditionError:
            db.close()
            raise
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise FailedPreconditionError(
                f"catalogue {self._path} has schema {version}, this deltaplane knows {_SCHEMA_VERSION}: "
                "start a newer one, or give it another file"
            )
        if version == 0:
            _execute(db, _SCHEMA)
        elif version == 1:
            _execute(db, _FROM_VERSION_1)
        db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        db.execute("COMMIT")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if not isinstance(error, sqlite3.Error):
                    raise
                raise InternalError(
                    f"the catalogue {self._path} cannot be written, nothing was changed: {error}",
                    reason="CATALOGUE_WRITE_FAILED",
                ) from error

    def _add_version(self, name: str, number: int, manifest: AdapterManifest) -> None:
        self._db.execute(
            "INSERT INTO versions (name, number, manifest) VALUES (?, ?, ?)",
            (name, number, _manifest_json(manifest)),
        )

    def _next_version(self, name: str) -> int:
        (number,) = self._db.execute(
            "INSERT INTO names VALUES (?, 1)"
            " ON CONFLICT DO UPDATE SET last_version = last_version + 1 RETURNING last_version",
            (name,),
        ).fetchone()
        return int(number)

    def _next_revision(self) -> int:
        (revision,) = self._db.execute("UPDATE revision SET value = value + 1 RETURNING value").fetchone()
        return int(revision)

    def _unusable(self, error: sqlite3.Error) -> FailedPreconditionError:
        if "locked" in str(error):
            what = "another server uses it; stop that one or give this one another file"
        else:
            what = f"{error}; give the server a file that it may write, or none yet"
        return FailedPreconditionError(f"catalogue {self._path}: {what}", reason="CATALOGUE_UNUSABLE")


class _Interner:
    """Makes manifests that share what is equal in them: ten thousand adapters often differ in little."""

    def __init__(self) -> None:
        self._tuples: dict[tuple[str, ...], tuple[str, ...]] = {}

    def manifest(self, text: str) -> AdapterManifest:
        values: dict[str, Any] = json.loads(text)
        values["target_modules"] = self._tuple(values["target_modules"])
        values["base_model"] = sys.intern(values["base_model"])
        values["rank_pattern"] = values["rank_pattern"] or _NO_PATTERN
        values["features"] = self._tuple(values["features"])
        return AdapterManifest(**values)

    def _tuple(self, items: list[str]) -> tuple[str, ...]:
        key = tuple(items)
        return self._tuples.setdefault(key, key)


_NO_PATTERN: Mapping[str, int] = MappingProxyType({})
_NO_PINS: Mapping[int, frozenset[Tier]] = MappingProxyType({})


def _execute(db: sqlite3.Connection, script: str) -> None:
    """Runs the statements of a script within the transaction under way."""
    for statement in script.split(";\n"):
        db.execute(statement)


def _pins(text: str) -> frozenset[Tier]:
    return frozenset(Tier(value) for value in text.split(",")) if text else NO_PINS


def _manifest_json(manifest: AdapterManifest) -> str:
    values = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    return json.dumps(values | {"rank_pattern": dict(manifest.rank_pattern)})


def _labels_json(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels))
