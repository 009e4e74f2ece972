"""The log of events and its readers."""

from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from control_plane import ControlPlane, eventually
from deltaplane_controlplane.errors import (
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.events import AdapterEvent, EventLog, EventType, Subscription
from deltaplane_controlplane.versions import Tier
from deltaplane_controlplane.views import AdapterView


@dataclass
class Reader:
    """A subscription that counts how often it was woken."""

    log: EventLog
    token: str = ""
    woken: int = 0
    subscription: Subscription = field(init=False)

    def __post_init__(self) -> None:
        self.subscription = self.log.subscribe(self._wake, self.token)

    def _wake(self) -> None:
        self.woken += 1

    def read(self) -> list[int]:
        return [event.version for event in self.subscription.read()]


@pytest.fixture
def view(plane: ControlPlane) -> AdapterView:
    return plane.add("a")


def write(log: EventLog, view: AdapterView, *numbers: int) -> None:
    for number in numbers:
        log.append(EventType.UPDATED, view, number, "", 1.0)
    log.notify()


def test_readers_see_what_comes_after_they_subscribed(view: AdapterView) -> None:
    log = EventLog()
    write(log, view, 1)
    reader = Reader(log)
    assert reader.read() == []
    write(log, view, 2, 3)
    assert (reader.woken, reader.read(), reader.read()) == (1, [2, 3], [])


def test_a_token_goes_on_behind_its_event(view: AdapterView) -> None:
    log = EventLog()
    first = Reader(log)
    start = first.subscription.resume_token
    write(log, view, 1, 2, 3)
    events = first.subscription.read(limit=2)
    assert Reader(log, events[0].resume_token).read() == [2, 3]
    assert Reader(log, first.subscription.resume_token).read() == [3]
    assert Reader(log, start).read() == [1, 2, 3]


def test_a_slow_reader_is_cut_off_and_may_resume(view: AdapterView) -> None:
    log = EventLog(capacity=8, max_lag=4)
    reader = Reader(log)
    token = reader.subscription.resume_token
    write(log, view, *range(5))
    with pytest.raises(ResourceExhaustedError, match="5 events behind, 4 are allowed") as caught:
        reader.read()
    assert caught.value.reason == "WATCHER_TOO_SLOW"
    again = Reader(log, token)
    write(log, view, 5, 6)
    assert again.read() == [*range(7)], "who resumes has as long to catch up as the log reaches back"
    write(log, view, *range(7, 12))
    with pytest.raises(ResourceExhaustedError, match="5 events behind, 4 are allowed"):
        again.read()
    with pytest.raises(OutOfRangeError, match="watch afresh"):
        Reader(log, token)


def test_only_so_many_may_read(view: AdapterView) -> None:
    log = EventLog(max_readers=2)
    readers = [Reader(log), Reader(log)]
    with pytest.raises(ResourceExhaustedError, match=r"2 watches are open, .* --max-watches") as caught:
        Reader(log)
    assert (caught.value.reason, caught.value.retry_after_s) == ("TOO_MANY_WATCHES", 5.0)
    assert log.num_readers == 2
    with readers.pop().subscription:
        pass
    assert log.num_readers == 1
    again = Reader(log)
    with pytest.raises(InvalidArgumentError):
        Reader(EventLog(max_readers=1), "nonsense")
    write(log, view, 1)
    assert [reader.read() for reader in (*readers, again)] == [[1], [1]]


@pytest.mark.parametrize("token", ["nonsense", "0.1", "abcdef01.", "abcdef01.--1", "abcdef01.1 "])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a token of a watch"):
        Reader(EventLog(), token)


def test_tokens_of_an_earlier_run_or_of_the_future_are_refused(view: AdapterView) -> None:
    log = EventLog()
    write(log, view, 1)
    epoch = Reader(log).subscription.resume_token.split(".")[0]
    for token in ("00000000.0", f"{epoch}.1"):
        with pytest.raises(OutOfRangeError):
            Reader(log, token)


def test_the_end_of_the_log_ends_its_readers(view: AdapterView) -> None:
    log = EventLog()
    reader = Reader(log)
    log.close()
    assert reader.woken == 1
    with pytest.raises(UnavailableError):
        reader.read()


def test_readers_that_are_gone_are_not_woken(view: AdapterView) -> None:
    log = EventLog()
    reader = Reader(log)
    with reader.subscription:
        pass
    write(log, view, 1)
    assert reader.woken == 0


def test_the_life_of_an_adapter_is_told_in_order(plane: ControlPlane) -> None:
    with plane.manager.subscribe(lambda: None) as subscription:
        assert plane.manager.stats().watches == 1
        seen: list[AdapterEvent] = []

        def has_seen(kind: EventType) -> bool:
            seen.extend(subscription.read())
            return seen[-1].type is kind

        plane.add("a")
        plane.manager.pin("a", Tier.HOST)
        plane.manager.load("a")
        plane.manager.update("a", source=plane.folder("b"))
        eventually(lambda: has_seen(EventType.LOADED))
        (plane.root / "b").rename(plane.root / "c")
        plane.manager.unpin("a")
        plane.manager.evict("a", Tier.HOST)
        plane.manager.start_load("a")
        eventually(lambda: has_seen(EventType.FAILED))
        plane.manager.delete("a")
        seen.extend(subscription.read())

    kinds = [(event.type.name, event.version) for event in seen]
    assert kinds == [
        ("REGISTERED", 1),
        ("LOADING", 1),
        ("LOADED", 1),
        ("PINNED", 1),
        ("LOADING", 1),
        ("LOADED", 1),
        ("UPDATED", 2),
        ("DRAINING", 1),
        ("DELETED", 1),
        ("LOADING", 2),
        ("LOADED", 2),
        ("PINNED", 2),
        ("EVICTED", 2),
        ("LOADING", 2),
        ("FAILED", 2),
        ("DRAINING", 2),
        ("DELETED", 2),
    ]
    assert "there is no folder" in seen[-3].reason
    assert seen[0].adapter.name == "a"


def test_each_change_is_one_log_line(plane: ControlPlane) -> None:
    with capture_logs() as logs:
        plane.add("a", "b", "c")
        for name in ("a", "b", "c"):
            plane.manager.load(name)
        plane.manager.delete("a")
        plane.settle()
        eventually(lambda: logs[-1]["event"] == "adapter.deleted")
    lines = {(line["event"], line["adapter"]): line for line in logs}
    assert len(lines) == len(logs) == 3 + 3 + 3 + 1 + 2
    loaded = lines["adapter.loaded", "c"]
    assert (loaded["version"], loaded["tier"], loaded["slot"], loaded["pages"]) == (1, "device", 0, (0,))
    assert (loaded["read_ms"], loaded["pack_ms"]) == (1.0, 2.0)
    assert {"queue_ms", "copy_ms"} <= loaded.keys()
    assert lines["adapter.evicted", "a"]["reason"] == "room for c@1"
    assert lines["adapter.registered", "a"]["rank"] == 8
