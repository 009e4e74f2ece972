"""A request's hold on one adapter version, or on several whose deltas are added up."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltaplane_controlplane.errors import InternalError
from deltaplane_controlplane.versions import Version

if TYPE_CHECKING:
    from deltaplane_controlplane.residency import Residency

AdapterUid = int | tuple[tuple[int, float], ...]
"""Who answers: the uid of a version, or of a composition the (uid, weight) of each member in order of uid."""

Slots = int | tuple[tuple[int, float], ...]
"""Where that is: a version's slot, or the (slot, weight) of each member of a composition."""


@dataclass(frozen=True, slots=True)
class Member:
    """A version that a lease holds, and the factor of its delta.

    hit: whether it was resident when the lease was taken.
    """

    version: Version
    weight: float
    hit: bool


class Lease:
    """A hold on versions, from admission to the end of a stream (scheduling.lease.AdapterLease).

    It keeps them from being forgotten. Only while it is active does it keep them in their slots, all of them;
    from an `activate()` that answered None until one of those that ask for the same has had it, or until
    `deactivate()`, it *asks* (see Asks). All calls return at once and may come from any thread. An active
    lease may be deactivated or released only when no step under way uses its slots.

    uid: identity of what answers, unique in this process (see AdapterUid); a version of weight 1 alone is
        that version.
    members: in order of their names.
    versions: those of the members.
    """

    __slots__ = ("_released", "_residency", "_slots", "members", "uid", "versions")

    def __init__(self, residency: "Residency", terms: Iterable[tuple[Version, float]]) -> None:
        """Made by Residency.grant alone, with the monitor held. terms: versions and weights, at least one."""
        ordered = sorted(terms, key=lambda term: term[0].adapter.name)
        self.members = tuple(Member(version, weight, version.resident) for version, weight in ordered)
        self.versions = tuple(member.version for member in self.members)
        self.uid: AdapterUid = tuple(sorted((version.uid, weight) for version, weight in ordered))
        if len(self.members) == 1 and self.members[0].weight == 1:
            self.uid = self.versions[0].uid
        self._residency = residency
        self._slots: Slots | None = None
        self._released = False

    @property
    def is_composition(self) -> bool:
        """Whether it is more than one version, or one that has a weight."""
        return not isinstance(self.uid, int)

    @property
    def adapter(self) -> str:
        """The adapter's name; of several, their names joined by "+"."""
        return "+".join(version.adapter.name for version in self.versions)

    @property
    def slot(self) -> Slots | None:
        """Where it is while active, else None."""
        return self._slots

    @property
    def resident(self) -> bool:
        """Whether activate() would answer a slot now. A hint: it may change at any time."""
        return all(version.resident for version in self.versions)

    @property
    def waits_for_room(self) -> bool:
        """Whether it asks for versions of which one cannot be loaded before others give up slots or rank
        pages."""
        with self._residency.monitor:
            return self._residency.waits_for_room(self)

    def activate(self) -> Slots | None:
        """Holds all versions in their slots and answers these, or answers None, holds none, and sees to it
        that loads are under way or wait for room. Idempotent while active.

        Errors: FailedPreconditionError when a version cannot be loaded, UnavailableError when the manager is
        closed.
        """
        if self._slots is not None:
            return self._slots
        with self._residency.monitor:
            self._check_held()
            try:
                if self.resident:
                    self._residency.enter(self)
                    self._slots = self.place()
                else:
                    self._residency.ask(self)
            except Exception:
                self._residency.stop_asking(self)
                raise
            return self._slots

    def fork(self) -> "Lease":
        """Another lease on the same versions, for another output of the same request."""
        with self._residency.monitor:
            self._check_held()
            return self._residency.grant((member.version, member.weight) for member in self.members)

    def place(self) -> Slots:
        """The slots of its versions, which have one; the monitor is held."""
        placed = {v.uid: v.placement.slot for v in self.versions if v.placement is not None}
        if isinstance(self.uid, int):
            return placed[self.uid]
        return tuple((placed[uid], weight) for uid, weight in self.uid)

    def deactivate(self) -> None:
        """Stops using the versions, or asking for them. Idempotent."""
        with self._residency.monitor:
            self._stop()

    def release(self) -> None:
        """Ends the lease and its activity. Idempotent."""
        with self._residency.monitor:
            if not self._released:
                self._stop()
                self._released = True
                self._residency.give_back(self)

    def _stop(self) -> None:
        self._residency.stop_asking(self)
        if self._slots is not None:
            self._slots = None
            self._residency.leave(self)

    def _check_held(self) -> None:
        if self._released:
            names = ", ".join(map(str, self.versions))
            raise InternalError(f"the lease on {names} was released and is used again")
