"""Which adapters may start sequences: how loads are asked for, and how a wait for a slot is bounded.

The adapter manager decides what is in which slot. This asks it, on behalf of the waiting queue, for no more
cold adapters at a time than there are slots, so that a long queue of them does not push each other out; and
when one has waited too long because others hold its slot, it closes a busy adapter to new sequences until
that one has got in. A composition asks for all of its adapters as one, and is closed with any of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltaplane_server.scheduling.lease import AdapterLease, AdapterUid, Slots, members
from deltaplane_server.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Closure:
    """The adapters closed on behalf of one that waits, and when one of them last ran.

    exempt: what was asked for before they were closed; it may have, or gather, the very room that is waited
        for, so it gets in first.
    """

    last_ran: float
    victims: set[int] = field(default_factory=set)
    exempt: set[AdapterUid] = field(default_factory=set)


class AdapterGate:
    """max_loras: slots. ageing_s: seconds that an adapter waits for a slot before another one is closed."""

    def __init__(self, max_loras: int, ageing_s: float) -> None:
        self._max_loras = max_loras
        self._ageing_s = ageing_s
        self._running: Counter[int] = Counter()
        self._cold_since: dict[AdapterUid, float] = {}
        self._asked: set[AdapterUid] = set()
        self._closures: dict[AdapterUid, _Closure] = {}
        self._closed: dict[int, _Closure] = {}
        self._passed_over: set[AdapterUid] = set()

    @property
    def running(self) -> Counter[int]:
        """Running sequences of each adapter version."""
        return self._running

    def closed(self) -> set[AdapterUid]:
        """Adapters of which no sequence can start before something changes, as a new set; there may be more
        compositions, which enter() keeps out."""
        return self._passed_over.union(uid for uid in self._closed if self._is_closed(uid))

    def ask(self, lease: AdapterLease, now: float) -> None:
        """Has the adapter of a sequence that has just come loaded ahead of its turn.

        Errors: as activate().
        """
        if self._runs(lease.uid) or lease.resident:
            return
        if self.enter(lease, now) is not None:
            lease.deactivate()

    def enter(self, lease: AdapterLease, now: float, running: Iterable[Sequence] = ()) -> Slots | None:
        """Activates a lease and returns its slots; None where an adapter is not resident yet, or is closed.

        running: the running sequences, among whose adapters one to close is chosen.
        Errors: as activate().
        """
        uid = lease.uid
        if self._is_closed(uid):
            return None
        if not self._may_ask(lease):
            self._cold_since.setdefault(uid, now)
            self._passed_over.add(uid)
            return None
        slot = lease.activate()
        if slot is None:
            self._asked.add(uid)
            if now - self._cold_since.setdefault(uid, now) >= self._ageing_s and lease.waits_for_room:
                self._close_one_for(uid, now, running)
        return slot

    def started(self, uid: AdapterUid) -> float | None:
        """A sequence of this adapter runs. Returns since when the adapter was cold; None where it was not."""
        self._running.update(members(uid))
        return self._settle(uid)

    def stopped(self, uid: AdapterUid) -> None:
        """A running sequence of this adapter runs no more."""
        for member in members(uid):
            self._running[member] -= 1
            if not self._running[member]:
                del self._running[member]

    def abandon(self, uid: AdapterUid) -> None:
        """Nothing waits for this adapter any more."""
        self._settle(uid)

    def look_again(self) -> None:
        """Something changed in the manager: adapters that were passed over may be resident now."""
        self._passed_over.clear()

    def check_integrity(self, running: Iterable[Sequence], waiting: set[AdapterUid]) -> None:
        """Asserts that the books balance; `waiting`: adapters that sequences wait for."""
        assert self._running == Counter(member for s in running for member in members(s.adapter_uid))
        assert len(self._asked) <= self._max_loras, "too many adapters are asked for"
        assert self._asked <= self._cold_since.keys() <= waiting, "nobody waits for an adapter asked for"
        assert self._closures.keys() <= self._asked, "adapters are closed for one that does not wait"
        assert self._passed_over <= self._cold_since.keys()
        assert self._closed == {victim: c for c in self._closures.values() for victim in c.victims}

    def _may_ask(self, lease: AdapterLease) -> bool:
        uid = lease.uid
        return uid in self._asked or len(self._asked) < self._max_loras or self._runs(uid) or lease.resident

    def _runs(self, uid: AdapterUid) -> bool:
        """Whether all its adapters are in their slots, since sequences use them."""
        return all(self._running[member] for member in members(uid))

    def _is_closed(self, uid: AdapterUid) -> bool:
        closures = (self._closed.get(member) for member in members(uid))
        return any(closure is not None and uid not in closure.exempt for closure in closures)

    def _settle(self, uid: AdapterUid) -> float | None:
        if uid in self._asked:
            self._asked.discard(uid)
            self._passed_over.clear()
        self._passed_over.discard(uid)
        own = self._closures.pop(uid, None)
        for victim in own.victims if own is not None else ():
            del self._closed[victim]
        for closure in self._closures.values():
            closure.exempt.discard(uid)
        return self._cold_since.pop(uid, None)

    def _close_one_for(self, uid: AdapterUid, now: float, running: Iterable[Sequence]) -> None:
        """Closes an adapter in favour of `uid`, and another one each time that did not help: pinned adapters
        keep their slot."""
        closure = self._closures.setdefault(uid, _Closure(now))
        if any(self._running[victim] for victim in closure.victims):
            closure.last_ran = now
        elif not closure.victims or now - closure.last_ran >= self._ageing_s:
            victim = self._choose_victim(running, self._closed.keys() | members(uid))
            if victim is not None:
                self._closed[victim] = closure
                closure.victims.add(victim)
                closure.exempt |= self._asked
                closure.last_ran = now

    @staticmethod
    def _choose_victim(running: Iterable[Sequence], spared: set[int]) -> int | None:
        """The running adapter whose last sequence ends after the fewest tokens. spared: not one of these."""
        remaining: dict[int, int] = {}
        for sequence in running:
            left = sequence.stop.max_tokens - sequence.num_output
            for uid in members(sequence.adapter_uid):
                if uid not in spared:
                    remaining[uid] = max(remaining.get(uid, 0), left)
        return min(remaining, key=lambda uid: (remaining[uid], uid), default=None)
