"""Where adapters, and versions that are kept, are pinned, as administrators change it."""

from collections.abc import Callable
from concurrent.futures import Future

import structlog

from deltaplane_controlplane.books import Books
from deltaplane_controlplane.errors import FailedPreconditionError
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.pins import check_pin
from deltaplane_controlplane.registry import match_etag, no_version
from deltaplane_controlplane.turn import nothing
from deltaplane_controlplane.versions import Adapter, Tier, Version
from deltaplane_controlplane.views import AdapterView

_log = structlog.get_logger(__name__)


class Pinning:
    """Changes of pins, in turn with other changes (see Administration), and what follows from them.

    A pin of an adapter holds its current version, whichever that is; a pin of a version holds it while it is
    kept beside the current one.
    """

    def __init__(self, books: Books) -> None:
        self._monitor = books.monitor
        self._registry = books.registry
        self._residency = books.residency
        self._catalogue = books.catalogue
        self._journal = books.journal
        self._reports = books.reports
        self._turn = books.turn
        self._clock = books.clock

    def hold(self, name: str, tier: Tier, *, number: int | None, etag: str) -> tuple[Version, Future[None]]:
        """Begins to bring a version to a tier, and keeps it there until `end_hold`.

        Errors: NotFoundError, FailedPreconditionError, AbortedError; the answer's: as Residency.start_load.
        """
        with self._monitor:
            version = self._version_to_pin(name, tier, number, etag)
            arrival = self._residency.start_load(version, tier)
            version.holds += 1
            return version, arrival

    def end_hold(self, version: Version) -> None:
        with self._monitor:
            self._residency.end_hold(version)

    def check(self, name: str, tier: Tier, *, number: int | None, etag: str) -> AdapterView:
        """The adapter, if it may be pinned. Errors: as `pin`."""
        with self._monitor:
            return self._reports.view(self._version_to_pin(name, tier, number, etag).adapter)

    def pin(
        self, name: str, tier: Tier, *, number: int | None, etag: str, check: Callable[[], None] = nothing
    ) -> tuple[AdapterView, Version, Future[None]]:
        """Pins an adapter or, with a number, a kept version. Answers the adapter, the version that is to be
        brought to the tier, and when it has arrived (see Residency.keep_in).

        check: raises CancelledError when nobody wants it any more; called last before the change.
        Errors: NotFoundError, FailedPreconditionError, AbortedError, CancelledError.
        """
        with self._turn:
            with self._monitor:
                version = self._version_to_pin(name, tier, number, etag)
            check()
            view = self._set_pins(version, number, version.pins | {tier}, "", tier)
            with self._monitor:
                return view, version, self._residency.keep_in(version, tier)

    def unpin(
        self, name: str, tier: Tier | None, *, number: int | None, etag: str, validate_only: bool
    ) -> AdapterView:
        """Takes the pin of one tier, or all, from an adapter or from a kept version.

        Errors: NotFoundError, AbortedError.
        """
        with self._turn:
            with self._monitor:
                version = self._pinnable(name, number, etag)
                if validate_only:
                    return self._reports.view(version.adapter)
            return self._set_pins(version, number, version.pins - set(Tier if tier is None else (tier,)))

    def restore(self) -> None:
        """Begins to bring all pinned adapters to where they are pinned; drops pins that are too many now."""
        with self._monitor:
            pinned = [(v, tier) for tier in Tier for v in self._registry.pinned_in(tier)]
        for version, tier in pinned:
            try:
                with self._monitor:
                    if tier in version.pins:
                        self._check_pin(version, tier)
                        self._residency.keep_in(version, tier)
            except FailedPreconditionError as error:
                _log.warning("adapter.pin_dropped", adapter=str(version), reason=error.message)
                number = None if version.adapter.current is version else version.number
                self.unpin(version.adapter.name, tier, number=number, etag="", validate_only=False)

    def settle(self, adapter: Adapter, *changed: Version) -> None:
        """Has the current version brought to where its adapter is pinned; the pins of others have changed.
        The monitor is held."""
        for version in changed:
            self._residency.stop_keeping(version)
        for tier in adapter.pins:
            self._residency.keep_in(adapter.current, tier)

    def _pinnable(self, name: str, number: int | None, etag: str) -> Version:
        """The current version of an adapter, or a kept one; the monitor is held.

        Errors: NotFoundError, AbortedError, FailedPreconditionError (the number of the current version: the
        adapter is what is pinned).
        """
        adapter = self._registry.get(name)
        match_etag(adapter, etag)
        if number is None:
            return adapter.current
        if number == adapter.current.number:
            raise _is_current(adapter)
        version = adapter.kept(number)
        if version is None:
            raise no_version(adapter, number)
        return version

    def _version_to_pin(self, name: str, tier: Tier, number: int | None, etag: str) -> Version:
        """Errors: as `_pinnable`, and FailedPreconditionError (too much is pinned there)."""
        version = self._pinnable(name, number, etag)
        if tier not in version.pins:
            self._check_pin(version, tier)
        return version

    def _check_pin(self, version: Version, tier: Tier) -> None:
        pinned = [v for v in self._registry.pinned_in(tier) if v is not version]
        check_pin(version, tier, pinned, self._residency.host, self._residency.device)

    def _set_pins(
        self,
        version: Version,
        number: int | None,
        pins: frozenset[Tier],
        reason: str = "unpinned",
        tier: Tier | None = None,
    ) -> AdapterView:
        """Writes the pins of an adapter or, with a number, of a kept version, if they are others."""
        adapter, now = version.adapter, self._clock()
        if pins == version.pins:
            with self._monitor:
                return self._reports.view(adapter)
        revision = self._catalogue.set_pins(adapter.name, number, pins, now)
        with self._monitor:
            if number is None:
                adapter.pins = pins
            else:
                version.kept_pins = pins
            self._registry.note_pins(adapter)
            adapter.mark_changed(revision, now)
            self._journal.record(EventType.PINNED, version, reason, tier=tier)
            self._residency.stop_keeping(version)
            return self._reports.view(adapter)


def _is_current(adapter: Adapter) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"version {adapter.current.number} of adapter {adapter.name!r} is the current one, which stays where "
        "the adapter is pinned: leave the version out",
        reason="VERSION_IS_CURRENT",
        metadata={"adapter": adapter.name},
    )
