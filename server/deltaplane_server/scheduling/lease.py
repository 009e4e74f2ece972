"""The scheduler's view of a lease on adapter versions; the adapter manager's Lease fits it."""

from typing import Protocol

AdapterUid = int | tuple[tuple[int, float], ...]
"""Who answers: 0 is the base model; else the uid of an adapter version, above 0; or a composition, which adds
up the deltas of several: (uid of a version, weight) of each member, in order of uid."""

Slots = int | tuple[tuple[int, float], ...]
"""Where that is on the device: NO_SLOT, an adapter's slot, or (slot, weight) of each of a composition's."""


def members(uid: AdapterUid) -> tuple[int, ...]:
    """The adapter versions that answer: none for the base model."""
    if isinstance(uid, int):
        return (uid,) if uid else ()
    return tuple(member for member, _ in uid)


class AdapterLease(Protocol):
    """A request's hold on one adapter version, or on all those of a composition, from admission to the end of
    its stream.

    A lease keeps the versions from being forgotten. An *active* lease, whose sequence is part of steps, also
    keeps them in their slots: it is active for all or for none. All calls return at once; they are made by
    the engine thread.
    """

    @property
    def uid(self) -> AdapterUid:
        """Identity of what answers, unique in this process; never the base model's."""
        ...

    @property
    def slot(self) -> Slots | None:
        """Where that is while active, else None."""
        ...

    @property
    def resident(self) -> bool:
        """Whether activate() would answer a slot now. A hint: it may change at any time."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Whether a version cannot be loaded before active leases end, for they hold the slots or the rank
        pages that it needs; false while it is loading and where nobody asked for it."""
        ...

    def activate(self) -> Slots | None:
        """Holds the versions in their slots and returns these, or returns None, holds none, and sees to it
        that what is missing is loading (or waits for room). Idempotent while active.

        Errors: FailedPreconditionError when a version cannot be loaded.
        """
        ...

    def fork(self) -> "AdapterLease":
        """Another lease on the same versions, for another output of the same request."""
        ...

    def deactivate(self) -> None:
        """Lets the versions be evicted again, as far as this lease goes. Idempotent."""
        ...

    def release(self) -> None:
        """Ends the lease (and its activity). Idempotent."""
        ...
