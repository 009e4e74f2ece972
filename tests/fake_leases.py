"""An adapter manager over nothing: slots, loads that take a number of ticks, and the leases on them.

It keeps the rules that the scheduler relies on: who runs is not evicted, who was loaded on request is not
evicted before a lease that asked has had it, and room goes to whoever asked first.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from deltaplane_controlplane.errors import FailedPreconditionError


@dataclass(slots=True)
class _Version:
    """ticks_left: until the load under way arrives."""

    uid: int
    slot: int | None = None
    ticks_left: int = 0
    running: int = 0
    asking: int = 0
    protected: bool = False
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
        self._wanted: list[_Version] = []
        self._uses = 0

    def lease(self, uid: int) -> "FakeLease":
        with self.lock:
            self.num_leases += 1
            return FakeLease(self, self._versions.setdefault(uid, _Version(uid)))

    def load(self, uid: int) -> None:
        """Makes a version resident at once, as a pin or an administrator's load does."""
        with self.lock:
            version = self._versions.setdefault(uid, _Version(uid))
            self._want(version)
            version.ticks_left = 0
            version.protected = False
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
        assert not self._wanted
        assert not any(v.running or v.asking for v in self._versions.values())

    def activate(self, version: _Version) -> bool:
        if version.uid in self.failing:
            raise FailedPreconditionError(f"adapter {version.uid} cannot be loaded")
        if version.slot is None:
            self._want(version)
        if not version.resident:
            return False
        self._touch(version)
        version.running += 1
        version.protected = False
        return True

    def deactivate(self, version: _Version) -> None:
        version.running -= 1
        assert version.running >= 0
        self._place()

    def waits_for_room(self, version: _Version) -> bool:
        return version in self._wanted

    def abandon(self, version: _Version) -> None:
        """Nobody asks for it any more."""
        version.protected = False
        if version in self._wanted:
            self._wanted.remove(version)
        self._place()

    def _want(self, version: _Version) -> None:
        if version.slot is None and version not in self._wanted:
            self._wanted.append(version)
            self._place()

    def _place(self) -> None:
        while self._wanted:
            slot = self._find_room()
            if slot is None:
                return
            version = self._wanted.pop(0)
            version.slot = slot
            version.ticks_left = self.load_ticks
            version.protected = True
            self._touch(version)
            self.loads.append(version.uid)

    def _find_room(self) -> int | None:
        taken = {v.slot for v in self._versions.values()}
        for slot in range(self.num_slots):
            if slot not in taken:
                return slot
        idle = [
            v
            for v in self._versions.values()
            if v.resident and not v.running and not v.protected and v.uid not in self.pinned
        ]
        if not idle:
            return None
        victim = min(idle, key=lambda v: v.last_use)
        freed, victim.slot = victim.slot, None
        self.evictions.append(victim.uid)
        return freed

    def _touch(self, version: _Version) -> None:
        self._uses += 1
        version.last_use = self._uses


class FakeLease:
    """Fits AdapterLease."""

    def __init__(self, adapters: FakeAdapters, version: _Version) -> None:
        self._adapters = adapters
        self._version = version
        self._asks = False
        self._is_active = False
        self.is_released = False

    @property
    def uid(self) -> int:
        return self._version.uid

    @property
    def slot(self) -> int | None:
        return self._version.slot if self._is_active else None

    @property
    def resident(self) -> bool:
        return self._version.resident

    @property
    def waits_for_room(self) -> bool:
        with self._adapters.lock:
            return self._adapters.waits_for_room(self._version)

    def activate(self) -> int | None:
        with self._adapters.lock:
            assert not self.is_released, "a released lease is activated"
            if not self._is_active:
                self._is_active = self._adapters.activate(self._version)
                self._ask(not self._is_active)
            return self.slot

    def fork(self) -> "FakeLease":
        assert not self.is_released
        return self._adapters.lease(self.uid)

    def deactivate(self) -> None:
        with self._adapters.lock:
            if self._is_active:
                self._is_active = False
                self._adapters.deactivate(self._version)

    def release(self) -> None:
        with self._adapters.lock:
            if self.is_released:
                return
            self.deactivate()
            self.is_released = True
            self._adapters.num_leases -= 1
            self._ask(False)

    def _ask(self, asks: bool) -> None:
        if asks == self._asks:
            return
        self._asks = asks
        self._version.asking += 1 if asks else -1
        if not asks and self._version.asking == 0:
            self._adapters.abandon(self._version)
