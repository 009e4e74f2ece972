"""Immutable pictures of adapters, slots and tiers, as the API shows them.

Built while the manager's monitor is held, read without it. Times are seconds since the epoch, sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import (
    NO_PINS,
    Adapter,
    AdapterState,
    Eviction,
    LoadTimings,
    Tier,
    Version,
    highest,
)


@dataclass(frozen=True, slots=True)
class VersionView:
    """A version that is not the current one. tiers: where its weights are. pins: where it is pinned."""

    number: int
    digest: str
    source: str
    rank: int
    state: AdapterState
    state_reason: str
    leases: int
    slot: int | None
    tiers: tuple[Tier, ...]
    pins: frozenset[Tier]


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter and its current version (see Adapter in adapters.proto).

    version: 0 where the adapter is not registered: it was only checked, or is being fetched.
    operation: the id of an operation on it; empty for none.
    tiers: where its weights are. pins: where it is pinned.
    slot, pages: where it is resident.
    lru_position: its place in the order of eviction from the device; None where it cannot be evicted.
    device_bytes, host_bytes: what it takes there, or would take.
    """

    name: str
    version: int
    etag: str
    labels: Mapping[str, str]
    manifest: AdapterManifest
    state: AdapterState
    state_reason: str
    operation: str
    tiers: tuple[Tier, ...]
    pins: frozenset[Tier]
    leases: int
    running: int
    slot: int | None
    pages: tuple[int, ...]
    lru_position: int | None
    other_versions: tuple[VersionView, ...]
    host_bytes: int
    device_bytes: int
    create_time: float | None
    update_time: float | None
    last_use_time: float | None
    loads: int
    hits: int
    misses: int
    evictions: int
    last_load: LoadTimings | None
    last_eviction: Eviction | None

    @property
    def pinned_tier(self) -> Tier | None:
        """The highest tier where it is pinned."""
        return highest(self.pins)


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """A page of a list. total_size: how many adapters the filter lets through on all pages."""

    adapters: tuple[AdapterView, ...]
    next_page_token: str
    total_size: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot of the device; adapter is empty where it is free."""

    slot: int
    adapter: str = ""
    version: int = 0
    rank: int = 0
    pages: tuple[int, ...] = ()
    device_bytes: int = 0
    pinned: bool = False
    leases: int = 0
    running: int = 0
    lru_position: int | None = None
    last_use_time: float | None = None
    hits: int = 0
    state: AdapterState | None = None


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Bytes of a tier: in all, taken, taken by what is pinned or in use."""

    total_bytes: int
    used_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """How many more adapters of a rank fit: as things are, with all evictable ones gone, in host memory, and
    pinned on the device."""

    rank: int
    pages: int
    fit_free: int
    fit_available: int
    fit_host: int
    fit_pinned: int


@dataclass(frozen=True, slots=True)
class CapacityView:
    """What the tiers hold. available_slots: those that are free or hold what may be evicted."""

    device: TierCapacity
    host: TierCapacity
    slots: int
    free_slots: int
    available_slots: int
    rank_pages: int
    free_rank_pages: int
    max_lora_rank: int
    by_rank: tuple[RankCapacity, ...]
    registered_adapters: int
    pinned_slots: int
    max_pinned_slots: int
    pinned_rank_pages: int


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Totals since the manager was made, for metrics.

    running, waiting: names of adapters that sequences use, and that requests wait for.
    watches: that are open.
    """

    registered: int
    resident: int
    host_bytes: int
    free_rank_pages: int
    loads: int
    load_failures: int
    evictions: int
    hits: int
    misses: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    watches: int


def adapter_view(
    adapter: Adapter, page_bytes: int, lru_position: int | None, operation: str = ""
) -> AdapterView:
    """The picture of an adapter. page_bytes: of one rank page."""
    version = adapter.current
    slot, pages = _place(version)
    return AdapterView(
        name=adapter.name,
        version=version.number,
        etag=adapter.etag,
        labels=adapter.labels,
        manifest=version.manifest,
        state=version.state,
        state_reason=version.state_reason,
        operation=operation,
        tiers=version.tiers,
        pins=adapter.pins,
        leases=version.leases,
        running=version.running,
        slot=slot,
        pages=pages,
        lru_position=lru_position,
        other_versions=tuple(_version_view(v) for v in adapter.others),
        host_bytes=version.host.nbytes if version.host is not None else version.manifest.host_bytes,
        device_bytes=version.num_pages * page_bytes,
        create_time=adapter.create_time,
        update_time=adapter.update_time,
        last_use_time=version.last_use,
        loads=version.loads,
        hits=version.hits,
        misses=version.misses,
        evictions=version.evictions,
        last_load=version.last_load,
        last_eviction=version.last_eviction,
    )


def preview(name: str, manifest: AdapterManifest, labels: Mapping[str, str], page_bytes: int) -> AdapterView:
    """The picture of an adapter that was checked and is not registered."""
    return AdapterView(
        name=name,
        version=0,
        etag="",
        labels=labels,
        manifest=manifest,
        state=AdapterState.REGISTERED,
        state_reason="checked only, nothing was changed",
        operation="",
        tiers=(),
        pins=NO_PINS,
        leases=0,
        running=0,
        slot=None,
        pages=(),
        lru_position=None,
        other_versions=(),
        host_bytes=manifest.host_bytes,
        device_bytes=manifest.num_pages * page_bytes,
        create_time=None,
        update_time=None,
        last_use_time=None,
        loads=0,
        hits=0,
        misses=0,
        evictions=0,
        last_load=None,
        last_eviction=None,
    )


def slot_view(slot: int, version: Version | None, page_bytes: int, lru_position: int | None) -> SlotView:
    """The picture of a slot and the version that has it, arrived or on its way."""
    if version is None or version.placement is None:
        return SlotView(slot)
    return SlotView(
        slot=slot,
        adapter=version.adapter.name,
        version=version.number,
        rank=version.manifest.rank,
        pages=version.placement.pages,
        device_bytes=len(version.placement.pages) * page_bytes,
        pinned=Tier.DEVICE in version.pins,
        leases=version.leases,
        running=version.running,
        lru_position=lru_position,
        last_use_time=version.last_use,
        hits=version.hits,
        state=version.state,
    )


def _version_view(version: Version) -> VersionView:
    slot, _ = _place(version)
    return VersionView(
        number=version.number,
        digest=version.manifest.digest,
        source=version.manifest.source,
        rank=version.manifest.rank,
        state=version.state,
        state_reason=version.state_reason,
        leases=version.leases,
        slot=slot,
        tiers=version.tiers,
        pins=version.pins,
    )


def _place(version: Version) -> tuple[int | None, tuple[int, ...]]:
    if not version.resident or version.placement is None:
        return None, ()
    return version.placement.slot, version.placement.pages
