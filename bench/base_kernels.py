"""The base model's decode step, with the shapes of Llama-3-8B in bfloat16: its products, its argmax, and all.

    python -m bench.base_kernels [--quick]

Each is captured in a CUDA graph and replayed. Products go round among as many weights as keep them out of the
L2 cache. A whole step is all kernels from the tokens to the likeliest next ones, without a host that prepares
steps: what an engine's step can reach. Bytes are those that must move: weights, keys and values once. Needs
an NVIDIA GPU with 40 GB free; takes about 15 s.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench import report
from bench.graph_timing import L2_BYTES, microseconds
from bench.random_model import LLAMA_3_8B, RandomWeights, step_bytes
from deltaplane_kernels.argmax import argmax
from deltaplane_kernels.attention import FixedPlan, KVLayout, TokenRun
from deltaplane_kernels.attention_index import IndexBuffer
from deltaplane_kernels.linear import Linear
from deltaplane_server.models.decoder import Decoder, DecoderInputs

MODEL = LLAMA_3_8B
DTYPE = torch.bfloat16
GPU = torch.device("cuda")
ROWS = [1, 16, 64, 128, 256]
CONTEXT, PAGE = 256, 16


@dataclass(frozen=True)
class Timing:
    """us: microseconds, the median. gb_s: bytes that must move over that."""

    us: float
    gb_s: float


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row and 64 rows only")
    rows = [1, 64] if parser.parse_args().quick else ROWS
    torch.manual_seed(0)
    shapes = {
        linear.name: (linear.out_features, linear.in_features) for linear in MODEL.adapter_layout().linears
    }
    timings: dict[str, Timing] = {}
    for name, shape in (shapes | {"head": (MODEL.vocab_size, MODEL.hidden_size)}).items():
        for num_rows, timing in _products(shape, rows).items():
            timings[f"{name}, {num_rows} rows"] = timing
    for num_rows in rows:
        timings[f"argmax, {num_rows} rows"] = _argmax(num_rows)
    for num_rows, timing in _steps(rows).items():
        timings[f"step, {num_rows} sequences of {CONTEXT} tokens"] = timing
    report.print_table(
        "Llama-3-8B, bfloat16",
        ("kernel", "us", "GB/s"),
        [(name, f"{timing.us:.1f}", f"{timing.gb_s:.0f}") for name, timing in timings.items()],
    )
    workload = {"rows": rows, "context": CONTEXT, "dtype": str(DTYPE)}
    path = report.write("base-kernels", workload, {name: asdict(timing) for name, timing in timings.items()})
    print(f"written to {path}")


def _products(shape: tuple[int, int], rows: list[int]) -> dict[int, Timing]:
    nbytes = math.prod(shape) * DTYPE.itemsize
    count = max(3, round(4 * L2_BYTES / nbytes))
    linears = [Linear(_random(*shape)) for _ in range(count)]
    timings = {}
    for num_rows in rows:
        x = _random(num_rows, shape[1])
        us = microseconds([partial(linear, x) for linear in linears])
        timings[num_rows] = Timing(us, nbytes / us / 1e3)
    return timings


def _argmax(num_rows: int) -> Timing:
    logits = _random(num_rows, MODEL.vocab_size)
    us = microseconds([partial(argmax, logits)] * 10)
    return Timing(us, logits.nbytes / us / 1e3)


def _steps(rows: list[int]) -> dict[int, Timing]:
    weights = RandomWeights(MODEL, DTYPE)
    decoder = Decoder(MODEL, weights, DTYPE, GPU)
    weights.finish()
    return {num_rows: _step(decoder, num_rows) for num_rows in rows}


def _step(decoder: Decoder, num_rows: int) -> Timing:
    pages_each = -(-CONTEXT // PAGE)
    layout = KVLayout(MODEL.num_layers, MODEL.num_kv_heads, PAGE, MODEL.head_dim)
    pages = _random(num_rows * pages_each, layout.num_layers, 2, layout.num_heads, PAGE, layout.head_dim)
    index = IndexBuffer(
        num_rows,
        num_rows,
        pages_each,
        decodes_alone=True,
        page_size=PAGE,
        num_kv_heads=layout.num_heads,
        device=GPU,
    )
    plan = FixedPlan(num_rows, index, layout=layout, windows=MODEL.windows)
    tables = torch.randperm(len(pages)).view(num_rows, pages_each).tolist()
    plan.fill([TokenRun(CONTEXT - 1, 1, table) for table in tables])
    inputs = DecoderInputs(
        torch.randint(MODEL.vocab_size, (num_rows,), device=GPU), plan.index.positions, plan
    )
    logits = torch.empty(num_rows, MODEL.vocab_size, dtype=DTYPE, device=GPU)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=GPU)

    def step() -> None:
        decoder.logits(decoder.forward(inputs, pages), out=logits)
        argmax(logits, tokens)

    us = microseconds([step])
    nbytes = step_bytes(MODEL, DTYPE, batch=num_rows, context=CONTEXT, adapters=0, rank=0)
    return Timing(us, nbytes / us / 1e3)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=GPU, dtype=DTYPE).mul_(shape[-1] ** -0.5)


if __name__ == "__main__":
    main()
