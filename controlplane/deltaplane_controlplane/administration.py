"""Which adapters and versions there are, as administrators change it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from deltaplane_controlplane.books import Books
from deltaplane_controlplane.drains import Drains
from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    DeltaplaneError,
    FailedPreconditionError,
)
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.futures import done
from deltaplane_controlplane.pinning import Pinning
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.registry import is_fetching, match_etag, no_version, not_found
from deltaplane_controlplane.turn import nothing
from deltaplane_controlplane.versions import NO_LABELS, Adapter, Version, highest
from deltaplane_controlplane.views import AdapterView


class Administration:
    """Changes of which adapters and versions there are, one at a time. Each is one transaction of the
    catalogue, which is on disk before the change shows; the monitor is not held meanwhile.

    Nothing here reads an adapter's files: manifests come checked.

    release: told of a folder that a version has left for another with the same files.
    """

    def __init__(self, books: Books, pinning: Pinning, release: Callable[[str], object]) -> None:
        self._monitor = books.monitor
        self._registry = books.registry
        self._residency = books.residency
        self._catalogue = books.catalogue
        self._journal = books.journal
        self._reports = books.reports
        self._turn = books.turn
        self._clock = books.clock
        self._pinning = pinning
        self._release = release
        self._drains = Drains(books.monitor, books.residency)

    def admit(
        self,
        name: str,
        manifest: AdapterManifest,
        labels: Mapping[str, str],
        *,
        replace: bool = False,
        validate_only: bool = False,
        check: Callable[[], None] = nothing,
    ) -> AdapterView:
        """Makes checked files known: as a new adapter, as the one that is there, or as what heals it.

        replace: other files take over instead of being refused.
        check: raises CancelledError when nobody wants it any more; called last before the change.
        Errors: AlreadyExistsError, CancelledError.
        """
        with self._turn:
            check()
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
        check: Callable[[], None] = nothing,
    ) -> AdapterView:
        """Changes an adapter to checked files and to labels; None leaves them as they are.

        keep: whether the files that were current may be rolled back to. check: as in `admit`.
        Errors: NotFoundError, AbortedError, CancelledError.
        """
        with self._turn:
            check()
            adapter = self.find(name, etag)
            manifest = manifest or adapter.current.manifest
            labels = adapter.labels if labels is None else labels
            if validate_only:
                return self._reports.preview(name, manifest, labels)
            if manifest.digest == adapter.current.manifest.digest:
                return self._amend(adapter, manifest, labels)
            return self._replace(adapter, manifest, labels, keep=keep)

    def delete(
        self, name: str, *, etag: str, drain_timeout_s: float, force: bool, validate_only: bool
    ) -> tuple[AdapterView, Future[AdapterView]]:
        """Lets an adapter drain, or sets a new timeout where it drains already. Answers the adapter, and in
        the end how it was when its last version went.

        Errors: NotFoundError, AbortedError, FailedPreconditionError.
        """
        with self._turn:
            with self._monitor:
                adapter = self._registry.find(name)
                if adapter is None:
                    raise not_found(name)
                if adapter.fetching:
                    raise is_fetching(name)
                match_etag(adapter, etag)
                if adapter in self._registry.with_pins and not force:
                    raise _pinned(adapter)
                if validate_only:
                    view = self._reports.view(adapter)
                    return view, done(view)
            again = adapter.deleted
            revision = adapter.revision if again else self._catalogue.delete(name)
            with self._monitor:
                adapter.mark_deleted(revision, self._clock())
                self._registry.note_pins(adapter)
                self._journal.record(EventType.DRAINING, adapter.current, "deleted")
                view = self._reports.view(adapter)
                return view, self._drains.begin(adapter, view, drain_timeout_s, again=again)

    def note_gone(self, version: Version) -> None:
        """A version is gone, and out of the registry. The monitor is held."""
        self._drains.note_gone(version, self._reports.view(version.adapter))

    def rollback(self, name: str, *, number: int | None, etag: str, validate_only: bool) -> AdapterView:
        """Makes a kept version current: of this number, or the highest below the current one.

        Errors: NotFoundError, AbortedError.
        """
        with self._turn:
            adapter = self.find(name, etag)
            target = _rollback_target(adapter, number)
            former = adapter.current
            if validate_only:
                return self._reports.preview(name, target.manifest, adapter.labels)
            if target is former:
                return self._reports.get(name)
            now = self._clock()
            revision = self._catalogue.set_current(name, target.number, now)
            with self._monitor:
                target.failure = None
                adapter.replace_current(target)
                adapter.mark_changed(revision, now)
                self._registry.note_pins(adapter)
                self._journal.record(EventType.UPDATED, target, f"rolled back from version {former.number}")
                self._pinning.settle(adapter, former, target)
                return self._reports.view(adapter)

    def begin_fetch(self, name: str, source: str) -> Callable[[DeltaplaneError | None], None]:
        """Shows that an adapter's files are on their way. The answer is to be called at the end, with the
        error if there was one."""
        with self._monitor:
            fetched = self._registry.begin_fetch(name, source, self._clock())
            adapter = fetched or self._registry.find(name)
            if adapter is not None:
                self._journal.record(EventType.FETCHING, adapter.current, source)
        return partial(self._end_fetch, name, fetched)

    def find(self, name: str, etag: str = "") -> Adapter:
        """A registered adapter. Errors: NotFoundError, AbortedError (the etag, if there is one)."""
        with self._monitor:
            adapter = self._registry.get(name)
            match_etag(adapter, etag)
            return adapter

    def close(self) -> None:
        """Refuses further changes. Idempotent."""
        with self._turn.last():
            self._drains.close()
            self._catalogue.close()

    def _end_fetch(self, name: str, fetched: Adapter | None, error: DeltaplaneError | None) -> None:
        """fetched: what was shown, unless the name was taken."""
        reason = "" if error is None else f"not fetched: {error.message}"
        with self._monitor:
            if fetched is not None and self._registry.end_fetch(fetched):
                self._journal.record(EventType.DELETED, fetched.current, reason)
            elif error is not None and (adapter := self._registry.find_registered(name)) is not None:
                self._journal.record(EventType.FAILED, adapter.current, reason)

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
            if version.manifest.path != manifest.path and version.load is None:
                self._monitor.after(self._release, version.manifest.path)
            version.manifest = manifest
            version.failure = None
            adapter.labels = _own(labels)
            adapter.mark_changed(revision, now)
            self._journal.record(EventType.UPDATED, version, reason)
            self._pinning.settle(adapter, version)
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
            if not keep:
                self._residency.retire(former, f"version {number} takes over")
            self._pinning.settle(adapter, former)
            return self._reports.view(adapter)


def _own(labels: Mapping[str, str]) -> Mapping[str, str]:
    return dict(labels) if labels else NO_LABELS


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
    version = next(version for version in reversed(list(adapter.versions)) if version.pins)
    tier = highest(version.pins)
    where = tier.name if tier is not None else ""
    which = "" if version is adapter.current else f"version {version.number} of "
    return FailedPreconditionError(
        f"{which}adapter {adapter.name!r} is pinned in tier {where}: unpin it first, or force",
        reason="ADAPTER_PINNED",
        metadata={"adapter": adapter.name},
    )
