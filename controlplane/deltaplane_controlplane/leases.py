"""A request's hold on one adapter version."""

from typing import TYPE_CHECKING

from deltaplane_controlplane.errors import InternalError
from deltaplane_controlplane.versions import Version

if TYPE_CHECKING:
    from deltaplane_controlplane.residency import Residency


class Lease:
    """A hold on one version, from admission to the end of a stream (scheduling.lease.AdapterLease).

    It keeps the version from being forgotten. Only while it is active does it keep the version in its slot;
    from an `activate()` that answered None until the next one, or until `deactivate()`, it *asks*: the
    version that is then loaded stays until one of those that ask has had it. All calls return at once and
    may come from any thread. An active lease may be deactivated or released only when no step under way
    uses its slot.

    hit: whether the version was resident when the lease was taken.
    """

    __slots__ = ("_asking", "_released", "_residency", "_slot", "_version", "hit")

    def __init__(self, residency: "Residency", version: Version) -> None:
        """Made by Residency.grant alone, with the monitor held."""
        self._residency = residency
        self._version = version
        self._slot: int | None = None
        self._asking = False
        self._released = False
        self.hit = version.resident

    @property
    def uid(self) -> int:
        """Identity of the version, unique in this process, above 0."""
        return self._version.uid

    @property
    def adapter(self) -> str:
        """The adapter's name."""
        return self._version.adapter.name

    @property
    def version(self) -> int:
        """The version's number."""
        return self._version.number

    @property
    def slot(self) -> int | None:
        """The slot while active, else None."""
        return self._slot

    @property
    def resident(self) -> bool:
        """Whether activate() would answer a slot now. A hint: it may change at any time."""
        return self._version.resident

    @property
    def waits_for_room(self) -> bool:
        """Whether the version is asked for and cannot be loaded before others give up slots or rank pages."""
        with self._residency.monitor:
            return self._residency.waits_for_room(self._version)

    @property
    def is_asking(self) -> bool:
        """Whether it waits for the version to become resident."""
        return self._asking

    @property
    def held(self) -> Version:
        """The manager's record of the version."""
        return self._version

    def activate(self) -> int | None:
        """Holds the version in its slot and answers the slot, or answers None and sees to it that a load is
        under way or waits for room. Idempotent while active.

        Errors: FailedPreconditionError when the version cannot be loaded, UnavailableError when the manager
        is closed.
        """
        if self._slot is not None:
            return self._slot
        with self._residency.monitor:
            self._check_held()
            try:
                if self._version.resident:
                    self._slot = self._residency.enter(self._version)
                else:
                    self._residency.demand(self._version)
            except Exception:
                self._stop_asking()
                raise
            if self._slot is None:
                self._start_asking()
            else:
                self._stop_asking()
            return self._slot

    def fork(self) -> "Lease":
        """Another lease on the same version, for another output of the same request."""
        with self._residency.monitor:
            self._check_held()
            return self._residency.grant(self._version)

    def deactivate(self) -> None:
        """Stops using the version, or asking for it. Idempotent."""
        with self._residency.monitor:
            self._stop()

    def release(self) -> None:
        """Ends the lease and its activity. Idempotent."""
        with self._residency.monitor:
            if not self._released:
                self._stop()
                self._released = True
                self._residency.give_back(self, self._version)

    def _start_asking(self) -> None:
        if not self._asking:
            self._asking = True
            self._residency.start_asking(self._version)

    def _stop_asking(self) -> None:
        if self._asking:
            self._asking = False
            self._residency.stop_asking(self._version)

    def _stop(self) -> None:
        self._stop_asking()
        if self._slot is not None:
            self._slot = None
            self._residency.leave(self._version)

    def _check_held(self) -> None:
        if self._released:
            raise InternalError(f"the lease on {self._version} was released and is used again")
