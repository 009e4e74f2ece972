"""Calls that are made at their time."""

import threading
import time

from deltaplane_controlplane.deadlines import Deadlines


def test_calls_come_in_order_of_time_and_survive_each_other() -> None:
    deadlines = Deadlines()
    called: list[str] = []
    done = threading.Event()

    def fail() -> None:
        called.append("fails")
        raise RuntimeError("not my day")

    def last() -> None:
        called.append("last")
        done.set()

    now = time.monotonic()
    deadlines.at(now + 0.06, last)
    deadlines.at(now + 0.03, fail)
    deadlines.at(now - 1, lambda: called.append("late"))
    assert done.wait(30)
    assert called == ["late", "fails", "last"]
    deadlines.close()


def test_nothing_comes_after_the_end() -> None:
    deadlines = Deadlines()
    called: list[str] = []
    deadlines.at(time.monotonic() + 60, lambda: called.append("never"))
    deadlines.close()
    deadlines.at(time.monotonic(), lambda: called.append("never"))
    deadlines.close()
    assert called == []
