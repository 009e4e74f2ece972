"""Milliseconds per decode step of an engine in one process: no tokenizer, no network, random weights.

    python -m bench.decode                        # Llama-3-8B shapes in bfloat16 on the GPU, all rows
    python -m bench.decode --rows 64,0 64,64      # some rows, by batch and distinct adapters
    python -m bench.decode --busy                 # also how much of the time the GPU works
    python -m bench.decode --kernels              # also which kernels take it
    python -m bench.decode --power                # also the GPU's clock and power
    python -m bench.decode --quick                # fewer tokens
    python -m bench.decode --tiny                 # a tiny model on any device, to see that it runs

B requests come at once, each with a prompt of random tokens; greedy, ends of sequence ignored, no prefix
cache. D distinct adapters on all seven linears go round among them.

    ms per step = (time of the run - time of the same run with one output token) / (output tokens - 1)

"bytes" is what the memory of an H200 (4.26 TB/s, as a copy measures it) allows for what a step must read;
"reach" adds what launches, attention and the LoRA products cannot hide.
"""

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch

from bench import report
from bench.gpu_busy import Busy, gpu_busy
from bench.gpu_kernels import KernelTime, kernels_per_step, table_rows
from bench.gpu_power import Power, gpu_power
from bench.gpu_trace import gpu_trace
from bench.random_model import LLAMA_3_8B, TINY, RandomWeights, random_adapter, step_bytes
from deltaplane_controlplane.ports import rank_pages
from deltaplane_server.config import EngineConfig
from deltaplane_server.engine.api import FinishReason, GenerationRequest
from deltaplane_server.engine.engine import Engine
from deltaplane_server.execution.device import resolve_device
from deltaplane_server.execution.setup import Execution, set_up
from deltaplane_server.interpreter import freeze_heap
from deltaplane_server.models.config import DecoderConfig
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.scheduler import Scheduler

BYTES_PER_MS = 4.26e9
PAGE_SIZE = 16
PROFILED_STEPS = 16

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """A batch of requests over distinct adapters of one rank; without any, LoRA may still be enabled.

    reach: ms per step with Llama-3-8B shapes; None where no figure was set.
    """

    batch: int
    adapters: int
    rank: int = 16
    lora: bool = True
    reach: float | None = None

    @property
    def key(self) -> str:
        """As --rows names it."""
        return f"{self.batch},{self.adapters}"

    @property
    def title(self) -> str:
        if not self.adapters:
            return self.key + (" LoRA enabled" if self.lora else "")
        return self.key + ("" if self.rank == 16 else f" rank {self.rank}")


ROWS: tuple[Row, ...] = (
    Row(1, 0, lora=False, reach=4.2),
    Row(64, 0, lora=False, reach=5.1),
    Row(256, 0, lora=False, reach=9.0),
    Row(1, 1, reach=4.8),
    Row(16, 16, reach=5.4),
    Row(64, 1, reach=5.7),
    Row(64, 8, reach=5.9),
    Row(64, 64, reach=7.0),
    Row(256, 64, reach=12.0),
    Row(64, 64, rank=8, reach=6.3),
    Row(64, 0),
)
TINY_ROWS: tuple[Row, ...] = (Row(2, 0, lora=False), Row(2, 0), Row(3, 2), Row(3, 2, rank=8))


@dataclass(frozen=True)
class Workload:
    """What runs, and for how many tokens of prompt and output.

    busy, power, kernels: whether the GPU is watched, whether its clock and power are, and whether its kernels
        are told apart.
    """

    model: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    prompt: int
    output: int
    repeats: int
    busy: bool = False
    power: bool = False
    kernels: bool = False


@dataclass(frozen=True)
class Figures:
    """Of one row. step_ms, prefill_ms: the median over repeats; all: each repeat's step_ms.

    prefill_ms: of a run with one output token.
    bytes_ms: for the bytes that a step must read.
    busy: of the decodes of a shorter run; None where nobody watched.
    power: of the decodes of a run of its own; None where nobody watched.
    kernels: of a step; None where they were not told apart.
    """

    step_ms: float
    prefill_ms: float
    bytes_ms: float
    all: list[float]
    busy: Busy | None = None
    power: Power | None = None
    kernels: list[KernelTime] | None = None


def main(argv: Sequence[str] | None = None) -> dict[str, Figures]:
    args = _parse(argv)
    work, rows = _workload(args)
    results = _for_all(work, rows, _measure)
    _show(rows, results)
    if work.kernels:  # after all figures: what watches the GPU might still cost something afterwards
        kernels = _for_all(work, rows, _kernels)
        results = {title: replace(figures, kernels=kernels[title]) for title, figures in results.items()}
        _show_kernels(results)
    path = report.write(
        "decode-tiny" if args.tiny else "decode",
        {
            "hidden_size": work.model.hidden_size,
            "num_layers": work.model.num_layers,
            "dtype": str(work.dtype),
            "device": str(work.device),
            "prompt_tokens": work.prompt,
            "output_tokens": work.output,
            "repeats": work.repeats,
        },
        {title: asdict(figures) for title, figures in results.items()},
    )
    print(f"written to {path}")
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="B,D", help="batch and distinct adapters; default: all")
    parser.add_argument("--quick", action="store_true", help="33 output tokens and one repeat")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32")
    parser.add_argument("--busy", action="store_true", help="watch the GPU; nothing without one")
    parser.add_argument("--power", action="store_true", help="watch clock and power; nothing without a GPU")
    parser.add_argument("--kernels", action="store_true", help="time by kernel; nothing without a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; default: the first GPU")
    return parser.parse_args(argv)


def _workload(args: argparse.Namespace) -> tuple[Workload, list[Row]]:
    device = resolve_device(args.device)
    rows = TINY_ROWS if args.tiny else ROWS
    if args.tiny:
        work = Workload(TINY, torch.float32, device, 16, 9, 1)
    elif device.type == "cpu":
        raise SystemExit("bench.decode: torch sees no CUDA device; run it on a GPU machine, or with --tiny")
    else:
        output, repeats = (33, 1) if args.quick else (256, args.repeats)
        work = Workload(
            LLAMA_3_8B,
            torch.bfloat16,
            device,
            prompt=128,
            output=output,
            repeats=repeats,
            busy=args.busy,
            power=args.power,
            kernels=args.kernels,
        )
    known = {row.key for row in rows}
    unknown = [key for key in args.rows or () if key not in known]
    if unknown:
        raise SystemExit(f"bench.decode: no row {' '.join(unknown)}; there are {' '.join(sorted(known))}")
    return work, [row for row in rows if not args.rows or row.key in args.rows]


def measure_rows(work: Workload, rows: list[Row]) -> dict[str, Figures]:
    """Rows of the same setting of LoRA, by title."""
    return _on_one_engine(work, rows, _measure)


def _for_all(
    work: Workload, rows: list[Row], call: Callable[[Workload, Execution, Row], _T]
) -> dict[str, _T]:
    """What is called for each row, by title, on an engine for each setting of LoRA."""
    settings = ([row for row in rows if row.lora == lora] for lora in (False, True))
    answers: dict[str, _T] = {}
    for chosen in filter(None, settings):
        answers |= _on_one_engine(work, chosen, call)
    return answers


def _on_one_engine(
    work: Workload, rows: list[Row], call: Callable[[Workload, Execution, Row], _T]
) -> dict[str, _T]:
    """The same for rows of one setting, on an engine set up for the largest of them."""
    execution = _set_up(work, rows)
    answers = {}
    loaded = 0, 0
    with _frozen_heap():
        for row in rows:
            if row.adapters and loaded != (row.adapters, row.rank):
                loaded = _load(work, execution, row, loaded[0])
            answers[row.title] = call(work, execution, row)
    del execution
    gc.collect()
    if work.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Garbage collection as a server has it: full collections do not go through what is loaded."""
    thresholds = gc.get_threshold()
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _set_up(work: Workload, rows: list[Row]) -> Execution:
    batch = max(row.batch for row in rows)
    pages = batch * math.ceil((work.prompt + work.output) / PAGE_SIZE)
    page_bytes = step_bytes(work.model, work.dtype, batch=1, context=PAGE_SIZE, adapters=0, rank=0)
    page_bytes -= step_bytes(work.model, work.dtype, batch=0, context=0, adapters=0, rank=0)
    adapters = max(row.adapters for row in rows)
    rank = max(row.rank for row in rows)
    config = EngineConfig(
        model="random",
        served_model_name="random",
        max_num_seqs=batch,
        max_num_batched_tokens=max(8192, batch),
        page_size=PAGE_SIZE,
        # The scheduler keeps one page in a hundred spare before it starts a sequence.
        kv_cache_bytes=(pages + pages // 50 + 2) * page_bytes,
        enable_lora=rows[0].lora,
        max_loras=max(adapters, 1),
        max_lora_rank=rank,
        adapter_pages=max(adapters, 1) * rank_pages(rank),
    )
    weights = RandomWeights(work.model, work.dtype)
    return set_up(config, work.model, weights, work.dtype, work.device)


def _load(work: Workload, execution: Execution, row: Row, num_loaded: int) -> tuple[int, int]:
    """Puts the row's adapters into the first slots, in place of what was there."""
    for slot in range(num_loaded):
        execution.pool.clear(slot)
    needed = rank_pages(row.rank)
    for slot in range(row.adapters):
        pages = range(slot * needed, (slot + 1) * needed)
        adapter = random_adapter(work.model, row.rank, work.dtype, work.device)
        execution.pool.copy_in(slot, pages, adapter)
    return row.adapters, row.rank


def _measure(work: Workload, execution: Execution, row: Row) -> Figures:
    _run(work, execution, row, min(work.output, 4))
    prefill, steps = [], []
    for _ in range(work.repeats):
        prefill.append(_run(work, execution, row, 1))
        steps.append((_run(work, execution, row, work.output) - prefill[-1]) / (work.output - 1))
    nbytes = step_bytes(
        work.model,
        work.dtype,
        batch=row.batch,
        context=work.prompt + work.output // 2,
        adapters=row.adapters,
        rank=row.rank,
    )
    busy = gpu_busy(lambda: _run(work, execution, row, min(work.output, 65))) if work.busy else None
    power = gpu_power(lambda: _run(work, execution, row, work.output), work.device) if work.power else None
    figures = Figures(
        step_ms=statistics.median(steps) * 1e3,
        prefill_ms=statistics.median(prefill) * 1e3,
        bytes_ms=nbytes / BYTES_PER_MS,
        all=[step * 1e3 for step in steps],
        busy=busy,
        power=power,
    )
    print(f"{row.title}: {figures.step_ms:.2f} ms per step, prefill {figures.prefill_ms:.0f} ms", flush=True)
    return figures


def _kernels(work: Workload, execution: Execution, row: Row) -> list[KernelTime]:
    """Of steps in the middle of a run, whose context is the mean of the whole."""
    engine = _start(execution, _requests(work, row, work.output))
    for _ in range(work.output // 2):
        engine.step()
    num_steps = min(PROFILED_STEPS, work.output // 4)
    spans = gpu_trace(lambda: [engine.step() for _ in range(num_steps)])
    engine.drain(0.0)
    engine.step()
    return kernels_per_step(spans, num_steps)


def _run(work: Workload, execution: Execution, row: Row, output: int) -> float:
    """Seconds from the first request to the last token."""
    requests = _requests(work, row, output)
    begin = time.perf_counter()
    engine = _start(execution, requests)
    made, finished = 0, 0
    while finished < row.batch:
        for delta in engine.step():
            made += len(delta.token_ids)
            if delta.finish is not None:
                finished += 1
                if delta.finish.reason is not FinishReason.LENGTH:
                    raise SystemExit(f"bench.decode: request {delta.request_id} ended with {delta.finish}")
    seconds = time.perf_counter() - begin
    if made != output * row.batch:
        raise SystemExit(f"bench.decode: {made} tokens were made instead of {output * row.batch}")
    return seconds


def _requests(work: Workload, row: Row, output: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_tokens=[rng.randrange(work.model.vocab_size) for _ in range(work.prompt)],
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=output),
            lease=_ResidentLease(number % row.adapters) if row.adapters else None,
        )
        for number in range(row.batch)
    ]


def _start(execution: Execution, requests: list[GenerationRequest]) -> Engine:
    engine = Engine(Scheduler(execution.scheduler), execution.runner, NoText(), max_waiting=len(requests))
    for request in requests:
        engine.submit(request)
    return engine


class NoText:
    """A TokenDecoder for which every token is a special one."""

    byte_fallback_ids: frozenset[int] = frozenset()
    pieces: Mapping[int, str] = MappingProxyType({})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "" if skip_special_tokens else "." * len(token_ids)


class _ResidentLease:
    """A scheduling.lease.AdapterLease on an adapter that stays in its slot."""

    resident = True
    waits_for_room = False

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.uid = slot + 1

    def activate(self) -> int:
        return self.slot

    def fork(self) -> "_ResidentLease":
        return self

    def deactivate(self) -> None:
        pass

    def release(self) -> None:
        pass


def _show(rows: Sequence[Row], results: dict[str, Figures]) -> None:
    def line(row: Row) -> list[str]:
        figures = results[row.title]
        reach = "" if row.reach is None else f"{row.reach:.1f}"
        share = f"{100 * figures.bytes_ms / figures.step_ms:.0f} %"
        busy, power = figures.busy, figures.power
        return [
            row.title,
            f"{figures.bytes_ms:.2f}",
            reach,
            f"{figures.step_ms:.2f}",
            share,
            f"{figures.prefill_ms:.0f}",
            "" if busy is None else f"{100 * busy.share:.1f} %",
            "" if busy is None else f"{100 * busy.waited:.1f} %",
            "" if power is None else f"{power.watts:.0f}",
            "" if power is None else f"{power.mhz:.0f}",
        ]

    columns = ["B, D", "bytes", "reach", "ours", "of the bytes' speed", "prefill", "GPU busy", "GPU waits"]
    report.print_table("Milliseconds per decode step", [*columns, "W", "MHz"], [line(row) for row in rows])


def _show_kernels(results: dict[str, Figures]) -> None:
    columns = ["", "ms", "calls", "us of a call"]
    for title, figures in results.items():
        lines = table_rows(figures.kernels or [], figures.step_ms)
        report.print_table(f"{title}: kernels of a step", columns, lines)


if __name__ == "__main__":
    main()
