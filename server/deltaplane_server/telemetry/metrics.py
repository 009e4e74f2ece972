"""What happens in the engine, for Prometheus."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from deltaplane_server.engine.api import FinishReason, GenerationRequest, Usage
from deltaplane_server.telemetry.histogram import SingleWriterHistogram

_TTFT_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
_ITL_SECONDS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5
)  # fmt: skip
_STEP_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_ADAPTERS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class EngineMetrics:
    """An EngineObserver: called by the engine thread, once or twice for each token, and quick at that."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"deltaplane_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"deltaplane_{name}", text, buckets=buckets, registry=registry)

        ProcessCollector(registry=registry)
        self._ttft = histogram(
            "time_to_first_token_seconds", "From acceptance to first token.", _TTFT_SECONDS
        )
        self._itl = SingleWriterHistogram(
            "deltaplane_inter_token_latency_seconds",
            "Between two tokens of an output.",
            buckets=_ITL_SECONDS,
            registry=registry,
        )
        self._queue = histogram("queue_seconds", "From acceptance to the first step.", _TTFT_SECONDS)
        self._step = histogram("step_seconds", "How long steps took.", _STEP_SECONDS)
        self._step_tokens = histogram("step_tokens", "Tokens of a step.", _TOKENS)
        self._step_adapters = histogram("step_adapters", "Distinct adapters of a step.", _ADAPTERS)
        self._preemptions = counter("preemptions", "Times that a sequence gave its KV pages up.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = counter("prompt_cached_tokens", "Those of them found in the prefix cache.")
        self._generation_tokens = counter("generation_tokens", "Output tokens of finished requests.")
        self._finished = counter("requests_finished", "Finished requests, by reason.", ["reason"])
        for reason in FinishReason:
            self._finished.labels(reason.value)

    def on_step(self, *, seconds: float, num_tokens: int, num_decodes: int, num_adapters: int) -> None:
        self._step.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_adapters.observe(num_adapters)

    def on_first_token(self, *, adapter: str, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_inter_token(self, *, seconds: float) -> None:
        self._itl.observe(seconds)

    def on_preemption(self) -> None:
        self._preemptions.inc()

    def on_finish(self, *, request: GenerationRequest, usage: Usage, reason: FinishReason) -> None:
        self._queue.observe(usage.queue_ms / 1000)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._finished.labels(reason.value).inc()
