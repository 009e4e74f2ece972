"""What deltactl tells about adapters, slots, memory, the model and requests."""

from collections.abc import Callable, Iterable, Mapping

from deltaplane.cli.show import age, moment, pairs, print_facts, print_table, size
from deltaplane.v1.adapters_pb2 import (
    Adapter,
    AdapterState,
    AdapterTier,
    AdapterVersion,
    Capacity,
    Eviction,
    LoadTimings,
    RankCapacity,
    Slot,
    TierCapacity,
)
from deltaplane.v1.generation_pb2 import Model, Usage
from deltaplane.v1.operations_pb2 import Operation, OperationKind, OperationState

_ADAPTER: Mapping[str, Callable[[Adapter], object]] = {
    "name": lambda adapter: adapter.name,
    "version": lambda adapter: adapter.version,
    "state": lambda adapter: state(adapter.state),
    "pinned": lambda adapter: tiers(adapter.pinned_tiers),
    "rank": lambda adapter: adapter.rank,
    "slot": lambda adapter: adapter.slot if adapter.HasField("slot") else "",
    "leases": lambda adapter: adapter.leases,
    "running": lambda adapter: adapter.running,
    "lru": lambda adapter: adapter.lru_position if adapter.HasField("lru_position") else "",
    "hits": lambda adapter: adapter.hits,
    "misses": lambda adapter: adapter.misses,
    "size": lambda adapter: size(adapter.device_bytes),
    "last use": lambda adapter: age(adapter.last_use_time),
    "operation": lambda adapter: adapter.operation,
    "reason": lambda adapter: adapter.state_reason,
}

_OTHER_VERSION: Mapping[str, Callable[[AdapterVersion], object]] = {
    "other version": lambda version: version.version,
    "state": lambda version: state(version.state),
    "leases": lambda version: version.leases,
    "in": lambda version: tiers(version.tiers),
    "pinned": lambda version: tiers(version.pinned_tiers),
    "slot": lambda version: version.slot if version.HasField("slot") else "",
    "digest": lambda version: version.digest,
    "reason": lambda version: version.state_reason,
}

_OPERATION: Mapping[str, Callable[[Operation], object]] = {
    "operation": lambda operation: operation.id,
    "call": lambda operation: OperationKind.Name(operation.kind).removeprefix("OPERATION_KIND_").lower(),
    "adapter": lambda operation: operation.adapter,
    "state": lambda operation: OperationState.Name(operation.state).removeprefix("OPERATION_STATE_"),
    "stage": lambda operation: _progress(operation),
    "begun": lambda operation: age(operation.create_time),
    "ended": lambda operation: age(operation.end_time),
    "error": lambda operation: operation.error.message,
}

_SLOT: Mapping[str, Callable[[Slot], object]] = {
    "slot": lambda slot: slot.slot,
    "adapter": lambda slot: slot.adapter or "(free)",
    "version": lambda slot: slot.version or "",
    "state": lambda slot: state(slot.state) if slot.adapter else "",
    "rank": lambda slot: slot.rank or "",
    "pages": lambda slot: len(slot.pages) or "",
    "size": lambda slot: size(slot.device_bytes) if slot.adapter else "",
    "pinned": lambda slot: "yes" if slot.pinned else "",
    "leases": lambda slot: slot.leases if slot.adapter else "",
    "running": lambda slot: slot.running if slot.adapter else "",
    "lru": lambda slot: slot.lru_position if slot.HasField("lru_position") else "",
    "hits": lambda slot: slot.hits if slot.adapter else "",
    "last use": lambda slot: age(slot.last_use_time),
}

_RANK: Mapping[str, Callable[[RankCapacity], object]] = {
    "rank": lambda rank: rank.rank,
    "rank pages": lambda rank: rank.pages,
    "fit at once": lambda rank: rank.fit_free,
    "fit with eviction": lambda rank: rank.fit_available,
    "fit in host memory": lambda rank: rank.fit_host,
    "may be pinned": lambda rank: rank.fit_pinned,
}

_USAGE: Mapping[str, Callable[[tuple[str, Usage]], object]] = {
    "answered by": lambda row: row[0],
    "prompt": lambda row: row[1].prompt_tokens,
    "output": lambda row: row[1].completion_tokens,
    "queue ms": lambda row: f"{row[1].queue_ms:.1f}",
    "TTFT ms": lambda row: f"{row[1].queue_ms + row[1].prefill_ms:.1f}",
    "tokens/s": lambda row: _rate(row[1]),
    "adapter": lambda row: ("hit" if row[1].adapter_hit else "miss") if row[1].adapter else "",
    "load ms": lambda row: f"{row[1].adapter_load_ms:.1f}" if row[1].adapter else "",
}


def show_adapters(adapters: Iterable[Adapter]) -> None:
    """A line for each adapter."""
    print_table(_ADAPTER, adapters)


def show_slots(slots: Iterable[Slot]) -> None:
    """A line for each slot, free ones too."""
    print_table(_SLOT, slots)


def show_usage(rows: Iterable[tuple[str, Usage]]) -> None:
    """What requests cost, a line each, after the name of who answered."""
    print_table(_USAGE, rows)


def show_adapter(adapter: Adapter) -> None:
    """All about one adapter."""
    print_facts(
        {
            "name": adapter.name,
            "version": adapter.version,
            "state": state(adapter.state),
            "reason": adapter.state_reason,
            "operation": adapter.operation,
            "source": adapter.source,
            "digest": adapter.digest,
            "base model": adapter.base_model,
            "labels": pairs(adapter.labels),
            "etag": adapter.etag,
            "rank": adapter.rank,
            "rank by module": pairs(adapter.rank_pattern),
            "alpha": f"{adapter.alpha:g}" + (" (rsLoRA)" if adapter.rslora else ""),
            "modules": " ".join(adapter.target_modules),
            "layers": adapter.num_layers,
            "features": " ".join(adapter.features),
            "in": tiers(adapter.tiers),
            "slot": adapter.slot if adapter.HasField("slot") else "",
            "rank pages": " ".join(map(str, adapter.pages)),
            "pinned": tiers(adapter.pinned_tiers),
            "requests": f"{adapter.leases} hold it, {adapter.running} sequences run",
            "lru": adapter.lru_position if adapter.HasField("lru_position") else "",
            "files": size(adapter.source_bytes),
            "host memory": size(adapter.host_bytes),
            "device memory": size(adapter.device_bytes),
            "registered": moment(adapter.create_time),
            "changed": moment(adapter.update_time),
            "last use": moment(adapter.last_use_time),
            "use": f"{adapter.hits} hits, {adapter.misses} misses",
            "moves": f"{adapter.loads} loads, {adapter.evictions} evictions",
            "last load": _load(adapter.last_load) if adapter.HasField("last_load") else "",
            "last eviction": _eviction(adapter.last_eviction) if adapter.HasField("last_eviction") else "",
        }
    )
    if adapter.other_versions:
        print_table(_OTHER_VERSION, adapter.other_versions)


def show_capacity(capacity: Capacity) -> None:
    """What each tier holds, and how many more adapters fit."""
    print_facts(
        {
            "slots": f"{capacity.free_slots} free, {capacity.available_slots} available, of {capacity.slots}",
            "pins": f"{capacity.pinned_slots} of {capacity.max_pinned_slots} slots, "
            f"{capacity.pinned_rank_pages} rank pages",
            "rank pages": f"{capacity.free_rank_pages} free of {capacity.rank_pages}, "
            f"{capacity.rank_page_rows} rows each",
            "KV pages": f"{capacity.free_kv_pages} free of {capacity.kv_pages}, "
            f"{capacity.kv_page_size} tokens each",
            "device": _tier_capacity(capacity.device),
            "host": _tier_capacity(capacity.host),
            "adapters": f"{capacity.registered_adapters} registered, rank {capacity.max_lora_rank} at most",
            "memory": ", ".join(f"{share.purpose} {size(share.bytes)}" for share in capacity.memory),
        }
    )
    print_table(_RANK, capacity.by_rank)


def show_model(model: Model) -> None:
    """The base model and its limits."""
    print_facts(
        {
            "name": model.name,
            "architecture": model.architecture,
            "runs in": f"{model.dtype} on {model.device}",
            "length": f"{model.max_model_len} tokens",
            "vocabulary": f"{model.vocab_size} tokens",
            "shape": f"{model.num_layers} layers of {model.hidden_size}",
            "end tokens": " ".join(map(str, model.eos_token_ids)),
            "chat template": "yes" if model.has_chat_template else "no",
            "adapters": f"{model.max_loras} at once, rank {model.max_lora_rank} at most",
            "added up": f"{model.max_composition_rows} rank rows at most",
            "KV pages": f"{model.kv_pages} of {model.kv_page_size} tokens",
            "most outputs": model.max_outputs,
            "most logprobs": model.max_logprobs,
            "most stop texts": f"{model.max_stop_strings} of {model.max_stop_string_length} characters",
            "server version": model.server_version,
        }
    )


def state(value: "AdapterState.ValueType") -> str:
    """The name of a state."""
    return AdapterState.Name(value).removeprefix("ADAPTER_STATE_")


def tier(value: "AdapterTier.ValueType") -> str:
    """The name of a tier; empty for none."""
    name = AdapterTier.Name(value).removeprefix("ADAPTER_TIER_").lower()
    return "" if name == "unspecified" else name


def tiers(values: Iterable["AdapterTier.ValueType"]) -> str:
    """The names of tiers."""
    return " ".join(map(tier, values))


def show_operations(operations: Iterable[Operation]) -> None:
    """A line for each operation."""
    print_table(_OPERATION, operations)


def show_operation(operation: Operation) -> None:
    """All about one operation, the adapter that it ended with too."""
    print_facts({name: value(operation) for name, value in _OPERATION.items()})
    if operation.HasField("adapter_result"):
        show_adapter(operation.adapter_result)


def _progress(operation: Operation) -> str:
    progress = operation.progress
    if not progress.done_bytes:
        return progress.stage
    total = f" of {size(progress.total_bytes)}" if progress.HasField("total_bytes") else ""
    return f"{progress.stage} {size(progress.done_bytes)}{total}"


def _rate(usage: Usage) -> str:
    """Tokens per second after the first token."""
    return f"{1000 * (usage.completion_tokens - 1) / usage.decode_ms:.1f}" if usage.decode_ms else ""


def _load(load: LoadTimings) -> str:
    fetched = f", {load.fetch_ms:.1f} fetched before" if load.fetch_ms else ""
    return (
        f"{load.queue_ms:.1f} ms queued, {load.read_ms:.1f} read, {load.pack_ms:.1f} packed, "
        f"{load.copy_ms:.1f} copied{fetched}"
    )


def _eviction(eviction: Eviction) -> str:
    return f"from {tier(eviction.tier)} at {moment(eviction.time)}: {eviction.reason}"


def _tier_capacity(tier: TierCapacity) -> str:
    return (
        f"{size(tier.used_bytes)} used of {size(tier.total_bytes)}, {size(tier.held_bytes)} pinned or in use"
    )
