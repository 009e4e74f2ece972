"""How a server sets up CPython, for the whole process."""

import gc
import sys
from collections.abc import Iterator

import pytest

from deltaplane_server import interpreter


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_threads_take_short_turns() -> None:
    interpreter.share_fairly()
    assert sys.getswitchinterval() == pytest.approx(interpreter.SWITCH_INTERVAL_S)


def test_what_is_loaded_is_not_collected_again() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    before, alive = Cycle(), gc.get_freeze_count()
    Cycle()
    interpreter.freeze_heap()
    assert gc.get_freeze_count() > alive
    assert not any(isinstance(found, Cycle) for found in gc.get_objects()), "what is frozen is not listed"
    assert before.me is before
    assert gc.get_threshold()[0] > 10_000
