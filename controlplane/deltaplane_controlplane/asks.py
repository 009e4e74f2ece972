"""What requests wait for: versions that are to be on the device, in the order in which they were asked
for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltaplane_controlplane.versions import Version

if TYPE_CHECKING:
    from deltaplane_controlplane.leases import AdapterUid, Lease


@dataclass(slots=True)
class _Ask:
    """versions: that are to be resident at the same time. leases: that wait for it."""

    versions: tuple[Version, ...]
    is_composition: bool
    leases: set["Lease"] = field(default_factory=set)


class Asks:
    """By uid of the leases, those that were asked for first before the others. Guarded by the monitor.

    An ask ends when one of its leases has had what it asks for, or when none asks any more. Until then, a
    composition has a claim on all of its versions (Version.claims), so that those which are resident wait for
    the others. Two that each hold what the other needs would wait for ever: so what is gathered goes to
    whoever asked earlier, where that one cannot have enough otherwise.
    """

    def __init__(self) -> None:
        self._asks: dict[AdapterUid, _Ask] = {}
        self._num_compositions = 0

    def __bool__(self) -> bool:
        return bool(self._asks)

    def __contains__(self, uid: "AdapterUid") -> bool:
        return uid in self._asks

    def __iter__(self) -> Iterator[Version]:
        """All versions that are asked for, in order; one may come more than once."""
        for ask in self._asks.values():
            yield from ask.versions

    def leases(self) -> Iterator["Lease"]:
        """All that ask."""
        for ask in self._asks.values():
            yield from ask.leases

    def add(self, lease: "Lease") -> None:
        """A lease waits for its versions. Idempotent."""
        ask = self._asks.get(lease.uid)
        if ask is None:
            ask = self._asks[lease.uid] = _Ask(lease.versions, lease.is_composition)
            self._claim(ask, +1)
        if lease not in ask.leases:
            ask.leases.add(lease)
            for version in ask.versions:
                version.asking += 1

    def discard(self, lease: "Lease") -> bool:
        """It waits no longer; answers whether this ends the ask. Idempotent."""
        ask = self._asks.get(lease.uid)
        if ask is None or lease not in ask.leases:
            return False
        if len(ask.leases) == 1:
            self.end(lease.uid)
            return True
        ask.leases.remove(lease)
        for version in ask.versions:
            version.asking -= 1
        return False

    def end(self, uid: "AdapterUid") -> bool:
        """Nobody asks any more; answers whether anybody did."""
        ask = self._asks.pop(uid, None)
        if ask is None:
            return False
        for version in ask.versions:
            version.asking -= len(ask.leases)
            version.protected = version.protected and ask.is_composition
        self._claim(ask, -1)
        return True

    def may_go_for(self, version: Version) -> list[Version]:
        """What only compositions that were asked for later than `version` claim, the latest first."""
        if not self._num_compositions:
            return []
        asks = iter(self._asks.values())
        kept: set[Version] = set()
        for ask in asks:
            if ask.is_composition:
                kept.update(ask.versions)
            if version in ask.versions:
                break
        later = [other for ask in asks if ask.is_composition for other in ask.versions if other not in kept]
        return list(dict.fromkeys(reversed(later)))

    def check_integrity(self, versions: set[Version]) -> None:
        for version in versions:
            asks = [ask for ask in self._asks.values() if version in ask.versions]
            assert version.asking == sum(len(ask.leases) for ask in asks), f"{version} is asked for"
            assert version.claims == sum(ask.is_composition for ask in asks), f"{version} is claimed"
            assert not version.protected or version.uid in self._asks, f"{version} is protected for nobody"
        assert all(ask.leases for ask in self._asks.values())
        assert self._num_compositions == sum(ask.is_composition for ask in self._asks.values())

    def _claim(self, ask: _Ask, change: int) -> None:
        if ask.is_composition:
            self._num_compositions += change
            for version in ask.versions:
                version.claims += change
