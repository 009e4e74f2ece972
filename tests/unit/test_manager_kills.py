"""kill -9 in the middle of changes: what is found again is the state before or after, with all of its files.

DELTAPLANE_SOAK_KILLS says how often.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import IO

import crash_child
from control_plane import ControlPlane, eventually
from crash_child import CATALOGUE, STORE, State, state_after
from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.versions import AdapterState, Tier

KILLS = int(os.environ.get("DELTAPLANE_SOAK_KILLS", "30"))


@contextmanager
def children(folder: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """What is told to and by the process that makes children."""
    command = [sys.executable, crash_child.__file__, str(folder)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True) as parent,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        yield parent.stdin, parent.stdout
        parent.stdin.close()


def killed_after(tell: IO[str], told: IO[str], done: int, draw: random.Random) -> int:
    """Has a child go on after `done` changes and kills it. Answers how many it told of."""
    print(done, file=tell, flush=True)
    pid = int(told.readline())
    for _ in range(draw.randrange(5)):
        done = int(told.readline())
    time.sleep(draw.uniform(0.0, 0.005))
    os.kill(pid, signal.SIGKILL)
    while (line := told.readline().strip()) != "dead":
        done = int(line)
    return done


def found_again(folder: Path) -> State:
    """What the next start finds: each adapter's files are there, whole, and no others are."""
    store = AdapterStore(folder / STORE)
    with ControlPlane(folder, catalogue=folder / CATALOGUE, store=store) as plane:
        views = plane.manager.list_adapters().adapters
        for view in views:
            assert plane.manager.load(view.name, Tier.HOST).state is AdapterState.HOST
        needed = {Path(view.manifest.path).name for view in views}
        eventually(lambda: {entry.name for entry in store.path.iterdir()} == needed, "the sweep")
        plane.manager.check_integrity()
        state = {view.name: (view.version, view.pins) for view in views}
    store.close()
    return state


def test_kill_9_leaves_the_state_before_or_after(tmp_path: Path) -> None:
    draw = random.Random(15)
    done = 0
    with children(tmp_path) as (tell, told):
        for _ in range(KILLS):
            done = killed_after(tell, told, done, draw)
            found = found_again(tmp_path)
            assert found in (state_after(done), state_after(done + 1))
            done += found != state_after(done)
    assert done > KILLS, "the children got somewhere"
