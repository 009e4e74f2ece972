"""Requests that are sent twice."""

import threading
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from deltaplane_controlplane.errors import InvalidArgumentError, NotFoundError
from deltaplane_controlplane.idempotency import IdempotencyCache

KEY = str(uuid.uuid4())


def test_the_same_request_gets_the_same_answer() -> None:
    numbers = count()
    cache: IdempotencyCache[int] = IdempotencyCache()
    assert [cache.once(KEY, "r", lambda: next(numbers)) for _ in range(3)] == [0, 0, 0]
    assert cache.once("", "r", lambda: next(numbers)) == 1
    assert cache.once("", "r", lambda: next(numbers)) == 2
    with pytest.raises(InvalidArgumentError, match="came with another request"):
        cache.once(KEY, "s", lambda: next(numbers))


def test_two_at_the_same_time_are_one() -> None:
    cache: IdempotencyCache[int] = IdempotencyCache()
    numbers, begun, go = count(), threading.Event(), threading.Event()

    def call() -> int:
        begun.set()
        assert go.wait(30)
        return next(numbers)

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(cache.once, KEY, "r", call) for _ in range(4)]
        assert begun.wait(30)
        go.set()
        assert {answer.result(30) for answer in answers} == {0}


def test_a_failed_request_may_be_tried_again() -> None:
    cache: IdempotencyCache[int] = IdempotencyCache()

    def fail() -> int:
        raise NotFoundError("no")

    with pytest.raises(NotFoundError):
        cache.once(KEY, "r", fail)
    assert cache.once(KEY, "r", lambda: 1) == 1


def test_answers_are_forgotten_after_their_time_and_when_there_are_too_many() -> None:
    now = 0.0
    cache: IdempotencyCache[float] = IdempotencyCache(ttl_s=600, capacity=2, clock=lambda: now)
    assert cache.once(KEY, "r", lambda: now) == 0
    now = 599
    assert cache.once(KEY, "r", lambda: now) == 0
    now = 600
    assert cache.once(KEY, "r", lambda: now) == 600
    for _ in range(2):
        cache.once(str(uuid.uuid4()), "r", lambda: now)
    now = 601
    assert cache.once(KEY, "r", lambda: now) == 601


def test_a_key_is_a_uuid() -> None:
    cache: IdempotencyCache[int] = IdempotencyCache()
    with pytest.raises(InvalidArgumentError, match="'mine' is not a UUID"):
        cache.once("mine", "r", lambda: 1)
    with pytest.raises(InvalidArgumentError) as caught:
        cache.once("-" * (1 << 20) + KEY, "r", lambda: 1)
    assert len(caught.value.message) < 200
    assert cache.once(uuid.UUID(KEY).urn, "r", lambda: 1) == 1


def test_requests_are_not_kept() -> None:
    tracemalloc.start()
    try:
        cache: IdempotencyCache[int] = IdempotencyCache()
        for number in range(10):
            cache.once(str(uuid.uuid4()), ("register", "x" * (1 << 20), number), lambda: 1)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20
