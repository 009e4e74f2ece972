"""Prometheus metrics: their names and values, over HTTP as a scraper reads them."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deltaplane_controlplane.versions import AdapterState
from deltaplane_controlplane.views import AdapterStats, CapacityView, SlotView, TierCapacity
from deltaplane_server.engine.api import EngineStats, FinishReason, GenerationRequest, Usage
from deltaplane_server.lifecycle import Lifecycle, Phase
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.telemetry.collectors import AdapterCollector, EngineCollector, VllmCollector
from deltaplane_server.telemetry.histogram import SingleWriterHistogram
from deltaplane_server.telemetry.http import HttpServer
from deltaplane_server.telemetry.metrics import EngineMetrics

ENGINE = EngineStats(
    num_waiting=3,
    num_running=2,
    kv_pages_total=100,
    kv_pages_free=75,
    prefix_cache_queries=40,
    prefix_cache_hits=8,
)
ADAPTERS = AdapterStats(
    registered=9,
    resident=2,
    host_bytes=512,
    free_rank_pages=5,
    loads=4,
    load_failures=1,
    evictions=2,
    hits=11,
    misses=6,
    running=("b", "a"),
    waiting=("c",),
    watches=7,
)
CAPACITY = CapacityView(
    device=TierCapacity(1000, 300, 200),
    host=TierCapacity(2000, 512, 0),
    slots=2,
    free_slots=0,
    available_slots=1,
    rank_pages=8,
    free_rank_pages=5,
    max_lora_rank=16,
    by_rank=(),
    registered_adapters=9,
    pinned_slots=1,
    max_pinned_slots=1,
    pinned_rank_pages=1,
)
STATES = {state: index for index, state in enumerate(reversed(AdapterState), 2)}
SLOTS = [SlotView(0, adapter="a", version=3, rank=8, pinned=True, leases=2), SlotView(1)]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle()


@pytest.fixture
def http(registry: CollectorRegistry, lifecycle: Lifecycle) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, registry, alive=lifecycle.alive, ready=lifecycle.ready)
    yield server
    server.close()


def get(http: HttpServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(http: HttpServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, text = get(http, "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_what_the_engine_tells_is_counted(registry: CollectorRegistry, http: HttpServer) -> None:
    metrics = EngineMetrics(registry)
    request = GenerationRequest("r", (1, 2), SamplingParams(), StopParams(max_tokens=3))
    usage = Usage(
        prompt_tokens=2,
        completion_tokens=3,
        cached_tokens=1,
        queue_ms=15.0,
        prefill_ms=1.0,
        decode_ms=1.0,
        adapters=(),
        adapter_load_ms=0.0,
        preemptions=1,
    )
    metrics.on_step(seconds=0.012, num_tokens=33, num_decodes=1, num_adapters=2)
    metrics.on_first_token(adapter="a", seconds=0.05)
    metrics.on_inter_token(seconds=0.02)
    metrics.on_inter_token(seconds=0.04)
    metrics.on_preemption()
    metrics.on_finish(request=request, usage=usage, reason=FinishReason.LENGTH)
    found = samples(http)
    assert value(found, "deltaplane_step_seconds_count") == 1
    assert value(found, "deltaplane_step_tokens_sum") == 33
    assert value(found, "deltaplane_step_adapters_sum") == 2
    assert value(found, "deltaplane_time_to_first_token_seconds_sum") == pytest.approx(0.05)
    assert value(found, "deltaplane_inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(found, "deltaplane_inter_token_latency_seconds_count") == 2
    assert value(found, "deltaplane_queue_seconds_sum") == pytest.approx(0.015)
    assert value(found, "deltaplane_preemptions_total") == 1
    assert value(found, "deltaplane_prompt_tokens_total") == 2
    assert value(found, "deltaplane_prompt_cached_tokens_total") == 1
    assert value(found, "deltaplane_generation_tokens_total") == 3
    assert value(found, "deltaplane_requests_finished_total", reason="length") == 1
    assert value(found, "deltaplane_requests_finished_total", reason="aborted") == 0
    assert value(found, "process_resident_memory_bytes") > 0


def test_a_histogram_of_one_writer_tells_what_any_other_does() -> None:
    buckets = (0.5, 1, 2)
    texts = []
    for make in (Histogram, SingleWriterHistogram):
        registry = CollectorRegistry()
        histogram = make("seconds", "Of time.", buckets=buckets, registry=registry)
        for value in (0.1, 0.5, 0.7, 1.0, 2.0, 3.0):
            histogram.observe(value)
        families = text_string_to_metric_families(generate_latest(registry).decode())
        texts.append([s for f in families for s in f.samples if not s.name.endswith("_created")])
    assert texts[0] == texts[1]
    assert [s.value for s in texts[1]] == [2, 4, 5, 6, 6, pytest.approx(7.3)]


def test_queues_pages_and_slots_are_read_at_the_scrape(registry: CollectorRegistry, http: HttpServer) -> None:
    registry.register(EngineCollector(lambda: ENGINE))
    registry.register(AdapterCollector(lambda: ADAPTERS, lambda: SLOTS, lambda: CAPACITY, lambda: STATES))
    found = samples(http)
    assert value(found, "deltaplane_requests_running") == 2
    assert value(found, "deltaplane_requests_waiting") == 3
    assert value(found, "deltaplane_kv_pages_total") == 100
    assert value(found, "deltaplane_kv_pages_free") == 75
    assert value(found, "deltaplane_prefix_cache_hits_total") == 8
    assert value(found, "deltaplane_adapters_registered") == 9
    assert value(found, "deltaplane_adapters", state="failed") == 2
    assert value(found, "deltaplane_adapter_loads_total") == 4
    assert value(found, "deltaplane_adapter_load_failures_total") == 1
    assert value(found, "deltaplane_adapter_hits_total") == 11
    assert value(found, "deltaplane_adapter_misses_total") == 6
    assert value(found, "deltaplane_adapter_watches") == 7
    assert value(found, "deltaplane_adapter_evictions_total") == 2
    assert value(found, "deltaplane_adapter_slots_available") == 1
    assert value(found, "deltaplane_adapter_rank_pages_free") == 5
    assert value(found, "deltaplane_adapter_tier_bytes", tier="host", kind="used") == 512
    leases = "deltaplane_adapter_slot_leases"
    assert value(found, leases, slot="0", adapter="a", version="3", pinned="true") == 2
    assert value(found, leases, slot="1", adapter="", version="0", pinned="false") == 0


def test_gateways_find_the_names_that_they_know(registry: CollectorRegistry, http: HttpServer) -> None:
    registry.register(VllmCollector(lambda: ENGINE, lambda: ADAPTERS, "base", 2))
    found = samples(http)
    assert value(found, "vllm:num_requests_running", model_name="base") == 2
    assert value(found, "vllm:num_requests_waiting", model_name="base") == 3
    assert value(found, "vllm:kv_cache_usage_perc", model_name="base") == 0.25
    info = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value(found, "vllm:lora_requests_info", **info) > 1e9


def test_checks_follow_the_life_of_the_server(http: HttpServer, lifecycle: Lifecycle) -> None:
    assert get(http, "/healthz") == (200, "ok\n")
    assert get(http, "/readyz") == (503, "starting\n")
    lifecycle.phase = Phase.SERVING
    assert get(http, "/readyz") == (200, "ok\n")
    lifecycle.phase = Phase.DRAINING
    assert get(http, "/readyz") == (503, "draining\n")
    assert get(http, "/healthz")[0] == 200
    lifecycle.failure = "the engine stopped"
    assert get(http, "/healthz") == (503, "the engine stopped\n")
    assert get(http, "/nowhere")[0] == 404
