"""What running streams feel of adapters that are loaded beside them: one process, no network, random weights.

    python -m bench.adapter_loads               # Llama-3-8B shapes in bfloat16 on the GPU
    python -m bench.adapter_loads --dora        # adapters of DoRA, whose loads read all weights of the base
    python -m bench.adapter_loads --tiny        # a tiny model on any device, to see that it runs

32 streams of the base model decode: alone, and while every 100 ms the load of a cold adapter begins, of rank
16 on all seven linears, from files in the page cache, on the threads that a server has for it: two that read,
check and pack, and one that copies to the device. The two take turns.

The figures are of the time between two tokens of a stream (ITL), over all streams, and of the loads.
"""

import argparse
import math
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch

from bench import report
from bench.decode import NoText
from bench.random_checkpoint import write_adapters
from bench.random_model import LLAMA_3_8B, TINY, RandomWeights
from deltaplane_controlplane.manager import LOADER_THREADS
from deltaplane_controlplane.ports import rank_pages
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.packing import PackedAdapter
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.config import EngineConfig
from deltaplane_server.engine.api import FinishReason, GenerationRequest
from deltaplane_server.engine.engine import Engine
from deltaplane_server.execution.device import resolve_device
from deltaplane_server.execution.kv_cache import kv_page_bytes
from deltaplane_server.execution.setup import Execution, set_up
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler

RANK = 16
PAGE_SIZE = 16
HOST_CACHE = 8
"""Adapters that stay in host memory, the latest ones."""

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Workload:
    """What streams, for how many tokens of prompt and output, and how many seconds lie between two loads."""

    model: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    streams: int
    prompt: int
    output: int
    interval: float
    repeats: int
    use_dora: bool


@dataclass(frozen=True)
class Latency:
    """Milliseconds between two tokens of a stream."""

    p50: float
    p99: float
    highest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        p50, p99 = (1e3 * report.percentile(seconds, share) for share in (0.5, 0.99))
        return cls(p50, p99, 1e3 * max(seconds))


@dataclass(frozen=True)
class LoadTimes:
    """One load, in milliseconds."""

    read: float
    pack: float
    copy: float


@dataclass(frozen=True)
class Figures:
    """alone, loading: of the streams. loads_per_second: that ended. load: the medians over all loads."""

    alone: Latency
    loading: Latency
    loads_per_second: float
    load: LoadTimes

    @property
    def p99_ratio(self) -> float:
        return self.loading.p99 / self.alone.p99


def main(argv: Sequence[str] | None = None) -> Figures:
    args = _parse(argv)
    work = _workload(args)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        written = write_adapters(Path(folder), work.model, 1, RANK, work.device, use_dora=work.use_dora)
        [adapter] = written.values()
        figures = _measure(work, adapter)
    _show(figures)
    path = report.write(
        "adapter-loads" + "-dora" * args.dora + "-tiny" * args.tiny,
        {
            "hidden_size": work.model.hidden_size,
            "num_layers": work.model.num_layers,
            "dtype": str(work.dtype),
            "device": str(work.device),
            "streams": work.streams,
            "prompt_tokens": work.prompt,
            "output_tokens": work.output,
            "rank": RANK,
            "use_dora": work.use_dora,
            "seconds_between_loads": work.interval,
            "repeats": work.repeats,
        },
        asdict(figures),
    )
    print(f"written to {path}")
    return figures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds from one load to the next")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_const", dest="repeats", const=1, help="one repeat")
    parser.add_argument("--dora", action="store_true", help="adapters of DoRA in place of LoRA")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; default: the first GPU")
    return parser.parse_args(argv)


def _workload(args: argparse.Namespace) -> Workload:
    device = resolve_device(args.device)
    if args.tiny:
        return Workload(TINY, torch.float32, device, 2, 16, 200, 0.01, 1, args.dora)
    if device.type == "cpu":
        raise SystemExit(
            "bench.adapter_loads: torch sees no CUDA device; run it on a GPU machine, or with --tiny"
        )
    return Workload(LLAMA_3_8B, torch.bfloat16, device, 32, 128, 512, args.interval, args.repeats, args.dora)


def _measure(work: Workload, adapter: Path) -> Figures:
    if work.device.type == "cuda":
        torch.set_num_threads(1)  # as a server does
    execution = _set_up(work)
    loader = PeftLoader(
        work.model.adapter_layout(),
        max_lora_rank=RANK,
        dtype=work.dtype,
        base=execution.base,
        host_pages=HostPages(
            (HOST_CACHE + LOADER_THREADS) * _num_pages(work),
            RankPageLayout(work.model.adapter_layout()).page_elements,
            work.dtype,
            pin_memory=work.device.type == "cuda",
        ),
    )
    _stream(work, execution)
    alone: list[float] = []
    loading: list[float] = []
    loads: list[LoadTimes] = []
    seconds = 0.0
    for _ in range(work.repeats):
        alone += _stream(work, execution)
        running = Loads(loader, execution, adapter, work.interval)
        begin = time.perf_counter()
        with running:
            loading += _stream(work, execution)
        seconds += time.perf_counter() - begin
        loads += running.ended
    if not loads:
        raise SystemExit("bench.adapter_loads: no load ended before the streams did")
    medians = zip(*((one.read, one.pack, one.copy) for one in loads), strict=True)
    return Figures(
        Latency.of(alone),
        Latency.of(loading),
        len(loads) / seconds,
        LoadTimes(*(statistics.median(values) for values in medians)),
    )


def _set_up(work: Workload) -> Execution:
    pages = work.streams * math.ceil((work.prompt + work.output) / PAGE_SIZE)
    config = EngineConfig(
        model="random",
        served_model_name="random",
        max_num_seqs=work.streams,
        max_num_batched_tokens=work.streams * work.prompt,
        page_size=PAGE_SIZE,
        # The scheduler keeps one page in a hundred spare before it starts a sequence.
        kv_cache_bytes=(pages + pages // 50 + 2) * kv_page_bytes(work.model, PAGE_SIZE, work.dtype),
        max_loras=1,
        max_lora_rank=RANK,
        adapter_pages=_num_pages(work),
    )
    weights = RandomWeights(work.model, work.dtype)
    return set_up(config, work.model, weights, work.dtype, work.device)


def _num_pages(work: Workload) -> int:
    """Of an adapter. DoRA has a row more than its rank; this base has no biases."""
    return rank_pages(RANK + work.use_dora)


class Loads:
    """Begins to load the adapter at each interval, inside the block; evicts it from the device at once.

    ended: the loads that have ended.
    """

    def __init__(self, loader: PeftLoader, execution: Execution, adapter: Path, interval: float) -> None:
        self.ended: list[LoadTimes] = []
        self._loader = loader
        self._pool = execution.pool
        self._manifest = loader.inspect(adapter)
        self._interval = interval
        self._host_cache: deque[PackedAdapter] = deque(maxlen=HOST_CACHE)
        self._packers = ThreadPoolExecutor(LOADER_THREADS)
        self._device = ThreadPoolExecutor(1)
        self._loads: list[Future[None]] = []
        self._stopped = threading.Event()
        self._clock = threading.Thread(target=self._begin_loads)

    def __enter__(self) -> None:
        self._clock.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._clock.join()
        self._packers.shutdown()
        self._device.shutdown()
        for load in self._loads:
            load.result()

    def _begin_loads(self) -> None:
        while not self._stopped.wait(self._interval):
            if sum(not load.done() for load in self._loads) < 2 * LOADER_THREADS:
                self._loads.append(self._packers.submit(self._load))

    def _load(self) -> None:
        adapter = self._loader.pack(self._manifest)
        self._host_cache.append(adapter)
        copy_ms = self._device.submit(self._copy, adapter).result()
        self.ended.append(LoadTimes(adapter.read_ms, adapter.pack_ms, copy_ms))

    def _copy(self, adapter: PackedAdapter) -> float:
        begin = time.perf_counter()
        self._pool.copy_in(0, range(self._manifest.num_pages), adapter)
        self._pool.clear(0)
        return (time.perf_counter() - begin) * 1e3


def _stream(work: Workload, execution: Execution) -> list[float]:
    """Runs all streams to their end; the seconds between two tokens of each."""
    rng = random.Random(0)
    engine = Engine(Scheduler(execution.scheduler), execution.runner, NoText(), max_waiting=work.streams)
    for number in range(work.streams):
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_tokens=[rng.randrange(work.model.vocab_size) for _ in range(work.prompt)],
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=work.output),
            )
        )
    latest: dict[str, float] = {}
    gaps: list[float] = []
    finished = 0
    while finished < work.streams:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.token_ids:
                if delta.request_id in latest:
                    gaps.append(now - latest[delta.request_id])
                latest[delta.request_id] = now
            if delta.finish is not None:
                finished += 1
                if delta.finish.reason is not FinishReason.LENGTH:
                    raise SystemExit(f"bench.adapter_loads: a stream ended with {delta.finish}")
    return gaps


def _show(figures: Figures) -> None:
    def line(title: str, latency: Latency) -> list[str]:
        return [title, f"{latency.p50:.2f}", f"{latency.p99:.2f}", f"{latency.highest:.2f}"]

    ratio = figures.loading.p50 / figures.alone.p50, figures.p99_ratio
    rows = [line("alone", figures.alone), line("loading", figures.loading)]
    rows.append(["loading / alone", *(f"{value:.2f}" for value in ratio), ""])
    report.print_table("Milliseconds between two tokens", ["", "p50", "p99", "highest"], rows)
    load = figures.load
    print(
        f"{figures.loads_per_second:.1f} loads a second; of each, in ms: read {load.read:.0f}, "
        f"pack {load.pack:.0f}, copy {load.copy:.1f}"
    )


if __name__ == "__main__":
    main()
