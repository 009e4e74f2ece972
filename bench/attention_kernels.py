"""Attention and the fused elementwise kernels over the shapes of Llama-3-8B, in bfloat16.

    python -m bench.attention_kernels [--quick]

Each is captured in a CUDA graph, once for each of several layers, and replayed; microseconds are of one call.
Attention goes round as many layers as keep its keys and values out of the L2 cache. The elementwise kernels
find their inputs there, as in a step, while these are small. Bytes are those that must move: each input read
once, each output written once. Needs an NVIDIA GPU; takes less than 40 s.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench import report
from bench.graph_timing import L2_BYTES, microseconds
from deltaplane_kernels.activation import silu_mul
from deltaplane_kernels.attention import (
    AttentionPlan,
    FixedPlan,
    KVLayout,
    TokenRun,
    paged_attention,
    rotary_write_kv,
)
from deltaplane_kernels.attention_index import IndexBuffer
from deltaplane_kernels.norm import add_rms_norm
from deltaplane_kernels.rotary import rotary_factors

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE = 4096, 14336, 32, 8, 128, 16
DTYPE = torch.bfloat16
GPU = torch.device("cuda")

DECODES = [
    (1, 256),
    (1, 384),
    (1, 8192),
    (4, 4096),
    (16, 256),
    (16, 384),
    (64, 256),
    (64, 384),
    (64, 4096),
    (256, 256),
    (256, 384),
    (256, 1024),
]
"""Sequences, and tokens of each."""
PREFILLS = [(64, 0, 128), (4, 0, 2048), (1, 0, 8192), (1, 6144, 2048)]
"""Sequences, tokens of each in the cache, and new ones."""
TOKENS = [1, 64, 256, 8192]


@dataclass(frozen=True)
class Timing:
    """us: microseconds of a call, the median. gb_s: bytes that must move over that. tflop_s: of attention."""

    us: float
    gb_s: float
    tflop_s: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first shape of each kernel only")
    number = 1 if parser.parse_args().quick else None
    torch.manual_seed(0)
    timings: dict[str, Timing] = {}
    for batch, length in DECODES[:number]:
        timings[f"decode attention {batch} x {length}"] = _decode(batch, length)
    for batch, context, new in PREFILLS[:number]:
        timings[f"prefill attention {batch} x {new} after {context}"] = _prefill(batch, context, new)
    for tokens in TOKENS[:number]:
        timings[f"add_rms_norm {tokens}"] = _add_rms_norm(tokens)
        timings[f"rotary_write_kv {tokens}"] = _rotary_write_kv(tokens)
        timings[f"silu_mul {tokens}"] = _silu_mul(tokens)
    report.print_table(
        "Llama-3-8B, bfloat16",
        ("kernel", "us", "GB/s", "TFLOP/s"),
        [
            (name, f"{t.us:.1f}", f"{t.gb_s:.0f}", "" if t.tflop_s is None else f"{t.tflop_s:.0f}")
            for name, t in timings.items()
        ],
    )
    shapes = {"hidden": HIDDEN, "inner": INNER, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    path = report.write(
        "attention-kernels", shapes | {"dtype": str(DTYPE)}, {name: asdict(t) for name, t in timings.items()}
    )
    print(f"written to {path}")


def _decode(batch: int, length: int) -> Timing:
    kv_bytes = batch * length * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    pages, runs = _pages([(length - 1, 1)] * batch, layers=max(2, round(4 * L2_BYTES / kv_bytes)))
    index = IndexBuffer(
        batch,
        batch,
        len(runs[0].pages),
        decodes_alone=True,
        page_size=PAGE,
        num_kv_heads=KV_HEADS,
        device=GPU,
    )
    plan = FixedPlan(batch, index, layout=_layout(pages), windows=[None])
    plan.fill(runs)
    q = _random(batch, HEADS, HEAD_DIM)
    us = microseconds([partial(paged_attention, q, kv, plan) for kv in pages.unbind(1)])
    return Timing(us, (kv_bytes + 2 * q.nbytes) / us / 1e3, 4 * length * q.numel() / us / 1e6)


def _prefill(batch: int, context: int, new: int) -> Timing:
    pages, runs = _pages([(context, new)] * batch, layers=4)
    plan = AttentionPlan(runs, layout=_layout(pages), windows=[None], dtype=DTYPE, device=GPU)
    q = _random(batch * new, HEADS, HEAD_DIM)
    us = microseconds([partial(paged_attention, q, kv, plan) for kv in pages.unbind(1)])
    kv_bytes = batch * (context + new) * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    mean_keys = context + (new + 1) / 2
    return Timing(us, (kv_bytes + 2 * q.nbytes) / us / 1e3, 4 * mean_keys * q.numel() / us / 1e6)


def _add_rms_norm(tokens: int) -> Timing:
    x, residual, weight = _random(tokens, HIDDEN), _random(tokens, HIDDEN), _random(HIDDEN)
    us = microseconds([partial(add_rms_norm, x, residual, weight, 1e-5)] * 10)
    return Timing(us, 4 * x.nbytes / us / 1e3)


def _rotary_write_kv(tokens: int) -> Timing:
    pages, runs = _pages([(0, 1)] * tokens, layers=10)
    plan = AttentionPlan(runs, layout=_layout(pages), windows=[None], dtype=DTYPE, device=GPU)
    heads = _random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    inv_freq = torch.rand(HEAD_DIM // 2, device=GPU)
    cos, sin = rotary_factors(torch.arange(tokens, device=GPU), inv_freq, 1.0, DTYPE)
    us = microseconds([partial(rotary_write_kv, heads, cos, sin, kv, plan) for kv in pages.unbind(1)])
    return Timing(us, (2 * heads.nbytes + cos.nbytes + sin.nbytes) / us / 1e3)


def _silu_mul(tokens: int) -> Timing:
    gate_up = _random(tokens, 2 * INNER)
    us = microseconds([partial(silu_mul, gate_up)] * 10)
    return Timing(us, 1.5 * gate_up.nbytes / us / 1e3)


def _pages(spans: Sequence[tuple[int, int]], layers: int) -> tuple[torch.Tensor, list[TokenRun]]:
    """Pages for sequences of (context, new) tokens, scattered over the cache."""
    sizes = [-(-(context + new) // PAGE) for context, new in spans]
    free = torch.randperm(sum(sizes)).tolist()
    runs = [
        TokenRun(context, new, [free.pop() for _ in range(size)])
        for (context, new), size in zip(spans, sizes, strict=True)
    ]
    return _random(sum(sizes), layers, 2, KV_HEADS, PAGE, HEAD_DIM), runs


def _layout(pages: torch.Tensor) -> KVLayout:
    return KVLayout(pages.shape[1], KV_HEADS, PAGE, HEAD_DIM)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=GPU, dtype=DTYPE)


if __name__ == "__main__":
    main()
