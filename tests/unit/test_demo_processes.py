"""Programs that the demo starts never outlive it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30

# Starts a program that starts another one, says their ids, and then does as it is told.
SCRIPT = """
import sys, time
from examples.demo.processes import exit_on_sigterm, running

CHILD = '''
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
'''

exit_on_sigterm()
try:
    with running([sys.executable, "-c", CHILD]) as child:
        print(child.pid, child.stdout.readline().strip(), flush=True)
        {then}
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(then: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{then}", then)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and _is_running(pid)]:
        assert time.monotonic() < deadline, f"{alive} outlived the demo"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda v: str(v),
)
def test_a_signal_ends_all_with_the_usual_exit_code_and_no_traceback(number: int, code: int) -> None:
    process = start("time.sleep(600)")
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (code, "")
    assert_gone(pids)


def test_a_signal_at_the_very_start_leaves_nobody() -> None:
    process = start("time.sleep(600)")
    me = psutil.Process(process.pid)
    deadline = time.monotonic() + PATIENCE_S
    while not me.children() and time.monotonic() < deadline:
        pass
    children = [child.pid for child in me.children(recursive=True)]
    assert children
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert_gone(children)


def test_the_end_of_the_block_ends_all() -> None:
    process = start("pass")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert_gone([int(word) for word in out.split()])


def test_an_error_in_the_block_ends_all() -> None:
    process = start("raise RuntimeError('so it is')")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.endswith("RuntimeError: so it is\n")
    assert_gone([int(word) for word in out.split()])


def test_the_program_gets_no_ctrl_c_of_its_own() -> None:
    """It is in a group of its own, so that it is asked to end in order, by SIGTERM, and once."""
    process = start("time.sleep(600)")
    assert process.stdout is not None
    child, _ = (int(word) for word in process.stdout.readline().split())
    assert os.getpgid(child) == child
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
