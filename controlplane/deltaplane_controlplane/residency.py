"""Where the weights of versions are, and what keeps them there.

    source > host tier (bytes) > device tier (slots and rank pages)

A load packs the files on a loader thread, which checks them, and only then looks for room; so files that
are not good evict nothing. Room on the device is found and reserved in one step with the evictions it
takes; the copy follows on the device thread; then the version is published as resident.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from deltaplane_controlplane.errors import (
    DeltaplaneError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from deltaplane_controlplane.events import EventType
from deltaplane_controlplane.leases import Lease
from deltaplane_controlplane.loads import Load, LoadPipeline, pending
from deltaplane_controlplane.monitor import Monitor
from deltaplane_controlplane.ports import AdapterManifest, DevicePool, HostAdapter
from deltaplane_controlplane.tiers import DeviceTier, HostTier
from deltaplane_controlplane.versions import Tier, Version


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
        pack: Callable[[AdapterManifest], HostAdapter],
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
        self._pipeline = LoadPipeline(pack, pool, self, loader_threads)
        self._clock = clock
        self._leases: set[Lease] = set()
        self._loading: set[Version] = set()
        self._asked: dict[Version, None] = {}
        self._wanted: dict[Version, Tier] = {}
        self._closed = False

    # Leases

    def lease(self, version: Version) -> Lease:
        """A request's lease; counts whether it found the version resident.

        Errors: FailedPreconditionError (the version failed to load), UnavailableError (closed).
        """
        self._check_servable(version)
        lease = self.grant(version)
        self._touch(version)
        if lease.hit:
            version.hits += 1
            self.hits += 1
        else:
            version.misses += 1
            self.misses += 1
        return lease

    def grant(self, version: Version) -> Lease:
        lease = Lease(self, version)
        self._leases.add(lease)
        version.leases += 1
        return lease

    def give_back(self, lease: Lease, version: Version) -> None:
        self._leases.discard(lease)
        version.leases -= 1
        self._forget_if_unneeded(version)

    def enter(self, version: Version) -> int:
        """A sequence begins to use a resident version. Answers the slot."""
        assert version.placement is not None
        self._check_servable(version)
        version.running += 1
        version.protected = False
        self._touch(version)
        return version.placement.slot

    def leave(self, version: Version) -> None:
        """A sequence no longer uses it."""
        version.running -= 1
        self._touch(version)
        if version.running == 0:
            self._room_appeared()

    def start_asking(self, version: Version) -> None:
        """A lease waits for a version to become resident."""
        version.asking += 1
        self._asked.setdefault(version)

    def stop_asking(self, version: Version) -> None:
        """A lease waits no longer."""
        version.asking -= 1
        if version.asking == 0:
            del self._asked[version]
            version.protected = False
            self._room_appeared()

    def waits_for_room(self, version: Version) -> bool:
        """Whether leases ask for a version that cannot be loaded as things are."""
        return (
            version.asking > 0
            and not version.resident
            and version.load is None
            and self.device.find_room(version.num_pages) is None
        )

    def demand(self, version: Version) -> None:
        """Sees to it that a version is on its way to the device, if there can be room for it now. Versions
        that were asked for earlier, and wait for room, come first.

        Errors: FailedPreconditionError, UnavailableError.
        """
        self._check_servable(version)
        if version.load is not None:
            version.load.tier = Tier.DEVICE
            return
        problem = self._device_problem(version)
        if problem:
            raise FailedPreconditionError(problem, reason="NO_ROOM_BESIDE_PINS")
        for asked in (*self._asked, version):
            idle = not (asked.resident or asked.load or asked.failure or asked.expelled)
            if idle and self._may_find_room(asked, Tier.DEVICE):
                self._begin(Load(asked, Tier.DEVICE))

    # Loads

    def start_load(self, version: Version, tier: Tier) -> Future[None]:
        """Brings a version to a tier, or joins the load that does. A failed one may be tried again.

        The answer resolves when the version is there, or with FailedPreconditionError (the files),
        ResourceExhaustedError (everything there is pinned or in use) or UnavailableError (closed).
        """
        if self._closed:
            raise _closed()
        version.failure = None
        if version.is_in(tier):
            arrived = pending()
            arrived.set_result(None)
            return arrived
        problem = self._device_problem(version) if tier is Tier.DEVICE else ""
        if problem:
            raise ResourceExhaustedError(problem, reason="NO_ROOM_BESIDE_PINS")
        load = version.load or Load(version, tier)
        waiter = load.waiter(tier)
        if version.load is None:
            self._begin(load)
        elif tier is Tier.DEVICE:
            load.tier = tier
        return waiter

    def keep_in(self, version: Version, tier: Tier) -> None:
        """Brings a pinned version to its tier as soon as there is room."""
        if not self._closed:
            self._wanted[version] = tier
            self._serve_wanted()

    def stop_keeping(self, version: Version) -> None:
        """A version is no longer pinned."""
        self._wanted.pop(version, None)
        self._room_appeared()

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
            version.protected = version.asking > 0
            version.loads += 1
            self.loads += 1
            version.last_load = load.timings()
            self._record(EventType.LOADED, version, tier=Tier.DEVICE)
            self._end(load)

    def failed(self, load: Load, reason: str) -> None:
        with self.monitor:
            version = load.version
            if version.placement is not None and not version.resident:
                self.device.remove(version)
            self.load_failures += 1
            self._wanted.pop(version, None)
            if not version.resident:
                version.failure = reason
            self._record(EventType.FAILED, version, reason)
            self._end(load, _load_failed(version, reason))

    # Evictions and ends

    def evict(self, version: Version, tier: Tier) -> None:
        """Takes a version out of a tier; out of host memory means out of both.

        Errors: FailedPreconditionError (pinned, in use, or a load is under way), UnavailableError (closed).
        """
        if self._closed:
            raise _closed()
        if not (version.is_in(tier) or version.is_in(Tier.DEVICE) or version.load is not None):
            return
        busy = self._why_busy(version, tier)
        if busy:
            raise FailedPreconditionError(f"{version} cannot be evicted: {busy}", reason="ADAPTER_IN_USE")
        if version.resident:
            self._evict_from_device(version, "by an administrator")
        if tier is Tier.HOST and version.host is not None:
            self._evict_from_host(version, "by an administrator")
        self._room_appeared()

    def end_hold(self, version: Version) -> None:
        """An administrator no longer keeps the version where it is."""
        version.holds -= 1
        self._room_appeared()

    def retire(self, version: Version, reason: str = "") -> None:
        """The version is to go when its last lease has ended, which may be now."""
        if not version.draining:
            version.draining = True
            self._record(EventType.DRAINING, version, reason)
        self._wanted.pop(version, None)
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
            self._wanted.clear()
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
        return {lease.adapter for lease in self._leases if lease.slot is None}

    def check_integrity(self, versions: Iterable[Version]) -> None:
        """Asserts that the books of these, which must be all versions there are, agree with each other."""
        known = set(versions)
        self.host.check_integrity(known)
        self.device.check_integrity(known)
        assert {v for v in known if v.load is not None} == self._loading
        assert set(self._asked) == {v for v in known if v.asking}
        held = {version: [0, 0, 0] for version in known}
        for lease in self._leases:
            counts = held[lease.held]
            counts[0] += 1
            counts[1] += lease.slot is not None
            counts[2] += lease.is_asking
            place = lease.held.placement
            assert lease.slot is None or (place is not None and lease.slot == place.slot)
        for version, counts in held.items():
            assert counts == [version.leases, version.running, version.asking], f"{version}: leases {counts}"
            assert version.resident or not (version.running or version.protected), f"{version} runs unloaded"
            assert not version.protected or version.asking
            assert not version.is_forgettable, f"{version} should be gone"
            assert version.failure is None or not version.resident
            assert version.holds >= 0
        assert self._wanted.keys() <= known

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
            version.last_load = load.timings()
            self._record(EventType.LOADED, version, tier=Tier.HOST)

    def _place(self, load: Load, adapter: HostAdapter) -> None:
        """Reserves room on the device, evicting what it takes, and has the copy made."""
        version = load.version
        victims = self.device.find_room(version.num_pages)
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
        self._forget_if_unneeded(version)

    def _serve_wanted(self) -> None:
        """Begins the loads of pinned versions for which there is room now."""
        for version, tier in list(self._wanted.items()):
            if version.is_in(tier):
                self._wanted.pop(version, None)
            elif version.load is not None:
                if tier is Tier.DEVICE:
                    version.load.tier = tier
            elif version.failure is None and self._may_find_room(version, tier):
                self._begin(Load(version, tier))

    def _room_appeared(self) -> None:
        self._serve_wanted()
        if self._asked:
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
        on_device = tier is Tier.DEVICE and self.device.find_room(version.num_pages) is not None
        if on_device or version.host is not None:
            return on_device
        return self.host.find_room(version.manifest.host_bytes) is not None

    def _device_problem(self, version: Version) -> str:
        """Why the version could not come to the device even if all requests ended; empty where it could."""
        pinned, total = self.device.num_pinned_pages, self.device.pages.num_pages
        if version.resident or not total - pinned < version.num_pages <= total:
            return ""
        return (
            f"adapter {version} needs {version.num_pages} rank pages, and {pinned} of the "
            f"{total} on the device are pinned: unpin adapters to make room"
        )

    def _why_busy(self, version: Version, tier: Tier) -> str:
        """What forbids an administrator to evict a version; empty where nothing does."""
        pinned = version.pinned_tier
        if pinned is not None and (pinned is tier or tier is Tier.HOST):
            return f"it is pinned in tier {pinned.name}; unpin it first"
        if version.running or version.protected:
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
            held = self.device.num_slots - self.device.num_free_slots - len(self.device.evictable)
            what = (
                f"a slot and {version.num_pages} rank pages on the device; of {self.device.num_slots} slots, "
                f"{held} are pinned or in use"
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
        self._record(EventType.EVICTED, version, why, tier=Tier.DEVICE)

    def _evict_from_host(self, version: Version, why: str) -> None:
        self.host.remove(version)
        self._record(EventType.EVICTED, version, why, tier=Tier.HOST)

    def _forget_if_unneeded(self, version: Version) -> None:
        if not version.is_forgettable:
            return
        if version.resident:
            self._clear(self.device.remove(version))
        if version.host is not None:
            self.host.remove(version)
        self._gone(version)
        self._room_appeared()

    def _clear(self, slot: int) -> None:
        if not self._closed:
            self._pipeline.clear(slot)


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
