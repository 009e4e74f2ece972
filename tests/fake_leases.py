"""An adapter manager over nothing: slots, loads that take a number of ticks, and the leases on them.

It keeps the rules that the scheduler relies on: who runs is not evicted, who was loaded on request is not
evicted before a lease that asked has had it, room goes to whoever asked first, and so does what a composition
has gathered that asked later.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_server.scheduling.lease import AdapterUid, Slots, members


@dataclass(slots=True, eq=False)
class _Version:
    """ticks_left: until the load under way arrives."""

    uid: int
    slot: int | None = None
    ticks_left: int = 0
    running: int = 0
    last_use: int = 0

    @property
    def resident(self) -> bool:
        return self.slot is not None and self.ticks_left == 0


class FakeAdapters:
    """num_slots: on the device. load_ticks: how many calls of tick() a load takes.

    wake: called, with the lock held, when something changed.
    failing: versions that cannot be loaded. pinned: versions that are never evicted.
    evictions, loads: versions, in order.
    """

    def __init__(self, num_slots: int, *, load_ticks: int = 1) -> None:
        self.num_slots = num_slots
        self.load_ticks = load_ticks
        self.wake: Callable[[], None] = lambda: None
        self.failing: set[int] = set()
        self.pinned: set[int] = set()
        self.loads: list[int] = []
        self.evictions: list[int] = []
        self.num_leases = 0
        self.lock = threading.RLock()
        self._versions: dict[int, _Version] = {}
        self._asks: dict[AdapterUid, set[FakeLease]] = {}
        self._uses = 0

    def lease(self, uid: AdapterUid) -> "FakeLease":
        with self.lock:
            self.num_leases += 1
            return FakeLease(self, uid)

    def load(self, uid: int) -> None:
        """Makes a version resident at once, as a pin or an administrator's load does."""
        with self.lock:
            version = self.version(uid)
            if version.slot is None:
                self._load(version)
            version.ticks_left = 0
            assert version.resident

    def unpin(self, uid: int) -> None:
        with self.lock:
            self.pinned.discard(uid)
            self._place()

    def tick(self) -> None:
        """Loads go on."""
        with self.lock:
            for version in self._versions.values():
                if version.slot is not None and version.ticks_left > 0:
                    version.ticks_left -= 1
                    if version.ticks_left == 0:
                        self._place()
                        self.wake()

    def version(self, uid: int) -> _Version:
        return self._versions.setdefault(uid, _Version(uid))

    def occupant(self, slot: int) -> int:
        """The uid in a slot."""
        [version] = [v for v in self._versions.values() if v.slot == slot and v.resident]
        return version.uid

    def running(self, uid: int) -> int:
        return self._versions[uid].running

    def is_resident(self, uid: int) -> bool:
        return uid in self._versions and self._versions[uid].resident

    def check_integrity(self) -> None:
        with self.lock:
            placed = [v.slot for v in self._versions.values() if v.slot is not None]
            assert len(set(placed)) == len(placed) <= self.num_slots
            assert all(v.resident for v in self._versions.values() if v.running)

    def check_unused(self) -> None:
        """Asserts that every lease was released."""
        self.check_integrity()
        assert self.num_leases == 0
        assert not self._asks
        assert not any(version.running for version in self._versions.values())

    def activate(self, lease: "FakeLease") -> bool:
        failing = self.failing.intersection(members(lease.uid))
        if failing:
            self.stop_asking(lease)
            raise FailedPreconditionError(f"adapters {failing} cannot be loaded")
        if not lease.resident:
            self._asks.setdefault(lease.uid, set()).add(lease)
            self._place()
        if not lease.resident:
            return False
        self._asks.pop(lease.uid, None)
        for version in lease.versions:
            self._touch(version)
            version.running += 1
        self._place()
        return True

    def deactivate(self, lease: "FakeLease") -> None:
        for version in lease.versions:
            version.running -= 1
            assert version.running >= 0
        self._place()

    def waits_for_room(self, lease: "FakeLease") -> bool:
        return lease.uid in self._asks and any(version.slot is None for version in lease.versions)

    def stop_asking(self, lease: "FakeLease") -> None:
        asking = self._asks.get(lease.uid, set())
        if asking == {lease}:
            del self._asks[lease.uid]
            self._place()
        else:
            asking.discard(lease)

    def _place(self) -> None:
        """Begins the loads for which there is room."""
        for uid in self._asks:
            for version in map(self.version, members(uid)):
                if version.slot is None and version.uid not in self.failing:
                    self._load(version)

    def _load(self, version: _Version) -> None:
        slot = self._find_room(version)
        if slot is not None:
            version.slot = slot
            version.ticks_left = self.load_ticks
            self._touch(version)
            self.loads.append(version.uid)

    def _find_room(self, version: _Version) -> int | None:
        taken = {v.slot for v in self._versions.values()}
        for slot in range(self.num_slots):
            if slot not in taken:
                return slot
        kept = self.pinned.union(self._gathered_before(version), self._asks)
        idle = [v for v in self._versions.values() if v.resident and not v.running and v.uid not in kept]
        if not idle:
            return None
        victim = min(idle, key=lambda v: (v.uid in self._gathered(self._asks), v.last_use))
        freed, victim.slot = victim.slot, None
        self.evictions.append(victim.uid)
        return freed

    def _gathered_before(self, version: _Version) -> set[int]:
        """What compositions keep that asked for this version, or for others before it."""
        asks = list(self._asks)
        wanting = [place for place, uid in enumerate(asks) if version.uid in members(uid)]
        return self._gathered(asks[: wanting[0] + 1] if wanting else asks)

    @staticmethod
    def _gathered(asks: Iterable[AdapterUid]) -> set[int]:
        return {member for uid in asks if isinstance(uid, tuple) for member in members(uid)}

    def _touch(self, version: _Version) -> None:
        self._uses += 1
        version.last_use = self._uses


class FakeLease:
    """Fits AdapterLease."""

    def __init__(self, adapters: FakeAdapters, uid: AdapterUid) -> None:
        self.uid = uid
        self.versions = [adapters.version(member) for member in members(uid)]
        self._adapters = adapters
        self._is_active = False
        self.is_released = False

    @property
    def slot(self) -> Slots | None:
        if not self._is_active:
            return None
        slots = [version.slot for version in self.versions if version.slot is not None]
        if isinstance(self.uid, int):
            return slots[0]
        return tuple((slot, weight) for slot, (_, weight) in zip(slots, self.uid, strict=True))

    @property
    def resident(self) -> bool:
        return all(version.resident for version in self.versions)

    @property
    def waits_for_room(self) -> bool:
        with self._adapters.lock:
            return self._adapters.waits_for_room(self)

    def activate(self) -> Slots | None:
        with self._adapters.lock:
            assert not self.is_released, "a released lease is activated"
            if not self._is_active:
                self._is_active = self._adapters.activate(self)
            return self.slot

    def fork(self) -> "FakeLease":
        assert not self.is_released
        return self._adapters.lease(self.uid)

    def deactivate(self) -> None:
        with self._adapters.lock:
            self._adapters.stop_asking(self)
            if self._is_active:
                self._is_active = False
                self._adapters.deactivate(self)

    def release(self) -> None:
        with self._adapters.lock:
            if not self.is_released:
                self.deactivate()
                self.is_released = True
                self._adapters.num_leases -= 1
