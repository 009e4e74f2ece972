"""The waiting queue: priority, fairness between tenants, first come first served."""

import random
from collections import Counter

import pytest

from deltaplane_server.scheduling.fair_queue import FairQueue
from deltaplane_server.scheduling.sequence import Sequence
from fake_leases import FakeAdapters
from fake_runner import make_sequence


class Arrivals:
    """Makes sequences, one after the other."""

    def __init__(self) -> None:
        self.adapters = FakeAdapters(num_slots=4)
        self.count = 0

    def make(self, tenant: str = "", *, priority: int = 0, uid: int = 0) -> Sequence:
        self.count += 1
        lease = self.adapters.lease(uid) if uid else None
        return make_sequence(
            self.count, [1], tenant=tenant, priority=priority, lease=lease, arrival=float(self.count)
        )


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


def serve(queue: FairQueue, cost: float = 1.0) -> Sequence:
    """Starts the next sequence."""
    sequence = next(queue.in_order(set()))
    queue.remove(sequence)
    queue.charge(sequence.tenant, cost)
    queue.check_integrity()
    return sequence


def push(queue: FairQueue, *sequences: Sequence) -> None:
    for sequence in sequences:
        queue.push(sequence)
        queue.check_integrity()


def test_first_come_first_served_within_a_tenant(arrivals: Arrivals) -> None:
    queue = FairQueue()
    sequences = [arrivals.make("a", uid=uid) for uid in (0, 1, 2, 1, 0)]
    push(queue, *sequences)
    assert [serve(queue) for _ in sequences] == sequences
    assert len(queue) == 0


def test_priority_comes_before_fairness(arrivals: Arrivals) -> None:
    queue = FairQueue()
    low, high, higher = (arrivals.make("a", priority=p) for p in (0, 1, 5))
    push(queue, low, high, higher)
    queue.charge("a", 1000)
    push(queue, arrivals.make("b"))
    assert [serve(queue) for _ in range(2)] == [higher, high]


def test_the_tenant_served_least_is_next(arrivals: Arrivals) -> None:
    queue = FairQueue()
    push(queue, *(arrivals.make("a") for _ in range(10)), *(arrivals.make("b") for _ in range(10)))
    served: Counter[str] = Counter()
    for _ in range(12):
        sequence = serve(queue, cost=30 if (tenant := next(queue.in_order(set())).tenant) == "a" else 10)
        assert sequence.tenant == tenant
        served[tenant] += 30 if tenant == "a" else 10
    assert abs(served["a"] - served["b"]) <= 30


def test_weights_share_out_what_is_served(arrivals: Arrivals) -> None:
    queue = FairQueue({"a": 3.0})
    push(queue, *(arrivals.make("a") for _ in range(90)), *(arrivals.make("b") for _ in range(90)))
    served = Counter(serve(queue).tenant for _ in range(80))
    assert served == {"a": 60, "b": 20}


def test_idle_time_earns_nothing(arrivals: Arrivals) -> None:
    """A tenant that comes late does not catch up on what others were served before."""
    queue = FairQueue()
    push(queue, *(arrivals.make("busy") for _ in range(200)))
    for _ in range(100):
        serve(queue)
    push(queue, *(arrivals.make("late") for _ in range(100)))
    served = Counter(serve(queue).tenant for _ in range(20))
    assert abs(served["late"] - served["busy"]) <= 1


def test_a_tenant_that_leaves_and_returns_keeps_its_debt(arrivals: Arrivals) -> None:
    queue = FairQueue()
    push(queue, arrivals.make("a"), arrivals.make("b"))
    first = serve(queue, cost=100)
    second = serve(queue, cost=1)
    assert (first.tenant, second.tenant) == ("a", "b")
    push(queue, arrivals.make("b"), *(arrivals.make("a") for _ in range(3)))
    push(queue, arrivals.make("b"))
    assert [serve(queue).tenant for _ in range(3)] == ["b", "b", "a"]


def test_an_empty_queue_does_not_reset_the_level(arrivals: Arrivals) -> None:
    """The level is what the last tenant to leave was at, so that a newcomer has no head start on it."""
    queue = FairQueue()
    push(queue, arrivals.make("a"))
    queue.charge("a", 50)
    serve(queue)
    push(queue, arrivals.make("new"), arrivals.make("new"), arrivals.make("a"))
    assert [serve(queue).tenant for _ in range(3)] == ["new", "a", "new"]


def test_the_preempted_go_first(arrivals: Arrivals) -> None:
    queue = FairQueue()
    old, new = arrivals.make("a", uid=1), arrivals.make("a", uid=2)
    push(queue, arrivals.make("a"), arrivals.make("a"))
    for sequence in (new, old):
        sequence.num_preemptions = 1
        queue.push_front(sequence)
    queue.check_integrity()
    assert [serve(queue) for _ in range(2)] == [old, new]


def test_the_preempted_go_before_those_who_wait_longer(arrivals: Arrivals) -> None:
    queue = FairQueue()
    waits_for_its_adapter, preempted = arrivals.make("a", uid=1), arrivals.make("a", uid=2)
    push(queue, waits_for_its_adapter)
    preempted.num_preemptions = 1
    queue.push_front(preempted)
    assert [serve(queue) for _ in range(2)] == [preempted, waits_for_its_adapter]


def test_all_of_a_tenant_falls_back_when_it_is_charged(arrivals: Arrivals) -> None:
    """Also what waits for another adapter."""
    queue = FairQueue()
    first, second, other = (arrivals.make(tenant, uid=uid) for tenant, uid in (("a", 0), ("a", 1), ("b", 0)))
    push(queue, first, second, other)
    order = queue.in_order(set())
    assert next(order) is first
    queue.charge("a", 10)
    assert list(order) == [other, second]


def test_closed_adapters_are_passed_over(arrivals: Arrivals) -> None:
    queue = FairQueue()
    sequences = [arrivals.make("a", uid=uid) for uid in (1, 1, 0, 2, 1)]
    push(queue, *sequences)
    assert list(queue.in_order({1})) == [sequences[2], sequences[3]]
    assert sorted(s.id for s in queue.of_adapter(1)) == [1, 2, 5]
    assert queue.has_adapter(2)
    queue.remove(sequences[3])
    assert not queue.has_adapter(2)


def test_order_takes_account_of_what_happens_while_it_runs(arrivals: Arrivals) -> None:
    queue = FairQueue()
    a = [arrivals.make("a") for _ in range(3)]
    b = [arrivals.make("b", uid=1) for _ in range(3)]
    push(queue, *a, *b)
    closed: set[int] = set()
    order = queue.in_order(closed)
    assert next(order) is a[0]
    queue.remove(a[0])
    queue.charge("a", 10)
    assert next(order) is b[0], "a was charged"
    assert next(order) is b[1], "b was passed over without a charge"
    closed.add(1)
    assert list(order) == a[1:]
    queue.check_integrity()


def test_counters_of_tenants_long_gone_are_dropped(arrivals: Arrivals) -> None:
    queue = FairQueue()
    for number in range(20_000):
        push_one = arrivals.make(f"tenant-{number}")
        queue.push(push_one)
        queue.remove(push_one)
    assert len(queue._counters) < 10_000


def test_random_use_keeps_the_books(arrivals: Arrivals) -> None:
    draw = random.Random(1)
    queue = FairQueue()
    waiting: list[Sequence] = []
    for _ in range(2000):
        if draw.random() < 0.5 or not waiting:
            sequence = arrivals.make(draw.choice("abc"), priority=draw.randint(0, 1), uid=draw.randint(0, 3))
            push(queue, sequence)
            waiting.append(sequence)
        elif draw.random() < 0.5:
            waiting.remove(serve(queue, draw.randint(1, 9)))
        else:
            gone = waiting.pop(draw.randrange(len(waiting)))
            queue.remove(gone)
            queue.check_integrity()
    assert sorted(s.id for s in queue.in_order(set())) == sorted(s.id for s in waiting)
