"""The threads that loads share."""

import threading
import time
from collections.abc import Iterator

import pytest

from deltaplane_server.adapters.load_threads import LoadThreads


def test_there_is_one_at_least_and_eight_at_most() -> None:
    assert 1 <= LoadThreads().num_threads <= 8


def test_answers_come_in_order_from_calls_at_once() -> None:
    together = threading.Barrier(3)

    def work(item: int) -> int:
        together.wait(timeout=10)
        return -item

    assert LoadThreads(3).map(work, range(6)) == [0, -1, -2, -3, -4, -5]


def test_a_caller_does_not_wait_for_helpers_that_others_keep_busy() -> None:
    threads = LoadThreads(2)
    busy = threading.Barrier(3)
    release = threading.Event()

    def block(_: int) -> bool:
        busy.wait(timeout=10)
        return release.wait(timeout=10)

    other = threading.Thread(target=threads.map, args=(block, range(2)))
    other.start()
    busy.wait(timeout=10)
    try:
        assert threads.map(str, range(5)) == ["0", "1", "2", "3", "4"]
    finally:
        release.set()
        other.join()


def test_an_error_is_raised_when_no_call_is_under_way_any_more() -> None:
    both = threading.Barrier(2)
    ended = []

    def work(item: int) -> None:
        both.wait(timeout=10)
        if threading.current_thread() is threading.main_thread():
            raise ValueError(item)
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(ValueError, match=r"0|1"):
        LoadThreads(2).map(work, range(2))
    assert len(ended) == 1


def test_the_first_error_in_order_is_raised() -> None:
    ended = []
    late_is_over = threading.Event()

    def work(item: str) -> None:
        if item == "early":
            late_is_over.wait(timeout=10)
            raise ValueError(item)
        ended.append(item)
        late_is_over.set()
        if item == "late":
            raise ValueError(item)

    with pytest.raises(ValueError, match="early"):
        LoadThreads(2).map(work, ["early", "late", "last"])
    assert ended == ["late", "last"]


def test_the_first_call_begins_before_the_last_item_is_there() -> None:
    begun = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        assert begun.wait(timeout=10)
        yield 2

    def work(item: int) -> int:
        begun.set()
        return item

    assert LoadThreads(2).map(work, items()) == [1, 2]


def test_an_iterator_is_asked_by_one_thread_at_a_time() -> None:
    asking: list[int] = []

    def items() -> Iterator[int]:
        for item in range(200):
            asking.append(item)
            time.sleep(0)
            assert asking.pop() == item
            yield item

    assert LoadThreads(4).map(str, items()) == [str(item) for item in range(200)]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_item_that_cannot_be_had_is_an_error(num_threads: int) -> None:
    together = threading.Barrier(min(num_threads, 2))

    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("no third")

    def work(_: int) -> None:
        together.wait(timeout=10)

    with pytest.raises(ValueError, match="no third"):
        LoadThreads(num_threads).map(work, items())
