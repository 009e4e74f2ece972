"""The waiting queue: priority first, then fair between tenants, then first come, first served.

Fairness is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al. 2024):
each tenant has a counter of the tokens it was served, and the tenant with the least is served next. A tenant
that comes back with an empty queue is lifted to the least counter in the queue, or to that of the last who
left it, so that idle time earns nothing.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TypeVar

from deltaplane_server.scheduling.lease import AdapterUid
from deltaplane_server.scheduling.sequence import Sequence

OUTPUT_TOKEN_COST = 2.0
"""What an output token costs a tenant; a prompt token costs 1. The paper's figures."""

_MIN_PRUNED = 4096


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits of one tenant for one adapter or composition at one priority, in order."""

    priority: int
    tenant: str
    uid: AdapterUid
    sequences: deque[Sequence] = field(default_factory=deque)


_Key = TypeVar("_Key")
_Rank = tuple[int, float, bool, float, int]
_Entry = tuple[_Rank, int, _Lane]


class FairQueue:
    """Sequences that wait. Lanes let those of a closed adapter be passed over without a look at each.

    weights: a tenant's share where it is not 1: of two tenants that always wait, one of weight 2 is served
    twice the tokens. Above 0.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._prune_at = _MIN_PRUNED
        self._level = 0.0
        self._last_to_leave = ""
        self._lanes: dict[tuple[int, str, AdapterUid], _Lane] = {}
        self._tenants: Counter[str] = Counter()
        self._adapters: Counter[AdapterUid] = Counter()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Takes in a sequence that has just come."""
        if not self._tenants[sequence.tenant]:
            self._lift(sequence.tenant)
        self._lane(sequence).sequences.append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """Takes back a preempted sequence, to go on before all that its tenant has waiting."""
        self._counters.setdefault(sequence.tenant, self._level)
        self._lane(sequence).sequences.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Lets go of a sequence that starts or ends."""
        key = (sequence.priority, sequence.tenant, sequence.adapter_uid)
        lane = self._lanes[key]
        lane.sequences.remove(sequence)
        if not lane.sequences:
            del self._lanes[key]
        self._length -= 1
        _decrement(self._adapters, sequence.adapter_uid)
        _decrement(self._tenants, sequence.tenant)
        self._last_to_leave = sequence.tenant

    def charge(self, tenant: str, cost: float) -> None:
        """Counts what a tenant was served."""
        counter = self._counters.get(tenant, self._level)
        self._counters[tenant] = counter + cost / self._weights.get(tenant, 1.0)

    def in_order(self, closed: Collection[AdapterUid]) -> Iterator[Sequence]:
        """All sequences in the order in which they are to be served, without those of adapters in `closed`.

        While it runs, the sequence it has just given may be removed, tenants charged and adapters closed; it
        takes account of all that.
        """
        heap = [self._entry(lane, 0) for lane in self._lanes.values() if lane.uid not in closed]
        heapify(heap)
        while heap:
            rank, position, lane = heappop(heap)
            if lane.uid in closed:
                continue
            if rank[1] != self._counters[lane.tenant]:
                heappush(heap, self._entry(lane, position))
                continue
            length = len(lane.sequences)
            yield lane.sequences[position]
            position += len(lane.sequences) == length
            if position < len(lane.sequences):
                heappush(heap, self._entry(lane, position))

    def has_adapter(self, uid: AdapterUid) -> bool:
        """Whether anything waits for this adapter version or composition."""
        return uid in self._adapters

    def of_adapter(self, uid: AdapterUid) -> Iterator[Sequence]:
        """All that waits for this adapter version or composition, in no particular order."""
        for lane in self._lanes.values():
            if lane.uid == uid:
                yield from lane.sequences

    def __iter__(self) -> Iterator[Sequence]:
        """All that waits, in no particular order."""
        for lane in self._lanes.values():
            yield from lane.sequences

    def check_integrity(self) -> None:
        """Asserts that the books balance."""
        everyone = list(self)
        assert self._length == len(everyone) == len({s.id for s in everyone})
        assert self._tenants == Counter(s.tenant for s in everyone)
        assert self._adapters == Counter(s.adapter_uid for s in everyone)
        assert all(lane.sequences for lane in self._lanes.values()), "a lane is empty"
        for key, lane in self._lanes.items():
            assert key == (lane.priority, lane.tenant, lane.uid)
            assert all(key == (s.priority, s.tenant, s.adapter_uid) for s in lane.sequences)
        assert self._tenants.keys() <= self._counters.keys(), "a waiting tenant has no counter"

    def _lane(self, sequence: Sequence) -> _Lane:
        """The lane that a sequence is about to join."""
        self._length += 1
        self._tenants[sequence.tenant] += 1
        self._adapters[sequence.adapter_uid] += 1
        key = (sequence.priority, sequence.tenant, sequence.adapter_uid)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(*key)
        return lane

    def _lift(self, tenant: str) -> None:
        others = self._tenants or (self._last_to_leave,)
        self._level = max(self._level, min(self._counters.get(t, 0.0) for t in others))
        if len(self._counters) > self._prune_at:
            self._prune()
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._level)

    def _prune(self) -> None:
        """Drops counters that their tenants would be lifted above in any case."""
        self._counters = {
            t: counter for t, counter in self._counters.items() if counter > self._level or t in self._tenants
        }
        self._prune_at = max(_MIN_PRUNED, 2 * len(self._counters))

    def _entry(self, lane: _Lane, position: int) -> _Entry:
        sequence = lane.sequences[position]
        fresh = sequence.num_preemptions == 0
        counter = self._counters[lane.tenant]
        return (-lane.priority, counter, fresh, sequence.arrival, sequence.id), position, lane


def _decrement(counts: Counter[_Key], key: _Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
