"""The adapter manager: one object, made once, given to both planes."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from deltaplane_controlplane.adapter_store import AdapterStore
from deltaplane_controlplane.administration import Administration
from deltaplane_controlplane.admission import Admission, check_labels, check_name
from deltaplane_controlplane.books import Books
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.composition import check_composition
from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
)
from deltaplane_controlplane.events import EventLog, EventType, Subscription
from deltaplane_controlplane.idempotency import IdempotencyCache
from deltaplane_controlplane.journal import Journal
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.long_calls import DEFAULT_DRAIN_TIMEOUT_S, LongCalls
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.operations import Operations
from deltaplane_controlplane.pinning import Pinning
from deltaplane_controlplane.ports import AdapterLoader, DevicePool, SourceFetcher
from deltaplane_controlplane.registry import Registry, no_version
from deltaplane_controlplane.reports import Reports
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.sources import AllowedRoots
from deltaplane_controlplane.turn import Turn
from deltaplane_controlplane.upload_terms import UploadTerms
from deltaplane_controlplane.versions import NO_LABELS, AdapterState, Tier, Version
from deltaplane_controlplane.views import (
    AdapterPage,
    AdapterStats,
    AdapterView,
    CapacityView,
    SlotView,
)

LOADER_THREADS = 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Limits of an adapter manager, fixed when it is made.

    max_lora_rank: a higher rank is refused.
    host_cache_bytes: bound of packed adapters in host memory. What loader threads are packing comes on top.
    allowed_roots: folders from which adapters may be registered.
    loader_threads: adapters that are read and packed at the same time.
    max_watches: readers of events at once.
    """

    max_lora_rank: int
    host_cache_bytes: int
    allowed_roots: tuple[Path, ...] = ()
    loader_threads: int = LOADER_THREADS
    max_watches: int = 1024


class AdapterManager:
    """Which adapters exist, where their weights are, and who holds them there. Safe for all threads.

    Two locks. The monitor guards all state and is held for moments. The administrators' lock puts their
    changes in order; it is held while a change is written to the catalogue, which is before it shows. Files
    are read under neither.

    store: where adapters that were uploaded or fetched are. It takes out of it those whose version is gone.
    fetcher: brings adapters from remote sources; without it there are none.
    clock: seconds since the epoch.

    calls: the calls that take their time, as operations; the methods of the same names here wait for them.
    operations: what is under way, and what was.
    """

    def __init__(
        self,
        *,
        loader: AdapterLoader,
        pool: DevicePool,
        config: ManagerConfig,
        catalogue: Catalogue,
        store: AdapterStore | None = None,
        fetcher: SourceFetcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._num_slots = pool.num_slots
        self._store = store
        self._roots = AllowedRoots(config.allowed_roots, store.path if store else None)
        self._admission = Admission(
            loader,
            pool,
            self._roots,
            max_lora_rank=config.max_lora_rank,
            host_cache_bytes=config.host_cache_bytes,
            store=store,
            fetcher=fetcher,
        )
        self.operations = Operations(clock)
        self._answers: IdempotencyCache[Any] = IdempotencyCache()
        self._hook_gone: Callable[[int], object] | None = None
        self._events = EventLog(max_readers=config.max_watches)
        books = self._open_books(pool, config, catalogue, clock)
        self._monitor, self._registry, self._residency = books.monitor, books.registry, books.residency
        self._reports, self._journal = books.reports, books.journal
        self._pinning = Pinning(books)
        self._administration = Administration(books, self._pinning, release=self._admission.give_back)
        self.calls = LongCalls(
            books,
            admission=self._admission,
            administration=self._administration,
            pinning=self._pinning,
            operations=self.operations,
            answers=self._answers,
        )
        self._restore(catalogue)

    def _open_books(
        self, pool: DevicePool, config: ManagerConfig, catalogue: Catalogue, clock: Callable[[], float]
    ) -> Books:
        monitor, registry = Monitor(), Registry()
        journal = Journal(monitor, self._events, lambda adapter: reports.view(adapter), clock)
        residency = Residency(
            monitor=monitor,
            record=journal.record,
            gone=self._on_gone,
            files=self._admission,
            pool=pool,
            host_cache_bytes=config.host_cache_bytes,
            loader_threads=config.loader_threads,
            clock=clock,
        )
        reports = Reports(
            monitor,
            registry,
            residency,
            operation_on=self.operations.running_on,
            num_watches=lambda: self._events.num_readers,
            page_bytes=pool.page_bytes,
            max_lora_rank=config.max_lora_rank,
        )
        return Books(monitor, registry, residency, reports, journal, Turn(), catalogue, clock)

    # Life

    def set_hooks(
        self,
        *,
        on_ready: Callable[[], None] | None = None,
        on_expel: Callable[[int], object] | None = None,
        on_gone: Callable[[int], object] | None = None,
    ) -> None:
        """Sets what the engine wants to be told. The hooks are called from any thread, the one that activates
        and releases leases included, without a lock of the manager's; they must return at once.

        on_ready: a load ended or failed, or there may be room: leases that ask should activate again.
        on_expel: the drain timeout of the version of this uid has passed: abort what holds it.
        on_gone: the version of this uid is no more, and its uid will never be used again.
        """
        with self._monitor:
            self._residency.on_ready = on_ready or self._residency.on_ready
            self._residency.on_expel = on_expel or self._residency.on_expel
            self._hook_gone = on_gone or self._hook_gone

    def start(self) -> None:
        """Begins to load what was pinned before a restart, once trusted adapters are registered. A pin that
        the server's present limits do not allow is dropped."""
        self._pinning.restore()

    def close(self) -> None:
        """Ends operations, loads, watches and timers; waits for the threads. Leases may still be released.
        Idempotent."""
        self._administration.close()
        self.operations.close()
        self._residency.close()
        self._events.close()

    # Requests

    def lease(self, name: str, version: int | None = None) -> Lease:
        """Takes a lease on the current version of an adapter, or on a version that exists; one atomic step.

        Errors: NotFoundError, FailedPreconditionError (it could not be loaded), UnavailableError.
        """
        with self._monitor:
            adapter = self._registry.get(name)
            leased = adapter.current if version is None else adapter.kept(version)
            if leased is None:
                raise no_version(adapter, version)
            return self._residency.lease([(leased, 1.0)])

    def compose(self, weights: Mapping[str, float]) -> Lease:
        """Takes a lease on the current versions of several adapters, whose deltas are to be added up, each
        times its weight; on all or none, in one atomic step.

        Errors: NotFoundError, FailedPreconditionError (one could not be loaded, or they cannot be added up),
        UnavailableError.
        """
        with self._monitor:
            terms = [(self._registry.get(name).current, weight) for name, weight in weights.items()]
            check_composition(terms, self._residency.device)
            return self._residency.lease(terms)

    # Administration

    def register(
        self,
        name: str,
        source: str,
        *,
        labels: Mapping[str, str] = NO_LABELS,
        expected_digest: str = "",
        validate_only: bool = False,
        load_tier: Tier | None = None,
        idempotency_key: str = "",
    ) -> AdapterView:
        """Checks an adapter's files and makes it known. The same files under the same name again change
        nothing; where the adapter had FAILED they heal it, and so do other files.

        Errors: InvalidArgumentError, AlreadyExistsError (other files under a name in use).
        """
        return self.calls.register(
            name,
            source,
            labels=labels,
            expected_digest=expected_digest,
            validate_only=validate_only,
            load_tier=load_tier,
            idempotency_key=idempotency_key,
        ).wait()

    def register_trusted(self, name: str, source: str) -> AdapterView:
        """Registers an adapter that the one who starts the server names, wherever it lies; where the name is
        in use with other files, these take over. Where a remote source does not answer, the adapter that was
        fetched from it before stays.

        Errors: InvalidArgumentError; for remote sources as SourceFetcher.fetch.
        """
        check_name(name)
        if not self._admission.is_remote(source):
            folder = Path(source).absolute()
            self._roots.trust(folder)
            manifest = self._admission.inspect(str(folder))
            return self._administration.admit(name, manifest, NO_LABELS, replace=True)
        try:
            manifest = self._admission.inspect(source)
        except UnavailableError as error:
            known = self._fetched_before(name, source)
            if known is None:
                raise
            _log.warning("adapter.not_fetched_anew", adapter=name, reason=error.message)
            return known
        return self._admission.settle(
            manifest, lambda: self._administration.admit(name, manifest, NO_LABELS, replace=True)
        )

    def check_upload(self, terms: UploadTerms) -> AdapterView | None:
        """Whether an adapter may be uploaded, told before its bytes come; `register_upload` has the last
        word. Answers what the same upload was answered before, if its idempotency key was seen.

        Errors: InvalidArgumentError, AlreadyExistsError; NotFoundError (nothing to replace), AbortedError
        (etag).
        """
        check_name(terms.name, "header.name")
        check_labels(terms.labels, "header.labels")
        earlier: AdapterView | None = self._answers.find(terms.key, terms.request)
        if earlier is not None:
            return earlier
        if terms.replace:
            self._administration.find(terms.name, terms.etag)
            return None
        with self._monitor:
            adapter = self._registry.find_registered(terms.name)
            if adapter is not None and adapter.current.failure is None:
                current = adapter.current
                raise AlreadyExistsError(
                    f"adapter {terms.name!r} is registered (version {current.number}, SHA-256 "
                    f"{current.manifest.digest}): replace it, or take another name",
                    reason="ADAPTER_ALREADY_EXISTS",
                    metadata={"adapter": terms.name, "digest": current.manifest.digest},
                )
        return None

    def register_upload(self, folder: str, terms: UploadTerms) -> AdapterView:
        """Registers what was uploaded to `folder`, or makes it the next version of an adapter, whose labels
        stay where there are none. An adapter that was registered with the same files meanwhile stays as it
        is: the answer's path is then another folder.

        Errors: as `register`, or where it replaces as `update`.
        """

        def act() -> AdapterView:
            manifest = self._admission.inspect(folder, field="header.files", is_upload=True)
            if terms.replace:
                view = self._administration.change(
                    terms.name,
                    manifest,
                    terms.labels or None,
                    etag=terms.etag,
                    keep=terms.keep_previous,
                    validate_only=terms.validate_only,
                )
            else:
                view = self._administration.admit(
                    terms.name, manifest, terms.labels, validate_only=terms.validate_only
                )
            return view if terms.validate_only else self.calls.load_at_once(view, terms.load_tier)

        view: AdapterView = self._answers.once(terms.key, terms.request, act)
        return view

    def update(
        self,
        name: str,
        *,
        source: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
        expected_digest: str = "",
        validate_only: bool = False,
        keep_previous: bool = False,
        idempotency_key: str = "",
    ) -> AdapterView:
        """Changes labels, or files: other files make a new version that takes over at once, while requests
        under way end on the old one. The same files heal a FAILED adapter.

        Errors: NotFoundError, InvalidArgumentError, AbortedError (etag).
        """
        return self.calls.update(
            name,
            source=source,
            labels=labels,
            etag=etag,
            expected_digest=expected_digest,
            validate_only=validate_only,
            keep_previous=keep_previous,
            idempotency_key=idempotency_key,
        ).wait()

    def delete(
        self,
        name: str,
        *,
        etag: str = "",
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        force: bool = False,
        allow_missing: bool = False,
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> AdapterView | None:
        """Forgets an adapter: new requests are refused at once, those under way are aborted when the timeout
        has passed. Deleting it again while it drains sets a new timeout. None where it was missing.

        Errors: NotFoundError, AbortedError (etag), FailedPreconditionError (pinned, without force; being
        fetched).
        """
        try:
            view, _ = self.calls.delete(
                name,
                etag=etag,
                drain_timeout_s=drain_timeout_s,
                force=force,
                validate_only=validate_only,
                idempotency_key=idempotency_key,
            )
        except NotFoundError:
            if allow_missing:
                return None
            raise
        return view

    def rollback(
        self,
        name: str,
        *,
        version: int | None = None,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> AdapterView:
        """Makes a kept version current again: the one of this number, or the highest below the current one.
        The one that was current is kept.

        Errors: NotFoundError (no such version), AbortedError (etag).
        """
        return self._once(
            idempotency_key,
            ("rollback", name, version, etag),
            validate_only,
            lambda: self._administration.rollback(
                name, number=version, etag=etag, validate_only=validate_only
            ),
        )

    def pin(
        self,
        name: str,
        tier: Tier = Tier.DEVICE,
        *,
        wait: bool = True,
        version: int | None = None,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> AdapterView:
        """Brings an adapter to a tier and keeps its current version there, whichever that becomes; or keeps
        an earlier version there. Each tier has a pin of its own.

        wait: the pin is made when the adapter has arrived, and an error leaves everything as it was. Else it
        is made at once, and the adapter arrives as soon as there is room.
        Errors: NotFoundError, FailedPreconditionError (too much is pinned there, or the load failed),
        ResourceExhaustedError (no room now), AbortedError (etag).
        """
        operation = self.calls.pin(
            name,
            tier,
            at_once=not wait,
            version=version,
            etag=etag,
            validate_only=validate_only,
            idempotency_key=idempotency_key,
        )
        if wait:
            return operation.wait()
        operation.keep()
        return self.calls.begun(operation)

    def unpin(
        self,
        name: str,
        tier: Tier | None = None,
        *,
        version: int | None = None,
        etag: str = "",
        validate_only: bool = False,
        idempotency_key: str = "",
    ) -> AdapterView:
        """Lets an adapter, or an earlier version, be evicted again from a tier; from both where it is None.

        Errors: NotFoundError, AbortedError (etag).
        """
        return self._once(
            idempotency_key,
            ("unpin", name, tier, version, etag),
            validate_only,
            lambda: self._pinning.unpin(name, tier, number=version, etag=etag, validate_only=validate_only),
        )

    def start_load(self, name: str, tier: Tier = Tier.DEVICE) -> Future[None]:
        """Begins to bring an adapter to a tier, or joins the load that does. Cancelling the answer does not
        cancel the load.

        Errors: NotFoundError; the answer's: FailedPreconditionError (the load failed),
        ResourceExhaustedError (everything there is pinned or in use), UnavailableError.
        """
        with self._monitor:
            return self._residency.start_load(self._registry.get(name).current, tier)

    def load(self, name: str, tier: Tier = Tier.DEVICE, *, timeout_s: float | None = None) -> AdapterView:
        """Brings an adapter to a tier and waits for it. Errors: as start_load, and DeadlineExceededError."""
        try:
            return self.calls.load(name, tier).wait(timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(f"adapter {name!r} is still loading after {timeout_s} s") from None

    def evict(self, name: str, tier: Tier = Tier.DEVICE) -> AdapterView:
        """Takes an adapter out of a tier; the device leaves it in host memory, host leaves both.

        Errors: NotFoundError, FailedPreconditionError (pinned or in use).
        """
        return self.calls.evict(name, tier).wait()

    # Questions

    def get(self, name: str) -> AdapterView:
        """One adapter, also while it drains. Errors: NotFoundError."""
        return self._reports.get(name)

    def list_adapters(self, *, page_size: int = 0, page_token: str = "", filter: str = "") -> AdapterPage:
        """Adapters in order of name. page_size: 0 is 100; more than 1000 are never answered. filter: see
        `filters.parse_filter`.

        Errors: InvalidArgumentError.
        """
        return self._reports.list_adapters(page_size, page_token, filter)

    def slots(self) -> tuple[SlotView, ...]:
        """All slots of the device, in order."""
        return self._reports.slots()

    def capacity(self, ranks: Sequence[int] = ()) -> CapacityView:
        """What the tiers hold, and how many more adapters of each rank fit.

        Errors: InvalidArgumentError (a rank of 0 or over the limit).
        """
        return self._reports.capacity(ranks)

    def stats(self) -> AdapterStats:
        """Totals for metrics."""
        return self._reports.stats()

    def count_states(self) -> Mapping[AdapterState, int]:
        """How many adapters are in each state."""
        return self._reports.count_states()

    def subscribe(self, wake: Callable[[], None], resume_token: str = "") -> Subscription:
        """A reader of events (see EventLog.subscribe)."""
        return self._events.subscribe(wake, resume_token)

    @property
    def loading(self) -> int:
        """Loads under way."""
        return self._residency.num_loading

    def check_integrity(self) -> None:
        """Asserts every invariant of the books."""
        with self._monitor:
            self._registry.check_integrity()
            self._residency.check_integrity(v for adapter in self._registry for v in adapter.versions)
            assert len(self._registry.pinned_in(Tier.DEVICE)) < max(self._num_slots, 1)
        self.operations.check_integrity()

    def _once(
        self, key: str, request: Hashable, validate_only: bool, act: Callable[[], AdapterView]
    ) -> AdapterView:
        view: AdapterView = self._answers.once("" if validate_only else key, request, act)
        return view

    def _fetched_before(self, name: str, source: str) -> AdapterView | None:
        """An adapter whose files were fetched from this remote source, and may be those that it names now."""
        with self._monitor:
            adapter = self._registry.find_registered(name)
            known = adapter is not None and self._admission.is_from(adapter.current.manifest, source)
            return self._reports.view(adapter) if adapter is not None and known else None

    def _on_gone(self, version: Version) -> None:
        self._registry.drop(version)
        self._journal.record(EventType.DELETED, version)
        self._administration.note_gone(version)
        if self._hook_gone is not None:
            self._monitor.after(self._hook_gone, version.uid)
        self._monitor.after(self._admission.give_back, version.manifest.path)

    def _restore(self, catalogue: Catalogue) -> None:
        begun = time.monotonic()
        for stored in catalogue.load():
            for version in self._registry.restore(stored).versions:
                version.failure = self._admission.size_problem(version.manifest) or None
        if self._store is not None:
            self._store.sweep(v.manifest.path for adapter in self._registry for v in adapter.versions)
        _log.info(
            "catalogue.restored",
            adapters=len(self._registry),
            ms=round(1e3 * (time.monotonic() - begun), 1),
        )
