"""A process that registers, pins, updates and deletes adapters until it is killed, for test_catalogue.

For each number on stdin it forks a child, which opens the catalogue and goes on after so many changes. It
writes the child's pid, then each number of changes that the child has made, then "dead" at the child's end.
"""

import os
import sys
from pathlib import Path

import structlog

from control_plane import ControlPlane
from deltaplane_controlplane.versions import Tier

_STEPS = 5
_NAMES = 3


def state_after(changes: int) -> dict[str, tuple[int, Tier | None]]:
    """Name to current version and pin, after so many changes: a name is registered, pinned, updated,
    unpinned and deleted, then the next one is."""
    lives, step = divmod(changes, _STEPS)
    first = 2 * (lives // _NAMES) + 1
    states = [(first, None), (first, Tier.HOST), (first + 1, Tier.HOST), (first + 1, None)]
    return {_name(changes): states[step - 1]} if step else {}


def _name(changes: int) -> str:
    return f"a{changes // _STEPS % _NAMES}"


def _change(plane: ControlPlane, changes: int) -> None:
    """Makes the change that comes after so many others."""
    name, manager = _name(changes), plane.manager
    match changes % _STEPS:
        case 0:
            manager.register(name, plane.folder("first"))
        case 1:
            manager.pin(name, Tier.HOST, wait=False)
        case 2:
            manager.update(name, source=plane.folder("second"))
        case 3:
            manager.unpin(name)
        case _:
            manager.delete(name)


def _go_on(catalogue: Path, changes: int) -> None:
    _tell(os.getpid())
    plane = ControlPlane(catalogue.parent, catalogue=catalogue)
    while True:
        _change(plane, changes)
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
