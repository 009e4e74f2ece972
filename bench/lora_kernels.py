"""What LoRA adds to the linears of a step on the GPU: `python -m bench.lora_kernels`.

One CUDA graph holds the products of all packed linears of Llama-3-8B, with random weights; another one holds
the LoRA kernels too. Attention and all else is left out. All adapters have rank 16 on all seven linears, and
memory of their own. It takes less than a minute on an H200.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from bench import report
from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.linear import Linear
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.rank_pages import SliceRows, rank_pages

HIDDEN, KV, INTERMEDIATE, LAYERS = 4096, 1024, 14336, 32
TOKENS = (1, 16, 64, 256, 2048, 8192)
ADAPTERS = (1, 8, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

LAYOUT = AdapterLayout(
    LAYERS,
    (
        PackedLinear(
            "qkv_proj", HIDDEN, (LinearSlice("q", HIDDEN), LinearSlice("k", KV), LinearSlice("v", KV))
        ),
        PackedLinear("o_proj", HIDDEN, (LinearSlice("o", HIDDEN),)),
        PackedLinear(
            "gate_up_proj", HIDDEN, (LinearSlice("gate", INTERMEDIATE), LinearSlice("up", INTERMEDIATE))
        ),
        PackedLinear("down_proj", INTERMEDIATE, (LinearSlice("down", HIDDEN),)),
    ),
)


@dataclass(frozen=True)
class Measurement:
    """Milliseconds of a step. lora_bytes_ms: what reading its adapters once takes at the bandwidth given."""

    tokens: int
    adapters: int
    gemm_ms: float
    with_lora_ms: float
    lora_bytes_ms: float

    @property
    def lora_ms(self) -> float:
        return self.with_lora_ms - self.gemm_ms


class Linears:
    """The base weights, and inputs and outputs of a step."""

    def __init__(self, dtype: torch.dtype, max_tokens: int) -> None:
        def random(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, dtype=dtype, device="cuda").mul_(columns**-0.5)

        self.linears = {
            (layer, linear.name): Linear(random(linear.out_features, linear.in_features))
            for layer in range(LAYERS)
            for linear in LAYOUT.linears
        }
        self.x = {linear.name: random(max_tokens, linear.in_features) for linear in LAYOUT.linears}
        self.y = {linear.name: random(max_tokens, linear.out_features) for linear in LAYOUT.linears}

    def run(self, num_tokens: int, pool: RankPagePool | None) -> None:
        step = pool.graph_step(num_tokens) if pool is not None else None
        for (layer, name), linear in self.linears.items():
            x, y = self.x[name][:num_tokens], self.y[name][:num_tokens]
            if step is None:
                linear(x, y)
            else:
                step.add_delta(layer, name, x, step.base_product(layer, name, x, linear))


def filled_pool(dtype: torch.dtype, rank: int, max_tokens: int) -> RankPagePool:
    """One random adapter, copied into the pages of each slot."""
    pages = rank_pages(rank)
    slots = max(ADAPTERS)
    pool = RankPagePool(LAYOUT, slots * pages, slots, dtype, "cuda", max_tokens=max_tokens)
    host = (torch.randn(pages, pool.layout.page_elements) * 0.02).to(dtype).pin_memory()
    rows = [[SliceRows(rank)] * pool.layout.slices_per_layer] * LAYERS
    for slot in range(slots):
        pool.load(slot, range(slot * pages, (slot + 1) * pages), host, rows)
    return pool


def segments(num_tokens: int, num_adapters: int) -> list[tuple[int, int]]:
    """Tokens dealt evenly, those of an adapter side by side."""
    return [(slot, num_tokens // num_adapters) for slot in range(num_adapters)]


@contextmanager
def captured(body: Callable[[], None]) -> Iterator[Callable[[], None]]:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    yield graph.replay
    graph.reset()


def median_ms(body: Callable[[], None], repeats: int) -> float:
    for _ in range(3):
        body()
    times: list[float] = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(
    linears: Linears, pool: RankPagePool, rank: int, bandwidth: float, tokens: Sequence[int]
) -> list[Measurement]:
    rank_row = sum(len(linear.slices) * linear.in_features + linear.out_features for linear in LAYOUT.linears)
    adapter_bytes = rank * rank_row * LAYERS * pool.pages.element_size()
    found = []
    for num_tokens in tokens:
        repeats = 20 if num_tokens <= 256 else 5
        pool.step(segments(num_tokens, 1))
        with captured(partial(linears.run, num_tokens, None)) as replay:
            gemm = median_ms(replay, repeats)
        with captured(partial(linears.run, num_tokens, pool)) as replay:
            for num_adapters in ADAPTERS:
                if num_adapters <= num_tokens:
                    pool.step(segments(num_tokens, num_adapters))
                    with_lora = median_ms(replay, repeats)
                    bytes_ms = num_adapters * adapter_bytes / bandwidth * 1e3
                    found.append(Measurement(num_tokens, num_adapters, gemm, with_lora, bytes_ms))
    return found


def step_microseconds(pool: RankPagePool) -> float:
    """Host time of planning and sending a step of 64 decodes of 64 adapters."""
    mix = segments(64, 64)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        pool.step(mix)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--bandwidth", type=float, default=4.26e12, help="bytes a second of a copy on this GPU"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--quick", action="store_const", dest="tokens", const=[64], help="64 tokens only")
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    linears = Linears(dtype, max(arguments.tokens))
    pool = filled_pool(dtype, arguments.rank, max(arguments.tokens))
    found = measure(linears, pool, arguments.rank, arguments.bandwidth, arguments.tokens)
    host = step_microseconds(pool)
    report.print_table(
        f"LoRA on the linears of Llama-3-8B, {arguments.dtype}, rank {arguments.rank}, ms a step",
        ["tokens", "adapters", "GEMMs", "GEMMs + LoRA", "LoRA", "adapter bytes"],
        [
            [f"{m.tokens}", f"{m.adapters}"]
            + [f"{ms:.3f}" for ms in (m.gemm_ms, m.with_lora_ms, m.lora_ms, m.lora_bytes_ms)]
            for m in found
        ],
    )
    print(f"planning a step of 64 decodes on the host: {host:.0f} us")
    path = report.write(
        f"lora-kernels-{arguments.dtype}",
        {"model": "Llama-3-8B linears", "dtype": arguments.dtype, "rank": arguments.rank},
        {"steps": [asdict(m) for m in found], "plan_step_us": host},
    )
    print(path)


if __name__ == "__main__":
    main()
