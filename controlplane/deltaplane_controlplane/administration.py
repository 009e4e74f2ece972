"""Changes that administrators make to adapters."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import structlog

from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.drains import Drains
from deltaplane_controlplane.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    UnavailableError,
)
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.journal import Journal
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.pins import check_pin
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.registry import Registry, no_version, not_found
from deltaplane_controlplane.reports import Reports
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.versions import NO_LABELS, Adapter, Tier, Version
from deltaplane_controlplane.views import AdapterView

_log = structlog.get_logger(__name__)


class Administration:
    """Changes of the registry, one at a time. Each is one transaction of the catalogue, which is on disk
    before the change shows; the monitor is not held meanwhile.

    Nothing here reads an adapter's files: manifests come checked.

    release: told of a folder that a version has left for another with the same files.
    """

    def __init__(
        self,
        *,
        monitor: Monitor,
        registry: Registry,
        residency: Residency,
        catalogue: Catalogue,
        journal: Journal,
        reports: Reports,
        release: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self._monitor = monitor
        self._registry = registry
        self._residency = residency
        self._catalogue = catalogue
        self._journal = journal
        self._reports = reports
        self._release = release
        self._clock = clock
        self._drains = Drains(monitor, residency)
        self._turn = threading.Lock()
        self._closed = False

    def admit(
        self,
        name: str,
        manifest: AdapterManifest,
        labels: Mapping[str, str],
        *,
        replace: bool = False,
        validate_only: bool = False,
    ) -> AdapterView:
        """Makes checked files known: as a new adapter, as the one that is there, or as what heals it.

        replace: other files take over instead of being refused.
        Errors: AlreadyExistsError.
        """
        with self._changing():
            with self._monitor:
                adapter = self._registry.find_registered(name)
                failed = adapter is not None and adapter.current.failure is not None
                same = adapter is not None and adapter.current.manifest.digest == manifest.digest
                if adapter is not None and same and not failed:
                    return self._reports.view(adapter)
                if adapter is not None and not (same or failed or replace):
                    raise _taken(adapter)
            if validate_only:
                return self._reports.preview(name, manifest, labels)
            if adapter is None:
                return self._add(name, manifest, labels)
            if same:
                return self._amend(adapter, manifest, adapter.labels)
            return self._replace(adapter, manifest, labels, keep=False)

    def change(
        self,
        name: str,
        manifest: AdapterManifest | None,
        labels: Mapping[str, str] | None,
        *,
        etag: str,
        keep: bool,
        validate_only: bool,
    ) -> AdapterView:
        """Changes an adapter to checked files and to labels; None leaves them as they are.

        keep: whether the files that were current may be rolled back to.
        Errors: NotFoundError, AbortedError.
        """
        with self._changing():
            adapter = self.find(name, etag)
            manifest = manifest or adapter.current.manifest
            labels = adapter.labels if labels is None else labels
            if validate_only:
                return self._reports.preview(name, manifest, labels)
            if manifest.digest == adapter.current.manifest.digest:
                return self._amend(adapter, manifest, labels)
            return self._replace(adapter, manifest, labels, keep=keep)

    def delete(self, name: str, *, etag: str, drain_timeout_s: float, force: bool) -> AdapterView:
        """Lets an adapter drain, or sets a new timeout where it drains already.

        Errors: NotFoundError, AbortedError, FailedPreconditionError.
        """
        with self._changing():
            with self._monitor:
                adapter = self._registry.find(name)
                if adapter is None:
                    raise not_found(name)
                _match_etag(adapter, etag)
                if adapter.pinned_tier is not None and not force:
                    raise _pinned(adapter)
            again = adapter.deleted
            revision = adapter.revision if again else self._catalogue.delete(name)
            with self._monitor:
                adapter.mark_deleted(revision, self._clock())
                self._journal.record(EventType.DRAINING, adapter.current, "deleted")
                view = self._reports.view(adapter)
                self._drains.begin(adapter, drain_timeout_s, again=again)
                return view

    def rollback(self, name: str, *, number: int | None, etag: str) -> AdapterView:
        """Makes a kept version current: of this number, or the highest below the current one.

        Errors: NotFoundError, AbortedError.
        """
        with self._changing():
            adapter = self.find(name, etag)
            target = _rollback_target(adapter, number)
            former = adapter.current
            if target is former:
                return self._reports.get(name)
            now = self._clock()
            revision = self._catalogue.set_current(name, target.number, now)
            with self._monitor:
                target.failure = None
                adapter.replace_current(target)
                adapter.mark_changed(revision, now)
                self._journal.record(EventType.UPDATED, target, f"rolled back from version {former.number}")
                self._residency.stop_keeping(former)
                self._follow_pin(adapter)
                return self._reports.view(adapter)

    def hold_for_pin(self, name: str, tier: Tier) -> tuple[Version, Future[None]]:
        """Begins to bring the current version to a tier, and keeps it there until `end_hold`.

        Errors: NotFoundError, FailedPreconditionError; the answer's: as Residency.start_load.
        """
        with self._monitor:
            adapter = self._registry.get(name)
            self._check_pin(adapter, tier)
            arrival = self._residency.start_load(adapter.current, tier)
            adapter.current.holds += 1
            return adapter.current, arrival

    def end_hold(self, version: Version) -> None:
        with self._monitor:
            self._residency.end_hold(version)

    def set_pin(self, name: str, tier: Tier | None) -> AdapterView:
        """Pins an adapter, or unpins it. Errors: NotFoundError, FailedPreconditionError."""
        with self._changing():
            with self._monitor:
                adapter = self._registry.get(name)
                if adapter.pinned_tier is tier:
                    return self._reports.view(adapter)
                if tier is not None:
                    self._check_pin(adapter, tier)
            now = self._clock()
            revision = self._catalogue.set_pin(name, tier, now)
            with self._monitor:
                adapter.pinned_tier = tier
                adapter.mark_changed(revision, now)
                self._journal.record(EventType.PINNED, adapter.current, "" if tier else "unpinned", tier=tier)
                self._residency.stop_keeping(adapter.current)
                self._follow_pin(adapter)
                return self._reports.view(adapter)

    def find(self, name: str, etag: str = "") -> Adapter:
        """A registered adapter. Errors: NotFoundError, AbortedError (the etag, if there is one)."""
        with self._monitor:
            adapter = self._registry.get(name)
            _match_etag(adapter, etag)
            return adapter

    def restore_pins(self) -> None:
        """Begins to bring all pinned adapters to where they are pinned; drops pins that are too many now."""
        with self._monitor:
            pinned = [adapter for adapter in self._registry if adapter.pinned_tier is not None]
        for adapter in pinned:
            try:
                with self._monitor:
                    if adapter.pinned_tier is not None:
                        self._check_pin(adapter, adapter.pinned_tier)
                        self._follow_pin(adapter)
            except FailedPreconditionError as error:
                _log.warning("adapter.pin_dropped", adapter=adapter.name, reason=error.message)
                self.set_pin(adapter.name, None)

    def close(self) -> None:
        """Refuses further changes. Idempotent."""
        with self._turn:
            self._closed = True
            self._drains.close()
            self._catalogue.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._turn:
            if self._closed:
                raise UnavailableError("the server is shutting down")
            yield

    def _add(self, name: str, manifest: AdapterManifest, labels: Mapping[str, str]) -> AdapterView:
        now = self._clock()
        number, revision = self._catalogue.register(name, manifest, labels, now)
        with self._monitor:
            adapter = self._registry.add(name, number, manifest, _own(labels), now, revision)
            self._journal.record(EventType.REGISTERED, adapter.current)
            return self._reports.view(adapter)

    def _amend(self, adapter: Adapter, manifest: AdapterManifest, labels: Mapping[str, str]) -> AdapterView:
        """Changes labels, and where the same files are; a FAILED adapter may be loaded again."""
        now = self._clock()
        version = adapter.current
        revision = self._catalogue.change(adapter.name, version.number, manifest, labels, now)
        with self._monitor:
            reason = "" if version.failure is None else "healed"
            if version.manifest.source != manifest.source and version.load is None:
                self._monitor.after(self._release, version.manifest.source)
            version.manifest = manifest
            version.failure = None
            adapter.labels = _own(labels)
            adapter.mark_changed(revision, now)
            self._journal.record(EventType.UPDATED, version, reason)
            self._follow_pin(adapter)
            return self._reports.view(adapter)

    def _replace(
        self, adapter: Adapter, manifest: AdapterManifest, labels: Mapping[str, str], *, keep: bool
    ) -> AdapterView:
        """Makes new files current."""
        now = self._clock()
        number, revision = self._catalogue.add_version(adapter.name, manifest, labels, now, keep=keep)
        with self._monitor:
            former = adapter.current
            version = self._registry.new_version(adapter, number, manifest)
            adapter.replace_current(version)
            adapter.labels = _own(labels)
            adapter.mark_changed(revision, now)
            self._journal.record(EventType.UPDATED, version, f"takes over from version {former.number}")
            self._residency.stop_keeping(former)
            if not keep:
                self._residency.retire(former, f"version {number} takes over")
            self._follow_pin(adapter)
            return self._reports.view(adapter)

    def _check_pin(self, adapter: Adapter, tier: Tier) -> None:
        check_pin(adapter, tier, self._registry, self._residency.host, self._residency.device)

    def _follow_pin(self, adapter: Adapter) -> None:
        """Has the current version of a pinned adapter brought to its tier."""
        if adapter.pinned_tier is not None:
            self._residency.keep_in(adapter.current, adapter.pinned_tier)


def _own(labels: Mapping[str, str]) -> Mapping[str, str]:
    return dict(labels) if labels else NO_LABELS


def _match_etag(adapter: Adapter, etag: str) -> None:
    if etag and etag != adapter.etag:
        raise AbortedError(
            f"etag: adapter {adapter.name!r} has {adapter.etag!r}, not {etag!r}: it was changed meanwhile; "
            "get it again and decide anew"
        )


def _rollback_target(adapter: Adapter, number: int | None) -> Version:
    if number is not None:
        target = adapter.kept(number)
    else:
        below = [v for v in adapter.others if not v.draining and v.number < adapter.current.number]
        target = below[-1] if below else None
    if target is None:
        raise no_version(adapter, number)
    return target


def _taken(adapter: Adapter) -> AlreadyExistsError:
    version = adapter.current
    return AlreadyExistsError(
        f"adapter {adapter.name!r} is registered with other files (version {version.number}, SHA-256 "
        f"{version.manifest.digest}): update it instead",
        reason="ADAPTER_ALREADY_EXISTS",
        metadata={"adapter": adapter.name, "digest": version.manifest.digest},
    )


def _pinned(adapter: Adapter) -> FailedPreconditionError:
    tier = adapter.pinned_tier.name if adapter.pinned_tier else ""
    return FailedPreconditionError(
        f"adapter {adapter.name!r} is pinned in tier {tier}: unpin it first, or force",
        reason="ADAPTER_PINNED",
        metadata={"adapter": adapter.name},
    )
