"""Drawing tokens over the vocabulary of Llama 3, for batches of rows that are all drawn in one way, or mixed.

    python -m bench.sampling_kernels

Logits are normal: of standard deviation 1, as random weights give them, where top-p keeps tens of thousands
of tokens; and of 4, where it keeps hundreds. Calls are captured in a CUDA graph and replayed; microseconds
are of one, the median. GB/s is of reading the logits once. Host is what one Sampler.sample() of the batch
takes of the host's time, outside a graph. Needs an NVIDIA GPU; takes less than 40 s.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from bench import report
from bench.graph_timing import microseconds
from deltaplane_kernels.sampling import Draws, draw
from deltaplane_server.execution.sampler import Sampler
from deltaplane_server.scheduling.sampling_params import SamplingParams, StopParams
from deltaplane_server.scheduling.sequence import Sequence

VOCAB = 128256
ROWS = [1, 64, 256]
SPREADS = [1.0, 4.0]
GPU = torch.device("cuda")

GREEDY = {"temperature": 0.0}
TEMPERATURE = {"temperature": 0.8}
TOP_K = {"top_k": 50}
TOP_P = {"top_p": 0.9}
ALL_THREE = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
WAYS: dict[str, list[Mapping[str, Any]]] = {
    "greedy": [GREEDY],
    "temperature": [TEMPERATURE],
    "top_k=50": [TOP_K],
    "top_p=0.9": [TOP_P],
    "mixed": [GREEDY, TEMPERATURE, TOP_K, TOP_P, ALL_THREE],
}
"""Rows take turns."""


@dataclass(frozen=True)
class Timing:
    """us: microseconds of a draw on the GPU. gb_s: logits over that. host_us: microseconds of sample()."""

    us: float
    gb_s: float
    host_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="logits of one spread only")
    spreads = SPREADS[:1] if parser.parse_args().quick else SPREADS
    torch.manual_seed(0)
    timings = {
        f"{way} {rows} x std {spread:g}": _measure(rows, spread, options)
        for spread in spreads
        for way, options in WAYS.items()
        for rows in ROWS
    }
    report.print_table(
        f"{VOCAB} logits a row, float32",
        ("rows", "us", "GB/s", "host us"),
        [(name, f"{t.us:.1f}", f"{t.gb_s:.0f}", f"{t.host_us:.0f}") for name, t in timings.items()],
    )
    path = report.write(
        "sampling-kernels", {"vocab_size": VOCAB}, {name: asdict(t) for name, t in timings.items()}
    )
    print(f"written to {path}")


def _measure(rows: int, spread: float, options: list[Mapping[str, Any]]) -> Timing:
    logits = torch.randn(rows, VOCAB, device=GPU) * spread
    params = [SamplingParams(seed=row, **options[row % len(options)]) for row in range(rows)]
    us = microseconds([partial(draw, logits, _draws(params))] * 10)
    return Timing(us, logits.nbytes / us / 1e3, _host_time(logits, params))


def _draws(params: list[SamplingParams]) -> Draws:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=GPU)

    return Draws(
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        torch.randint(1 << 62, (len(params),), device=GPU) * 4,
    )


def _host_time(logits: torch.Tensor, params: list[SamplingParams]) -> float:
    """Microseconds until sample() returns, the median of 20 calls, each with the GPU at rest."""
    sampler = Sampler()
    sequences = [
        Sequence(row, str(row), 0, [0], 1, sampling, StopParams(max_tokens=9))
        for row, sampling in enumerate(params)
    ]
    times = []
    for _ in range(22):
        torch.cuda.synchronize()
        before = time.perf_counter()
        sampler.sample(logits, sequences)
        times.append(time.perf_counter() - before)
    return statistics.median(times[2:]) * 1e6


if __name__ == "__main__":
    main()
