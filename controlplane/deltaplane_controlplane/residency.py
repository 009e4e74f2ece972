"""Where the weights of versions are, and what keeps them there.

    source > host tier (bytes) > device tier (slots and rank pages)

A load packs the files on a loader thread, which checks them, and only then looks for room; so files that
are not good evict nothing. Room on the device is found and reserved in one step with the evictions it
takes; the copy follows on the device thread; then the version is published as resident.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from deltaplane_controlplane.asks import Asks
from deltaplane_controlplane.errors import (
    AbortedError,
    DeltaplaneError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.futures import done, pending
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.loads import AdapterFiles, Load, LoadPipeline
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.ports import DevicePool, HostAdapter
from deltaplane_controlplane.tiers import DeviceTier, HostTier
from deltaplane_controlplane.versions import Eviction, Tier, Version


class Recorder(Protocol):
    """Told of what happens to a version, with the monitor held."""

    def __call__(
        self, kind: EventType, version: Version, reason: str = "", *, tier: Tier | None = None
    ) -> None: ...


class Residency:
    """Loads, evictions and leases of versions.

    Methods are called with the monitor held, but for close() and those of LoadEvents, which its own threads
    call. None of them waits.

    record: told of changes. gone: told of a draining version that nobody leases and that has left all tiers.
    on_ready: a load ended, or there may be room; called without the monitor, from any thread.
    on_expel: the leases on the version of this uid are to be ended now; likewise.
    """

    def __init__(
        self,
        *,
        monitor: Monitor,
        record: Recorder,
        gone: Callable[[Version], None],
        files: AdapterFiles,
        pool: DevicePool,
        host_cache_bytes: int,
        loader_threads: int,
        clock: Callable[[], float],
    ) -> None:
        self.monitor = monitor
        self.host = HostTier(host_cache_bytes)
        self.device = DeviceTier(pool.num_slots, pool.num_pages)
        self.on_ready: Callable[[], None] = _do_nothing
        self.on_expel: Callable[[int], object] = _do_nothing
        self.loads = self.load_failures = self.evictions = self.hits = self.misses = 0
        self._record = record
        self._gone = gone
        self._pipeline = LoadPipeline(files, pool, self, loader_threads)
        self._clock = clock
        self._leases: set[Lease] = set()
        self._loading: set[Version] = set()
        self._asks = Asks()
        self._wanted: dict[tuple[Version, Tier], Future[None]] = {}
        self._leaving: dict[Future[None], tuple[Version, Tier]] = {}
        self._closed = False

    # Leases

    def lease(self, terms: Sequence[tuple[Version, float]]) -> Lease:
        """A request's lease on versions with weights, on all or none; counts which it found resident.

        Errors: FailedPreconditionError (a version failed to load), UnavailableError (closed).
        """
        for version, _ in terms:
            self._check_servable(version)
        lease = self.grant(terms)
        for member in lease.members:
            version = member.version
            self._touch(version)
            version.hits += member.hit
            self.hits += member.hit
            version.misses += not member.hit
            self.misses += not member.hit
        return lease

    def grant(self, terms: Iterable[tuple[Version, float]]) -> Lease:
        lease = Lease(self, terms)
        self._leases.add(lease)
        for version in lease.versions:
            version.leases += 1
        return lease

    def give_back(self, lease: Lease) -> None:
        self._leases.discard(lease)
        for version in lease.versions:
            version.leases -= 1
            self._forget_if_unneeded(version)

    def enter(self, lease: Lease) -> None:
        """A sequence begins to use resident versions."""
        for version in lease.versions:
            self._check_servable(version)
        for version in lease.versions:
            version.running += 1
            self._touch(version)
        if self._asks.end(lease.uid):
            self._came_free()

    def leave(self, lease: Lease) -> None:
        """A sequence no longer uses them."""
        for version in lease.versions:
            version.running -= 1
            self._touch(version)
        if not all(version.running for version in lease.versions):
            self._came_free()

    def ask(self, lease: Lease) -> None:
        """Sees to it that versions are on their way to the device, as far as there can be room for them now.
        What was asked for earlier, and waits for room, comes first.

        Errors: FailedPreconditionError, UnavailableError.
        """
        for version in lease.versions:
            self._check_servable(version)
        self._asks.add(lease)
        missing = [version for version in lease.versions if not version.resident]
        for version in missing:
            if version.load is not None:
                version.load.tier = Tier.DEVICE
        if all(version.load is not None for version in missing):
            return
        problem = self._device_problem(lease.versions)
        if problem:
            raise FailedPreconditionError(problem, reason="NO_ROOM_BESIDE_PINS")
        for asked in list(self._asks):
            idle = not (asked.resident or asked.load or asked.failure or asked.expelled)
            if idle and self._may_find_room(asked, Tier.DEVICE):
                self._begin(Load(asked, Tier.DEVICE))

    def stop_asking(self, lease: Lease) -> None:
        """A lease waits no longer. Idempotent."""
        if self._asks.discard(lease):
            self._came_free()

    def waits_for_room(self, lease: Lease) -> bool:
        """Whether versions that are asked for cannot all be loaded as things are."""
        return lease.uid in self._asks and any(
            not version.resident and version.load is None and self._find_room(version) is None
            for version in lease.versions
        )

    # Loads

    def start_load(self, version: Version, tier: Tier) -> Future[None]:
        """Brings a version to a tier, or joins the load that does. A failed one may be tried again.

        The answer resolves when the version is there, or with FailedPreconditionError (the files),
        ResourceExhaustedError (everything there is pinned or in use) or UnavailableError (closed).
        """
        if self._closed:
            raise _closed()
        self.check_load(version, tier)
        version.failure = None
        if version.is_in(tier):
            return done(None)
        load = version.load or Load(version, tier)
        waiter = load.waiter(tier)
        if version.load is None:
            self._begin(load)
        elif tier is Tier.DEVICE:
            load.tier = tier
        return waiter

    def check_load(self, version: Version, tier: Tier) -> None:
        """Errors: ResourceExhaustedError, where a version can never come to a tier as things are pinned."""
        problem = self._device_problem((version,)) if tier is Tier.DEVICE else ""
        if problem:
            raise ResourceExhaustedError(problem, reason="NO_ROOM_BESIDE_PINS")

    def keep_in(self, version: Version, tier: Tier) -> Future[None]:
        """Brings a pinned version to its tier as soon as there is room.

        The answer resolves when it is there, or with FailedPreconditionError (the load failed), AbortedError
        (it is not pinned there any more) or UnavailableError (closed).
        """
        if self._closed:
            raise _closed()
        arrival = self._wanted.setdefault((version, tier), pending())
        self._serve_wanted()
        return arrival

    def stop_keeping(self, version: Version) -> None:
        """The pins of a version have changed, or it is no longer the one that they hold."""
        gone = [key for key in self._wanted if key[0] is version and key[1] not in version.pins]
        self._drop_wanted(gone, AbortedError(f"adapter {version} is not pinned any more", reason="UNPINNED"))
        self._came_free()

    def packed(self, load: Load, adapter: HostAdapter) -> None:
        with self.monitor:
            version = load.version
            if self._closed:
                self._end(load, _closed())
                return
            if version.draining and version.leases == 0:
                self._end(load, FailedPreconditionError(f"adapter {version} was deleted"))
                return
            self._store_on_host(load, adapter)
            if load.tier is Tier.DEVICE:
                self._place(load, adapter)
            else:
                self._end(load)

    def copied(self, load: Load) -> None:
        with self.monitor:
            version = load.version
            self.device.publish(version)
            version.protected = version.uid in self._asks
            version.loads += 1
            self.loads += 1
            version.last_load = load.timings(self._clock())
            self._record(EventType.LOADED, version, tier=Tier.DEVICE)
            self._end(load)

    def failed(self, load: Load, reason: str) -> None:
        with self.monitor:
            version = load.version
            if version.placement is not None and not version.resident:
                self.device.remove(version)
            self.load_failures += 1
            error = _load_failed(version, reason)
            self._drop_wanted([key for key in self._wanted if key[0] is version], error)
            if not version.resident:
                version.failure = reason
            self._record(EventType.FAILED, version, reason)
            self._end(load, error)

    # Evictions and ends

    def evict(self, version: Version, tier: Tier) -> None:
        """Takes a version out of a tier; out of host memory means out of both.

        Errors: FailedPreconditionError (pinned, in use, or a load is under way), UnavailableError (closed).
        """
        self.check_evict(version, tier)
        if version.resident:
            self._evict_from_device(version, "by an administrator")
        if tier is Tier.HOST and version.host is not None:
            self._evict_from_host(version, "by an administrator")
        self._room_appeared()

    def check_evict(self, version: Version, tier: Tier) -> None:
        """Errors: as `evict`."""
        if self._closed:
            raise _closed()
        why = self._why_pinned(version, tier) or (
            self._why_busy(version) if version.tiers or version.load is not None else ""
        )
        if why:
            raise FailedPreconditionError(f"{version} cannot be evicted: {why}", reason="ADAPTER_IN_USE")

    def evict_when_idle(self, version: Version, tier: Tier) -> Future[None]:
        """Takes a version out of a tier as soon as nothing uses it; requests that come meanwhile may.

        Errors: FailedPreconditionError (pinned), UnavailableError (closed); the answer's: the same.
        """
        if self._closed:
            raise _closed()
        pinned = self._why_pinned(version, tier)
        if pinned:
            raise FailedPreconditionError(f"{version} cannot be evicted: {pinned}", reason="ADAPTER_IN_USE")
        end: Future[None] = pending()
        self._leaving[end] = version, tier
        self._serve_leaving()
        return end

    def stop_evicting(self, end: Future[None]) -> None:
        """Nobody waits any more for what `evict_when_idle` answered."""
        self._leaving.pop(end, None)

    def end_hold(self, version: Version) -> None:
        """An administrator no longer keeps the version where it is."""
        version.holds -= 1
        self._came_free()

    def retire(self, version: Version, reason: str = "") -> None:
        """The version is to go when its last lease has ended, which may be now."""
        if not version.draining:
            version.draining = True
            self._record(EventType.DRAINING, version, reason)
        self.stop_keeping(version)
        self._forget_if_unneeded(version)

    def expel(self, version: Version) -> None:
        """Ends the patience with a draining version: new activations fail and on_expel is called."""
        if version.draining and version.leases:
            version.expelled = True
            self.monitor.after(self.on_expel, version.uid)

    def close(self) -> None:
        """Ends loads under way with UnavailableError and waits for the threads. Idempotent."""
        with self.monitor:
            self._closed = True
            self._drop_wanted(list(self._wanted), _closed())
            for end in self._leaving:
                self.monitor.after(end.set_exception, _closed())
            self._leaving.clear()
        self._pipeline.close_packers()
        self._pipeline.close_device()
        with self.monitor:
            for version in list(self._loading):
                if version.load is not None:
                    self._end(version.load, _closed())

    # Books

    @property
    def num_loading(self) -> int:
        """Loads under way."""
        return len(self._loading)

    @property
    def running(self) -> set[str]:
        """Names of adapters that sequences use."""
        return {version.adapter.name for version in self.device.order if version.running}

    @property
    def waiting(self) -> set[str]:
        """Names of adapters with requests that do not run."""
        return {v.adapter.name for lease in self._leases if lease.slot is None for v in lease.versions}

    def check_integrity(self, versions: Iterable[Version]) -> None:
        """Asserts that the books of these, which must be all versions there are, agree with each other."""
        known = set(versions)
        self.host.check_integrity(known)
        self.device.check_integrity(known)
        assert {v for v in known if v.load is not None} == self._loading
        self._asks.check_integrity(known)
        assert set(self._asks.leases()) <= self._leases
        held = {version: [0, 0] for version in known}
        for lease in self._leases:
            for version in lease.versions:
                held[version][0] += 1
                held[version][1] += lease.slot is not None
            assert lease.slot is None or lease.slot == lease.place(), f"{lease.adapter} has moved"
        for version, counts in held.items():
            assert counts == [version.leases, version.running], f"{version}: leases {counts}"
            assert version.resident or not (version.running or version.protected), f"{version} runs unloaded"
            assert not version.is_forgettable, f"{version} should be gone"
            assert version.failure is None or not version.resident
            assert version.holds >= 0
        assert {version for version, _ in self._wanted} <= known
        assert all(tier in version.pins for version, tier in self._wanted)
        assert {version for version, _ in self._leaving.values()} <= known

    # Steps of a load

    def _begin(self, load: Load) -> None:
        version = load.version
        version.load = load
        self._loading.add(version)
        self._record(EventType.LOADING, version, tier=load.tier)
        if version.host is None:
            self._pipeline.pack(load)
        else:
            self._place(load, version.host)

    def _store_on_host(self, load: Load, adapter: HostAdapter) -> None:
        """Keeps the packed weights if there is room; if not, a load to the device goes on without."""
        version = load.version
        victims = self.host.find_room(adapter.nbytes)
        if victims is None:
            return
        for victim in victims:
            self._evict_from_host(victim, f"room for {version}")
        self.host.add(version, adapter)
        if load.tier is Tier.HOST or Tier.HOST in load.waiters:
            version.last_load = load.timings(self._clock())
            self._record(EventType.LOADED, version, tier=Tier.HOST)

    def _place(self, load: Load, adapter: HostAdapter) -> None:
        """Reserves room on the device, evicting what it takes, and has the copy made."""
        version = load.version
        victims = self._find_room(version)
        if victims is None:
            self._end(load)
            return
        for victim in victims:
            self._evict_from_device(victim, f"room for {version}")
        self._pipeline.copy(load, adapter, self.device.reserve(version))

    def _end(self, load: Load, error: DeltaplaneError | None = None) -> None:
        """Ends a load, well or not, and tells those who wait for it."""
        version = load.version
        version.load = None
        self._loading.discard(version)
        for tier, waiter in load.waiters.items():
            if version.is_in(tier):
                self.monitor.after(waiter.set_result, None)
            else:
                self.monitor.after(waiter.set_exception, error or self._no_room(version, tier))
        self.monitor.after(self.on_ready)
        if error is not None or version.is_in(load.tier):
            self._serve_wanted()
        self._serve_leaving()
        self._forget_if_unneeded(version)

    def _serve_wanted(self) -> None:
        """Begins the loads of pinned versions for which there is room now."""
        for (version, tier), arrival in list(self._wanted.items()):
            if version.is_in(tier):
                if self._wanted.pop((version, tier), None) is not None:
                    self.monitor.after(arrival.set_result, None)
            elif version.load is not None:
                if tier is Tier.DEVICE:
                    version.load.tier = tier
            elif version.failure is None and self._may_find_room(version, tier):
                self._begin(Load(version, tier))

    def _drop_wanted(self, keys: Iterable[tuple[Version, Tier]], error: DeltaplaneError) -> None:
        for key in keys:
            self.monitor.after(self._wanted.pop(key).set_exception, error)

    def _serve_leaving(self) -> None:
        """Evicts the versions that were to go as soon as nothing uses them and that nothing uses now."""
        for end, (version, tier) in list(self._leaving.items()):
            if self._why_busy(version) and not self._why_pinned(version, tier):
                continue
            if self._leaving.pop(end, None) is None:
                continue  # evicting another one made room, which came back to here
            try:
                self.evict(version, tier)
            except DeltaplaneError as error:
                self.monitor.after(end.set_exception, error)
            else:
                self.monitor.after(end.set_result, None)

    def _came_free(self) -> None:
        """Something uses a version no longer."""
        self._serve_leaving()
        self._room_appeared()

    def _room_appeared(self) -> None:
        self._serve_wanted()
        if self._asks:
            self.monitor.after(self.on_ready)

    # Questions

    def _check_servable(self, version: Version) -> None:
        if self._closed:
            raise _closed()
        if version.expelled:
            raise FailedPreconditionError(
                f"adapter {version} was deleted and its drain timeout has passed", reason="ADAPTER_DELETED"
            )
        if version.failure is not None:
            raise _load_failed(version, version.failure)

    def _may_find_room(self, version: Version, tier: Tier) -> bool:
        """Whether a load that begins now would have somewhere to go."""
        on_device = tier is Tier.DEVICE and self._find_room(version) is not None
        if on_device or version.host is not None:
            return on_device
        return self.host.find_room(version.manifest.host_bytes) is not None

    def _find_room(self, version: Version) -> list[Version] | None:
        """Versions whose going makes room for one on the device; None where there cannot be."""
        return self.device.find_room(version.num_pages, self._asks.may_go_for(version))

    def _device_problem(self, versions: Sequence[Version]) -> str:
        """Why versions could not be on the device together even if all requests ended; empty where they
        could."""
        device = self.device
        missing = [version for version in versions if not version.resident]
        num_missing_pages = sum(version.num_pages for version in missing)
        if len(missing) <= device.num_free_slots and num_missing_pages <= device.pages.num_free:
            return ""
        pinned = [v for v in device.order if Tier.DEVICE in v.pins]
        others = [v for v in versions if v not in pinned]
        num_pages = sum(v.num_pages for v in others)
        problem = _problem_beside_pins(
            num_pages, device.num_pinned_pages, device.pages.num_pages, "rank pages"
        ) or _problem_beside_pins(len(others), len(pinned), device.num_slots, "slots")
        names = ", ".join(map(str, versions))
        return f"adapter {names} needs {problem}: unpin adapters to make room" if problem else ""

    def _why_pinned(self, version: Version, tier: Tier) -> str:
        """Which pin forbids to evict a version; empty where none does. Out of host memory is out of both."""
        pins = [pin for pin in Tier if pin in version.pins and tier in (pin, Tier.HOST)]
        return f"it is pinned in tier {pins[-1].name}; unpin it first" if pins else ""

    def _why_busy(self, version: Version) -> str:
        """What uses a version, so that it cannot be evicted; empty where nothing does."""
        if version.running or version.protected or version.claims:
            return f"sequences that use it: {version.running}, requests about to: {version.asking}"
        if version.load is not None:
            return "a load is under way"
        return "an administrator is pinning it" if version.holds else ""

    def _no_room(self, version: Version, tier: Tier) -> ResourceExhaustedError:
        if tier is Tier.HOST:
            what = (
                f"{version.manifest.host_bytes} bytes of host memory; of {self.host.max_bytes}, "
                f"{self.host.held_bytes} are pinned or in use"
            )
        else:
            slots, pages = self.device.num_slots, self.device.pages.num_pages
            available_slots, available_pages = self.device.available
            what = (
                f"a slot and {version.num_pages} rank pages on the device; {slots - available_slots} of "
                f"{slots} slots and {pages - available_pages} of {pages} rank pages are pinned or in use"
            )
        return ResourceExhaustedError(f"no room for adapter {version}: it needs {what}", reason="NO_ROOM")

    # Moves

    def _touch(self, version: Version) -> None:
        version.last_use = self._clock()
        if version.resident:
            self.device.order.touch(version)
        if version.host is not None:
            self.host.order.touch(version)

    def _evict_from_device(self, version: Version, why: str) -> None:
        self._clear(self.device.remove(version))
        version.evictions += 1
        self.evictions += 1
        version.last_eviction = Eviction(Tier.DEVICE, why, self._clock())
        self._record(EventType.EVICTED, version, why, tier=Tier.DEVICE)

    def _evict_from_host(self, version: Version, why: str) -> None:
        self.host.remove(version)
        version.last_eviction = Eviction(Tier.HOST, why, self._clock())
        self._record(EventType.EVICTED, version, why, tier=Tier.HOST)

    def _forget_if_unneeded(self, version: Version) -> None:
        if not version.is_forgettable:
            return
        if version.resident:
            self._clear(self.device.remove(version))
        if version.host is not None:
            self.host.remove(version)
        for end in [end for end, (leaving, _) in self._leaving.items() if leaving is version]:
            del self._leaving[end]
            self.monitor.after(end.set_result, None)
        self._gone(version)
        self._room_appeared()

    def _clear(self, slot: int) -> None:
        if not self._closed:
            self._pipeline.clear(slot)


def _problem_beside_pins(needed: int, pinned: int, total: int, what: str) -> str:
    """Why there are too few; empty where there are enough, or where there were too few without pins too."""
    if total - pinned < needed <= total:
        return f"{needed} {what}, and {pinned} of the {total} on the device are pinned"
    return ""


def _load_failed(version: Version, reason: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"adapter {version} cannot be loaded: {reason}",
        reason="ADAPTER_LOAD_FAILED",
        metadata={"adapter": version.adapter.name, "version": str(version.number)},
    )


def _closed() -> UnavailableError:
    return UnavailableError("the adapter manager is closed: the server is shutting down")


def _do_nothing(*_: object) -> None:
    pass
