"""The scheduler's view of a lease on an adapter version; the adapter manager's Lease fits it."""

from typing import Protocol


class AdapterLease(Protocol):
    """A request's hold on one adapter version, from admission to the end of its stream.

    A lease keeps the version from being forgotten. An *active* lease, whose sequence is part of steps,
    also keeps it in its slot. Both calls return at once; they are made by the engine thread.
    """

    @property
    def uid(self) -> int:
        """Identity of the version, unique in this process, above 0."""
        ...

    @property
    def slot(self) -> int | None:
        """The slot while active, else None."""
        ...

    @property
    def resident(self) -> bool:
        """Whether activate() would answer a slot now. A hint: it may change at any time."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Whether the version cannot be loaded before active leases end, for they hold the slots or the rank
        pages that it needs; false while it is loading and where nobody asked for it."""
        ...

    def activate(self) -> int | None:
        """Holds the version in its slot and returns the slot, or returns None and sees to it that a load is
        under way (or waits for room). Idempotent while active.

        Errors: FailedPreconditionError when the version cannot be loaded.
        """
        ...

    def fork(self) -> "AdapterLease":
        """Another lease on the same version, for another output of the same request."""
        ...

    def deactivate(self) -> None:
        """Lets the version be evicted again, as far as this lease goes. Idempotent."""
        ...

    def release(self) -> None:
        """Ends the lease (and its activity). Idempotent."""
        ...
