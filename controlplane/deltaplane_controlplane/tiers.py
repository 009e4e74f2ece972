"""The two bounded tiers: host memory, in bytes, and the device, in slots and rank pages.

They only keep the books: who is where, who may go, who goes first.
"""

from collections.abc import Iterable
from itertools import chain

from deltaplane_controlplane.lru import LruOrder, choose_victims
from deltaplane_controlplane.ports import HostAdapter
from deltaplane_controlplane.rank_pages import RankPageAllocator
from deltaplane_controlplane.versions import Placement, Tier, Version


class HostTier:
    """Packed adapters in host memory, together at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.order: LruOrder[Version] = LruOrder()

    @staticmethod
    def is_evictable(version: Version) -> bool:
        """Whether nothing needs the copy: no load under way, nobody asking, no hold, no pin here."""
        return not (version.load is not None or version.asking or version.holds or Tier.HOST in version.pins)

    def find_room(self, nbytes: int) -> list[Version] | None:
        """Versions whose going makes room; empty where there is room, None where there cannot be."""
        shortage = (self.used_bytes + nbytes - self.max_bytes,)
        return choose_victims(filter(self.is_evictable, self.order), shortage, _host_gain)

    def add(self, version: Version, adapter: HostAdapter) -> None:
        version.host = adapter
        self.used_bytes += adapter.nbytes
        self.order.touch(version)

    def remove(self, version: Version) -> None:
        assert version.host is not None
        self.used_bytes -= version.host.nbytes
        version.host = None
        self.order.remove(version)

    @property
    def held_bytes(self) -> int:
        """Bytes of what cannot be evicted."""
        return sum(v.host.nbytes for v in self.order if v.host is not None and not self.is_evictable(v))

    def check_integrity(self, versions: set[Version]) -> None:
        held = [v for v in versions if v.host is not None]
        assert set(self.order) == set(held), "the host order and the host copies differ"
        assert self.used_bytes == sum(v.host.nbytes for v in held if v.host is not None)
        assert 0 <= self.used_bytes <= self.max_bytes


class DeviceTier:
    """Slots of the device and the rank pages bound to them.

    occupants: the version of each slot, arrived or on its way; None where the slot is free.
    order: the resident ones, least recently used first.
    """

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.occupants: list[Version | None] = [None] * num_slots
        self.pages = RankPageAllocator(num_pages)
        self.order: LruOrder[Version] = LruOrder()

    @property
    def num_slots(self) -> int:
        return len(self.occupants)

    @property
    def num_free_slots(self) -> int:
        return self.occupants.count(None)

    @staticmethod
    def is_in_use(version: Version) -> bool:
        """Whether it must stay: a running sequence, a lease it was loaded for, a hold, a pin here."""
        return bool(version.running or version.protected or version.holds or Tier.DEVICE in version.pins)

    def is_evictable(self, version: Version) -> bool:
        """Whether nothing uses it, nor gathers it for a composition."""
        return not (version.claims or self.is_in_use(version))

    @property
    def evictable(self) -> list[Version]:
        """Those that may go, in the order in which they go."""
        return [v for v in self.order if self.is_evictable(v)]

    def eviction_position(self, version: Version) -> int | None:
        """The place of a version in the order in which they go, from 0; None where it may not go."""
        may_go = version.resident and self.is_evictable(version)
        return self.evictable.index(version) if may_go else None

    def eviction_order(self) -> dict[Version, int]:
        """The place of each that may go in the order in which they go, from 0."""
        return {version: position for position, version in enumerate(self.evictable)}

    @property
    def num_pinned_pages(self) -> int:
        return sum(
            len(v.placement.pages) for v in self.order if v.placement is not None and Tier.DEVICE in v.pins
        )

    @property
    def available(self) -> tuple[int, int]:
        """Slots and pages that hold nothing, or what may be evicted."""
        placements = [v.placement for v in self.evictable if v.placement is not None]
        num_pages = sum(len(placement.pages) for placement in placements)
        return self.num_free_slots + len(placements), self.pages.num_free + num_pages

    def find_room(self, num_pages: int, claimed: Iterable[Version] = ()) -> list[Version] | None:
        """Versions whose going makes room for one of `num_pages`; None where there cannot be.

        claimed: that may go too, after those which are evictable.
        """
        shortage = (1 - self.num_free_slots, num_pages - self.pages.num_free)
        taken = (v for v in claimed if v.resident and not self.is_in_use(v))
        return choose_victims(chain(filter(self.is_evictable, self.order), taken), shortage, _device_gain)

    def reserve(self, version: Version) -> Placement:
        """Takes the first free slot and pages, which must be there, for a version on its way."""
        slot = self.occupants.index(None)
        version.placement = Placement(slot, self.pages.allocate(version.num_pages))
        self.occupants[slot] = version
        return version.placement

    def publish(self, version: Version) -> None:
        """The version has arrived at its place."""
        version.resident = True
        self.order.touch(version)

    def remove(self, version: Version) -> int:
        """Frees the place of a version, arrived or not, and answers its slot."""
        assert version.placement is not None
        slot = version.placement.slot
        self.pages.free(version.placement.pages)
        self.occupants[slot] = None
        version.placement = None
        if version.resident:
            version.resident = version.protected = False
            self.order.remove(version)
        return slot

    def check_integrity(self, versions: set[Version]) -> None:
        placed = {v: v.placement for v in versions if v.placement is not None}
        occupants = [v for v in self.occupants if v is not None]
        assert len(occupants) == len(placed)
        for version, placement in placed.items():
            assert self.occupants[placement.slot] is version
            assert len(placement.pages) == version.num_pages
            assert version.resident or version.load is not None, f"{version} holds a slot without a load"
        self.pages.check_integrity(page for p in placed.values() for page in p.pages)
        assert set(self.order) == {v for v in versions if v.resident}, "the device order is off"
        assert all(v in placed for v in self.order)


def _host_gain(version: Version) -> tuple[int]:
    return (version.host.nbytes if version.host is not None else 0,)


def _device_gain(version: Version) -> tuple[int, int]:
    return (1, len(version.placement.pages) if version.placement is not None else 0)
