"""A process that uploads, pins, replaces, unpins and deletes adapters until it is killed.

For each number on stdin it forks a child, which opens catalogue and store and goes on after so many changes.
It writes the child's pid, then each number of changes that the child has made, then "dead" at its end.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import structlog

from control_plane import ControlPlane
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.upload_files import ExpectedFile, Upload
from deltaplane_controlplane.upload_terms import UploadTerms
from deltaplane_controlplane.versions import NO_PINS, Tier
from fakes import CONFIG

CATALOGUE = "catalogue.db"
STORE = "store"

_STEPS = 5
_NAMES = 3

State = dict[str, tuple[int, frozenset[Tier]]]
"""Name to current version and pins."""


def state_after(changes: int) -> State:
    """The state after so many changes: a name is uploaded, pinned, replaced, unpinned and deleted, then the
    next one is."""
    lives, step = divmod(changes, _STEPS)
    first, pinned = 2 * (lives // _NAMES) + 1, frozenset((Tier.HOST,))
    states = [(first, NO_PINS), (first, pinned), (first + 1, pinned), (first + 1, NO_PINS)]
    return {_name(changes): states[step - 1]} if step else {}


def _name(changes: int) -> str:
    return f"a{changes // _STEPS % _NAMES}"


def _change(plane: ControlPlane, store: AdapterStore, changes: int) -> None:
    """Makes the change that comes after so many others."""
    name, manager = _name(changes), plane.manager
    match changes % _STEPS:
        case 0 | 2 as step:
            folder, digest = _upload(store, str(changes))
            manager.register_upload(folder, UploadTerms(name, {CONFIG: digest}, replace=step == 2))
        case 1:
            manager.pin(name, Tier.HOST, wait=False)
        case 3:
            manager.unpin(name)
        case _:
            manager.delete(name)


def _upload(store: AdapterStore, content: str) -> tuple[str, str]:
    """Writes the files of an adapter, as an upload does. Answers their folder and digest."""
    data = json.dumps({"rank": 8, "nbytes": 100, "content": content}).encode()
    digest = hashlib.sha256(data).hexdigest()
    upload = Upload(store, [ExpectedFile("files", CONFIG, len(data), digest)])
    for at in range(0, len(data), 16):
        upload.write(data[at : at + 16])
    return str(upload.commit()), digest


def _go_on(folder: Path, changes: int) -> None:
    _tell(os.getpid())
    store = AdapterStore(folder / STORE)
    plane = ControlPlane(folder, catalogue=folder / CATALOGUE, store=store)
    while True:
        _change(plane, store, changes)
        changes += 1
        _tell(changes)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _go_on(Path(sys.argv[1]), int(line))
        os.waitpid(pid, 0)
        _tell("dead")


def _tell(what: object) -> None:
    os.write(sys.stdout.fileno(), f"{what}\n".encode())


if __name__ == "__main__":
    main()
