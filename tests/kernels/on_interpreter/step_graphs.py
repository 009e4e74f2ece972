"""Steps through graphs against steps that are launched kernel by kernel: the same engine, the same tokens.

A graph is stood in for by what it was captured from, which is computed again at each replay: so the buckets,
the padding and all that is filled in for a step are those of a GPU, on Triton's interpreter.
test_ops_triton.py runs this file.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bench.decode import NoText
from bench.random_model import TINY, RandomWeights
from deltaplane_kernels.linear import BaseProduct
from deltaplane_server.engine.api import FinishReason, GenerationRequest, SilentObserver
from deltaplane_server.engine.engine import Engine
from deltaplane_server.execution.graphs.decode_graphs import DecodeGraphs
from deltaplane_server.execution.graphs.graph_set import GraphInputs
from deltaplane_server.execution.graphs.prompt_graphs import PromptGraphs, step_sizes
from deltaplane_server.execution.graphs.recorder import GraphRecorder
from deltaplane_server.execution.graphs.step_graphs import StepGraphs, max_graph_tokens
from deltaplane_server.execution.kv_cache import KVCache
from deltaplane_server.execution.runner import ModelRunner
from deltaplane_server.execution.token_feed import TokenFeed
from deltaplane_server.models.decoder import Decoder
from deltaplane_server.scheduling.plan import NO_SLOT
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler
from deltaplane_server.scheduling.scheduler_config import SchedulerConfig
from fake_leases import FakeAdapters, FakeLease
from kernel_by_kernel import KernelByKernel

CPU = torch.device("cpu")
SEQUENCES, STEP_TOKENS, NUM_PAGES = 4, 100, 8
PROMPTS = (31, 47, 31, 15, 33, 66, 50)
"""Tokens; longer than a step together, so that there are chunks, and chunks beside decodes; and too long for
all pages."""


class Rerun:
    """A graph."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._compute()


@dataclass
class RerunRecorder(GraphRecorder):
    graphs: list[Rerun] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def record(self, compute: Callable[[], None], *, warm_up: bool) -> Any:
        self.graphs.append(Rerun(compute))
        return self.graphs[-1]


class ScalingPool(KernelByKernel):
    """Multiplies the rows of slot s by 1.125 + s / 8 in every packed linear: those of the last step."""

    side = None

    def __init__(self) -> None:
        self._segments: Sequence[tuple[Any, int]] = ()

    def step(self, segments: Sequence[tuple[Any, int]]) -> "ScalingPool | None":
        if all(slot == NO_SLOT for slot, _ in segments):
            return None
        self._segments = list(segments)
        return self

    def graph_step(self, num_tokens: int) -> "ScalingPool":
        return self

    def base_product(self, layer: int, linear: str, x: torch.Tensor, base: BaseProduct) -> torch.Tensor:
        return base(x)

    def add_delta(self, layer: int, linear: str, x: torch.Tensor, y: torch.Tensor) -> None:
        row = 0
        for slot, count in self._segments:
            if slot != NO_SLOT:
                y[row : row + count] *= 1.125 + slot / 8
            row += count


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(TINY, RandomWeights(TINY, torch.float32), torch.float32, CPU)


def make_runner(decoder: Decoder, pool: ScalingPool, recorder: RerunRecorder | None) -> ModelRunner:
    """recorder: None launches each kernel. Pages hold NaN until they are written."""
    cache = KVCache(TINY, num_pages=NUM_PAGES, page_size=16, dtype=torch.float32, device=CPU)
    cache.pages.fill_(torch.nan)
    most = max_graph_tokens(SEQUENCES, STEP_TOKENS)
    feed = TokenFeed(most, most, CPU)
    graphs = None
    if recorder is not None:
        inputs = GraphInputs(decoder, cache, feed, pool)
        prompts = PromptGraphs(inputs, recorder, max_num_seqs=SEQUENCES, max_step_tokens=STEP_TOKENS)
        graphs = StepGraphs(DecodeGraphs(inputs, recorder, max_num_seqs=SEQUENCES), prompts)
    return ModelRunner(decoder, cache, feed, pool, graphs)


class Preemptions(SilentObserver):
    count = 0

    def on_preemption(self) -> None:
        self.count += 1


def outputs(runner: ModelRunner) -> list[list[int]]:
    """The tokens of a request for each of PROMPTS, base and adapters in turn, of which two are aborted after
    the third step; of the base's requests again; and of one of them twice: the prefix cache has it then."""
    config = SchedulerConfig(SEQUENCES, STEP_TOKENS, 512, NUM_PAGES, enable_prefix_caching=True)
    observer = Preemptions()
    engine = Engine(Scheduler(config), runner, NoText(), max_waiting=100, observer=observer)
    leases = FakeAdapters(num_slots=2)
    leases.load(1)
    leases.load(2)
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(length)] for length in PROMPTS]
    adapters = [number % 3 for number in range(len(prompts))]
    made = run(engine, prompts, [leases.lease(adapter) if adapter else None for adapter in adapters], (1, 4))
    of_the_base = [prompt for prompt, adapter in zip(prompts, adapters, strict=True) if not adapter]
    for again in (of_the_base, of_the_base[:1], of_the_base[:1]):
        made += run(engine, again, [None] * len(again), ())
    assert observer.count
    assert engine.stats().prefix_cache_hits
    engine.check_integrity()
    return made


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    leases: Sequence[FakeLease | None],
    aborted: Sequence[int],
) -> list[list[int]]:
    """Every third request is greedy."""
    made: list[list[int]] = [[] for _ in prompts]
    for number, (prompt, lease) in enumerate(zip(prompts, leases, strict=True)):
        sampling = SamplingParams(temperature=(number % 3) * 0.5, seed=number)
        stop = StopParams(max_tokens=3 + number % 3)
        engine.submit(GenerationRequest(str(number), prompt, sampling, stop, lease=lease))
    left, steps = len(prompts), 0
    while left:
        for delta in engine.step():
            made[int(delta.request_id)] += delta.token_ids
            left -= delta.finish is not None
            assert delta.finish is None or delta.finish.reason is not FinishReason.ERROR
        steps += 1
        if steps == 3:
            for number in aborted:
                engine.abort(str(number))
    return made


def test_graphs_give_the_tokens_of_kernels_one_by_one(decoder: Decoder) -> None:
    recorder = RerunRecorder()
    through_graphs = outputs(make_runner(decoder, ScalingPool(), recorder))
    assert through_graphs == outputs(make_runner(decoder, ScalingPool(), None))
    prompts = recorder.graphs[: 2 * len(step_sizes(STEP_TOKENS))]
    assert all(graph.num_replays for graph in prompts)
