"""Pictures of adapters to messages, and fields of requests to arguments."""

from collections.abc import Collection, Mapping, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from deltaplane.v1 import adapters_pb2 as pb
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.ports import RANK_PAGE_ROWS, ServerFigures
from deltaplane_controlplane.versions import AdapterState, Eviction, LoadTimings, Tier
from deltaplane_controlplane.views import (
    AdapterPage,
    AdapterView,
    CapacityView,
    SlotView,
    TierCapacity,
    VersionView,
)
from deltaplane_controlplane.watch import Change, SnapshotEnd, SnapshotItem


def tier_argument(tier: int, field: str = "tier") -> Tier | None:
    """The tier of a request; None where it is not set. Errors: InvalidArgumentError."""
    match tier:
        case pb.ADAPTER_TIER_UNSPECIFIED:
            return None
        case pb.ADAPTER_TIER_HOST:
            return Tier.HOST
        case pb.ADAPTER_TIER_DEVICE:
            return Tier.DEVICE
    raise InvalidArgumentError.for_field(field, f"there is no tier {tier}; host is 1, device is 2")


def update_arguments(request: pb.UpdateAdapterRequest) -> tuple[str | None, Mapping[str, str] | None]:
    """The source and the labels that an update takes; None where the mask leaves them out.

    Errors: InvalidArgumentError (a path that cannot be updated).
    """
    adapter, paths = request.adapter, list(request.update_mask.paths)
    unknown = [path for path in paths if path not in ("source", "labels")]
    if unknown:
        raise InvalidArgumentError.for_field(
            "update_mask", f"{', '.join(unknown)} cannot be updated; source and labels can"
        )
    takes_source = "source" in paths if paths else bool(adapter.source)
    takes_labels = "labels" in paths if paths else bool(adapter.labels)
    return (adapter.source if takes_source else None, dict(adapter.labels) if takes_labels else None)


def to_adapter(view: AdapterView) -> pb.Adapter:
    manifest = view.manifest
    return pb.Adapter(
        name=view.name,
        version=view.version,
        etag=view.etag,
        labels=view.labels,
        source=manifest.source,
        digest=manifest.digest,
        base_model=manifest.base_model,
        state=_state(view.state),
        state_reason=view.state_reason,
        operation=view.operation,
        pinned_tiers=_tiers(view.pins),
        pinned_tier=_tier(view.pinned_tier),
        leases=view.leases,
        running=view.running,
        slot=view.slot,
        pages=view.pages,
        lru_position=view.lru_position,
        other_versions=[_version(version) for version in view.other_versions],
        tiers=_tiers(view.tiers),
        rank=manifest.rank,
        rank_pattern=manifest.rank_pattern,
        alpha=manifest.alpha,
        rslora=manifest.rslora,
        target_modules=manifest.target_modules,
        num_layers=manifest.num_layers,
        features=manifest.features,
        source_bytes=manifest.source_bytes,
        host_bytes=view.host_bytes,
        device_bytes=view.device_bytes,
        create_time=to_time(view.create_time),
        update_time=to_time(view.update_time),
        last_use_time=to_time(view.last_use_time),
        loads=view.loads,
        hits=view.hits,
        misses=view.misses,
        evictions=view.evictions,
        last_load=_timings(view.last_load, manifest.fetch_ms),
        last_eviction=_eviction(view.last_eviction),
    )


def to_list(page: AdapterPage) -> pb.ListAdaptersResponse:
    return pb.ListAdaptersResponse(
        adapters=[to_adapter(view) for view in page.adapters],
        next_page_token=page.next_page_token,
        total_size=page.total_size,
    )


def to_slot(view: SlotView) -> pb.Slot:
    return pb.Slot(
        slot=view.slot,
        adapter=view.adapter,
        version=view.version,
        rank=view.rank,
        pages=view.pages,
        device_bytes=view.device_bytes,
        pinned=view.pinned,
        leases=view.leases,
        running=view.running,
        lru_position=view.lru_position,
        last_use_time=to_time(view.last_use_time),
        hits=view.hits,
        state=_state(view.state),
    )


def to_capacity(view: CapacityView, figures: ServerFigures) -> pb.Capacity:
    return pb.Capacity(
        device=_tier_capacity(view.device),
        host=_tier_capacity(view.host),
        slots=view.slots,
        free_slots=view.free_slots,
        available_slots=view.available_slots,
        rank_page_rows=RANK_PAGE_ROWS,
        rank_pages=view.rank_pages,
        free_rank_pages=view.free_rank_pages,
        max_lora_rank=view.max_lora_rank,
        by_rank=[
            pb.RankCapacity(
                rank=r.rank,
                pages=r.pages,
                fit_free=r.fit_free,
                fit_available=r.fit_available,
                fit_host=r.fit_host,
                fit_pinned=r.fit_pinned,
            )
            for r in view.by_rank
        ],
        kv_pages=figures.kv_pages,
        free_kv_pages=figures.free_kv_pages,
        kv_page_size=figures.kv_page_size,
        registered_adapters=view.registered_adapters,
        pinned_slots=view.pinned_slots,
        max_pinned_slots=view.max_pinned_slots,
        pinned_rank_pages=view.pinned_rank_pages,
        memory=[pb.MemoryShare(purpose=purpose, bytes=n) for purpose, n in figures.memory.items()],
    )


def to_watch(item: SnapshotItem | SnapshotEnd | Change) -> pb.WatchAdaptersResponse:
    if isinstance(item, SnapshotItem):
        return pb.WatchAdaptersResponse(
            type=pb.ADAPTER_EVENT_TYPE_SNAPSHOT,
            adapter=to_adapter(item.adapter),
            version=item.adapter.version,
        )
    if isinstance(item, SnapshotEnd):
        return pb.WatchAdaptersResponse(
            type=pb.ADAPTER_EVENT_TYPE_SNAPSHOT_END, resume_token=item.resume_token
        )
    event = item.event
    return pb.WatchAdaptersResponse(
        type=pb.AdapterEventType.Value(f"ADAPTER_EVENT_TYPE_{event.type.name}"),
        adapter=to_adapter(event.adapter),
        version=event.version,
        reason=event.reason,
        event_time=to_time(event.time),
        resume_token=event.resume_token,
        left_filter=item.left_filter,
    )


def _version(view: VersionView) -> pb.AdapterVersion:
    return pb.AdapterVersion(
        version=view.number,
        digest=view.digest,
        state=_state(view.state),
        state_reason=view.state_reason,
        leases=view.leases,
        slot=view.slot,
        tiers=_tiers(view.tiers),
        pinned_tiers=_tiers(view.pins),
        rank=view.rank,
        source=view.source,
    )


_STATES = {state: pb.AdapterState.Value(f"ADAPTER_STATE_{state.name}") for state in AdapterState}
_TIERS = {tier: pb.AdapterTier.Value(f"ADAPTER_TIER_{tier.name}") for tier in Tier}


def _state(state: AdapterState | None) -> "pb.AdapterState.ValueType":
    return pb.ADAPTER_STATE_UNSPECIFIED if state is None else _STATES[state]


def _tier(tier: Tier | None) -> "pb.AdapterTier.ValueType":
    return pb.ADAPTER_TIER_UNSPECIFIED if tier is None else _TIERS[tier]


def _tiers(tiers: Collection[Tier]) -> Sequence["pb.AdapterTier.ValueType"]:
    """In order. Most adapters of a long list are in none."""
    return [_TIERS[tier] for tier in Tier if tier in tiers] if tiers else ()


def _tier_capacity(tier: TierCapacity) -> pb.TierCapacity:
    return pb.TierCapacity(
        total_bytes=tier.total_bytes, used_bytes=tier.used_bytes, held_bytes=tier.held_bytes
    )


def _timings(timings: LoadTimings | None, fetch_ms: float) -> pb.LoadTimings | None:
    if timings is None:
        return None
    return pb.LoadTimings(
        queue_ms=timings.queue_ms,
        read_ms=timings.read_ms,
        pack_ms=timings.pack_ms,
        copy_ms=timings.copy_ms,
        fetch_ms=fetch_ms,
        end_time=to_time(timings.end),
    )


def _eviction(eviction: Eviction | None) -> pb.Eviction | None:
    if eviction is None:
        return None
    return pb.Eviction(tier=_tier(eviction.tier), reason=eviction.reason, time=to_time(eviction.time))


def to_time(seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp
