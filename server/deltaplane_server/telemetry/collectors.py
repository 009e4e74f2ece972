"""What is true at the moment of a scrape: queues, pages, slots, adapters."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaplane_controlplane.versions import AdapterState
from deltaplane_controlplane.views import AdapterStats, CapacityView, SlotView
from deltaplane_server.engine.api import EngineStats


class EngineCollector(Collector):
    """The queue, the KV pages and the prefix cache."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield _gauge("requests_running", "Sequences that are part of steps.", stats.num_running)
        yield _gauge("requests_waiting", "Sequences that wait for a step.", stats.num_waiting)
        yield _gauge("kv_pages_total", "KV pages in all.", stats.kv_pages_total)
        yield _gauge("kv_pages_free", "KV pages that hold nothing a request needs.", stats.kv_pages_free)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Those of them found.", stats.prefix_cache_hits)


class AdapterCollector(Collector):
    """Tiers, slots and totals of the adapter manager. Names are labels only where slots bound them."""

    def __init__(
        self,
        stats: Callable[[], AdapterStats],
        slots: Callable[[], Sequence[SlotView]],
        capacity: Callable[[], CapacityView],
        count_states: Callable[[], Mapping[AdapterState, int]],
    ) -> None:
        self._stats = stats
        self._slots = slots
        self._capacity = capacity
        self._count_states = count_states

    def collect(self) -> Iterable[Metric]:
        stats, capacity = self._stats(), self._capacity()
        yield _gauge("adapters_registered", "Adapters in the catalogue.", stats.registered)
        yield _gauge("adapters_resident", "Adapters on the device.", stats.resident)
        yield _gauge("adapters_running", "Adapters that sequences use.", len(stats.running))
        yield _gauge("adapters_waiting", "Adapters that requests wait for.", len(stats.waiting))
        yield _counter("adapter_loads", "Loads to the device.", stats.loads)
        yield _counter("adapter_load_failures", "Loads that failed.", stats.load_failures)
        yield _counter("adapter_evictions", "Evictions from the device.", stats.evictions)
        yield _counter("adapter_hits", "Requests that found their adapter on the device.", stats.hits)
        yield _counter("adapter_misses", "Requests that did not.", stats.misses)
        yield _gauge("adapter_watches", "Watches of the control plane that are open.", stats.watches)
        yield _gauge("adapter_slots_total", "Slots in all.", capacity.slots)
        yield _gauge("adapter_slots_free", "Slots that hold nothing.", capacity.free_slots)
        yield _gauge("adapter_slots_available", "Slots free or evictable.", capacity.available_slots)
        yield _gauge("adapter_rank_pages_total", "Rank pages in all.", capacity.rank_pages)
        yield _gauge("adapter_rank_pages_free", "Rank pages that hold nothing.", capacity.free_rank_pages)
        yield self._states()
        yield self._tier_bytes(capacity)
        yield self._slot_info()

    def _states(self) -> Metric:
        family = GaugeMetricFamily("deltaplane_adapters", "Adapters in each state.", labels=["state"])
        for state, count in self._count_states().items():
            family.add_metric([state.value.lower()], count)
        return family

    @staticmethod
    def _tier_bytes(capacity: CapacityView) -> Metric:
        family = GaugeMetricFamily(
            "deltaplane_adapter_tier_bytes", "Bytes of a tier, by what they are.", labels=["tier", "kind"]
        )
        for name, tier in (("device", capacity.device), ("host", capacity.host)):
            family.add_metric([name, "total"], tier.total_bytes)
            family.add_metric([name, "used"], tier.used_bytes)
            family.add_metric([name, "held"], tier.held_bytes)
        return family

    def _slot_info(self) -> Metric:
        family = GaugeMetricFamily(
            "deltaplane_adapter_slot_leases",
            "Requests that hold the adapter of a slot.",
            labels=["slot", "adapter", "version", "pinned"],
        )
        for slot in self._slots():
            labels = [str(slot.slot), slot.adapter, str(slot.version), str(slot.pinned).lower()]
            family.add_metric(labels, slot.leases)
        return family


class VllmCollector(Collector):
    """The names that the Gateway API Inference Extension and llm-d read of every model server."""

    def __init__(
        self,
        engine: Callable[[], EngineStats],
        adapters: Callable[[], AdapterStats],
        model_name: str,
        max_loras: int,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._model_name = model_name
        self._max_loras = max_loras

    def collect(self) -> Iterable[Metric]:
        engine = self._engine()
        used = 1 - engine.kv_pages_free / engine.kv_pages_total
        yield self._of_model("num_requests_running", "Running requests.", engine.num_running)
        yield self._of_model("num_requests_waiting", "Waiting requests.", engine.num_waiting)
        yield self._of_model("kv_cache_usage_perc", "Share of KV pages in use.", used)
        yield self._lora_requests_info()

    def _of_model(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _lora_requests_info(self) -> Metric:
        adapters = self._adapters()
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running, waiting = (",".join(sorted(names)) for names in (adapters.running, adapters.waiting))
        family.add_metric([str(self._max_loras), running, waiting], time.time())
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"deltaplane_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"deltaplane_{name}", text, value=value)
