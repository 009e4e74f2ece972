"""The adapter manager: one object, made once, given to both planes."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from deltaplane_controlplane.administration import Administration
from deltaplane_controlplane.admission import Admission, check_labels, check_name
from deltaplane_controlplane.catalogue import Catalogue
from deltaplane_controlplane.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from deltaplane_controlplane.events import EventLog, EventType, Subscription
from deltaplane_controlplane.idempotency import IdempotencyCache
from deltaplane_controlplane.journal import Journal
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.ports import AdapterLoader, DevicePool
from deltaplane_controlplane.registry import Registry, no_version
from deltaplane_controlplane.reports import Reports
from deltaplane_controlplane.residency import Residency
from deltaplane_controlplane.sources import AllowedRoots
from deltaplane_controlplane.upload_folder import UploadFolder
from deltaplane_controlplane.versions import NO_LABELS, AdapterState, Tier, Version
from deltaplane_controlplane.views import (
    AdapterPage,
    AdapterStats,
    AdapterView,
    CapacityView,
    SlotView,
)

DEFAULT_DRAIN_TIMEOUT_S = 300.0
MAX_DRAIN_TIMEOUT_S = 86_400.0
LOADER_THREADS = 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Limits of an adapter manager, fixed when it is made.

    max_lora_rank: a higher rank is refused.
    host_cache_bytes: bound of packed adapters in host memory. What loader threads are packing comes on top.
    allowed_roots: folders from which adapters may be registered.
    loader_threads: adapters that are read and packed at the same time.
    """

    max_lora_rank: int
    host_cache_bytes: int
    allowed_roots: tuple[Path, ...] = ()
    loader_threads: int = LOADER_THREADS


class AdapterManager:
    """Which adapters exist, where their weights are, and who holds them there. Safe for all threads.

    Two locks. The monitor guards all state and is held for moments. The administrators' lock puts their
    changes in order; it is held while a change is written to the catalogue, which is before it shows. Files
    are read under neither.

    uploads: where the adapters that were uploaded are. It takes out of it those whose version is gone.
    clock: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        loader: AdapterLoader,
        pool: DevicePool,
        config: ManagerConfig,
        catalogue: Catalogue,
        uploads: UploadFolder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._num_slots = pool.num_slots
        self._uploads = uploads
        self._roots = AllowedRoots(config.allowed_roots, uploads.path if uploads else None)
        self._admission = Admission(
            loader,
            pool,
            self._roots,
            max_lora_rank=config.max_lora_rank,
            host_cache_bytes=config.host_cache_bytes,
        )
        self._answers: IdempotencyCache[AdapterView] = IdempotencyCache()
        self._hook_gone: Callable[[int], object] | None = None
        self._monitor = Monitor()
        self._registry = Registry()
        self._events = EventLog()
        self._journal = Journal(self._monitor, self._events, lambda a: self._reports.view(a), clock)
        self._residency = Residency(
            monitor=self._monitor,
            record=self._journal.record,
            gone=self._on_gone,
            pack=self._admission.pack,
            pool=pool,
            host_cache_bytes=config.host_cache_bytes,
            loader_threads=config.loader_threads,
            clock=clock,
        )
        self._reports = Reports(
            self._monitor,
            self._registry,
            self._residency,
            page_bytes=pool.page_bytes,
            max_lora_rank=config.max_lora_rank,
        )
        self._administration = Administration(
            monitor=self._monitor,
            registry=self._registry,
            residency=self._residency,
            catalogue=catalogue,
            journal=self._journal,
            reports=self._reports,
            release=self._release,
            clock=clock,
        )
        self._restore(catalogue)

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
        self._administration.restore_pins()

    def close(self) -> None:
        """Ends loads, watches and timers; waits for the threads. Leases may still be released. Idempotent."""
        self._administration.close()
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
            return self._residency.lease(leased)

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
        check_name(name)
        check_labels(labels)

        def act() -> AdapterView:
            manifest = self._admission.inspect(source, expected_digest)
            view = self._administration.admit(name, manifest, labels, validate_only=validate_only)
            if load_tier is None or validate_only:
                return view
            with suppress(ResourceExhaustedError):
                self.start_load(name, load_tier)
            return self.get(name)

        request = ("register", name, source, _frozen(labels), expected_digest, load_tier)
        return self._answers.once("" if validate_only else idempotency_key, request, act)

    def register_trusted(self, name: str, source: str) -> AdapterView:
        """Registers an adapter that the one who starts the server names, wherever it lies; where the name is
        in use with other files, these take over.

        Errors: InvalidArgumentError.
        """
        check_name(name)
        folder = Path(source).absolute()
        self._roots.trust(folder)
        manifest = self._admission.inspect(str(folder))
        return self._administration.admit(name, manifest, NO_LABELS, replace=True)

    def check_upload(self, name: str, *, replace: bool) -> None:
        """Whether an adapter may be uploaded under a name, told before its bytes come; `register_upload` has
        the last word.

        Errors: AlreadyExistsError; NotFoundError (nothing to replace).
        """
        with self._monitor:
            if replace:
                self._registry.get(name)
                return
            adapter = self._registry.find_registered(name)
            if adapter is not None and adapter.current.failure is None:
                raise AlreadyExistsError(
                    f"adapter {name!r} is registered (version {adapter.current.number}, SHA-256 "
                    f"{adapter.current.manifest.digest}): replace it, or take another name",
                    reason="ADAPTER_ALREADY_EXISTS",
                    metadata={"adapter": name, "digest": adapter.current.manifest.digest},
                )

    def register_upload(
        self, name: str, folder: str, *, labels: Mapping[str, str] = NO_LABELS, replace: bool = False
    ) -> AdapterView:
        """Registers what was uploaded to `folder`, or with `replace` makes it the next version of an adapter,
        whose labels stay where there are none. An adapter that was registered with the same files meanwhile
        stays as it is: the answer's source is then another folder.

        Errors: as `register`, or with `replace` as `update`.
        """
        check_name(name)
        check_labels(labels)
        manifest = self._admission.inspect(folder, field="header.files", is_upload=True)
        if not replace:
            return self._administration.admit(name, manifest, labels)
        return self._administration.change(
            name, manifest, labels or None, etag="", keep=False, validate_only=False
        )

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
        check_labels(labels or NO_LABELS, "adapter.labels")
        if source is None and labels is None:
            raise InvalidArgumentError.for_field("update_mask", "nothing to change: set source or labels")

        def act() -> AdapterView:
            self._administration.find(name, etag)
            manifest = None
            if source is not None:
                manifest = self._admission.inspect(source, expected_digest, "adapter.source")
            return self._administration.change(
                name, manifest, labels, etag=etag, keep=keep_previous, validate_only=validate_only
            )

        request = ("update", name, source, _frozen(labels), etag, expected_digest, keep_previous)
        return self._answers.once("" if validate_only else idempotency_key, request, act)

    def delete(
        self,
        name: str,
        *,
        etag: str = "",
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        force: bool = False,
        allow_missing: bool = False,
    ) -> AdapterView | None:
        """Forgets an adapter: new requests are refused at once, those under way are aborted when the timeout
        has passed. Deleting it again while it drains sets a new timeout. None where it was missing.

        Errors: NotFoundError, AbortedError (etag), FailedPreconditionError (pinned, without force).
        """
        if not 0 <= drain_timeout_s <= MAX_DRAIN_TIMEOUT_S:
            raise InvalidArgumentError.for_field(
                "drain_timeout", f"{drain_timeout_s:g} s is not between 0 and {MAX_DRAIN_TIMEOUT_S:g} s"
            )
        try:
            return self._administration.delete(name, etag=etag, drain_timeout_s=drain_timeout_s, force=force)
        except NotFoundError:
            if allow_missing:
                return None
            raise

    def rollback(self, name: str, *, version: int | None = None, etag: str = "") -> AdapterView:
        """Makes a kept version current again: the one of this number, or the highest below the current one.
        The one that was current is kept.

        Errors: NotFoundError (no such version), AbortedError (etag).
        """
        return self._administration.rollback(name, number=version, etag=etag)

    def pin(self, name: str, tier: Tier = Tier.DEVICE, *, wait: bool = True) -> AdapterView:
        """Brings an adapter to a tier and keeps its current version there, whichever that becomes.

        wait: the pin is made when the adapter has arrived, and an error leaves everything as it was. Else it
        is made at once, and the adapter arrives as soon as there is room.
        Errors: NotFoundError, FailedPreconditionError (too much is pinned there, or the load failed),
        ResourceExhaustedError (no room now).
        """
        if not wait:
            return self._administration.set_pin(name, tier)
        version, arrival = self._administration.hold_for_pin(name, tier)
        try:
            arrival.result()
            return self._administration.set_pin(name, tier)
        finally:
            self._administration.end_hold(version)

    def unpin(self, name: str) -> AdapterView:
        """Lets an adapter be evicted again. Errors: NotFoundError."""
        return self._administration.set_pin(name, None)

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
            self.start_load(name, tier).result(timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(f"adapter {name!r} is still loading after {timeout_s} s") from None
        return self.get(name)

    def evict(self, name: str, tier: Tier = Tier.DEVICE) -> AdapterView:
        """Takes an adapter out of a tier; the device leaves it in host memory, host leaves both.

        Errors: NotFoundError, FailedPreconditionError (pinned or in use).
        """
        with self._monitor:
            adapter = self._registry.get(name)
            self._residency.evict(adapter.current, tier)
            return self._reports.view(adapter)

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
            pinned = sum(adapter.pinned_tier is Tier.DEVICE for adapter in self._registry)
            assert pinned < max(self._num_slots, 1)

    def _on_gone(self, version: Version) -> None:
        self._registry.drop(version)
        self._journal.record(EventType.DELETED, version)
        if self._hook_gone is not None:
            self._monitor.after(self._hook_gone, version.uid)
        self._monitor.after(self._release, version.manifest.source)

    def _release(self, source: str) -> None:
        """No version needs this folder any more."""
        if self._uploads is not None:
            self._uploads.discard(source)

    def _restore(self, catalogue: Catalogue) -> None:
        begun = time.monotonic()
        for stored in catalogue.load():
            for version in self._registry.restore(stored).versions:
                version.failure = self._admission.size_problem(version.manifest) or None
        if self._uploads is not None:
            self._uploads.sweep(v.manifest.source for adapter in self._registry for v in adapter.versions)
        _log.info(
            "catalogue.restored",
            adapters=len(self._registry),
            ms=round(1e3 * (time.monotonic() - begun), 1),
        )


def _frozen(labels: Mapping[str, str] | None) -> tuple[tuple[str, str], ...] | None:
    return None if labels is None else tuple(sorted(labels.items()))
