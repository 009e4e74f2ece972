"""Attention over KV pages in Triton, for a step's decodes and for its chunks of prompts.

Softmax is online (FlashAttention, Dao et al., 2022). The query heads that share a KV head are rows of one
tile, so keys and values are read once for all of them. The keys of a decode are shared out among programs
(Flash-Decoding, Dao et al., 2023); the last one that is done combines what all have found, always in the same
order. Launches depend on the room of the index alone: how many sequences there are, their lengths and their
block tables are read on the device, so a CUDA graph serves any. Programs that find nothing to do end at once.

The two numbers of a decode are in attention_cuda.py, which computes most of them. Here 64 sequences of 384
tokens take 29 us in a layer of Llama-3-8B, where the bytes allow 24, and 64 of 4096 tokens 253 to 258, where
they allow 252.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.attention_index import MAX_SPLITS, AttentionIndex
from deltaplane_kernels.overlap_triton import launch_options, let_next_start, wait_for_previous

_LOG2_E = 1.4426950408889634


def launch_decode(out: Tensor, q: Tensor, kv: Tensor, index: AttentionIndex, window: int | None) -> None:
    """Writes the rows of out [T, Hq * D] that are decodes; the rest as attention_gpu.paged_attention."""
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    tiles = _decode_tiles(q.dtype, head_dim, group, index.fill_device)
    sums, weights = index.workspace.partials(num_kv_heads * group, head_dim)
    splits = index.splits
    grid = (index.decode_programs,) if splits is None else (index.max_decodes, splits.count)
    _decode[(num_kv_heads, *grid)](
        out,
        q,
        kv,
        index.counts,
        index.rows,
        index.starts,
        index.table_starts,
        index.tables,
        sums,
        weights,
        index.workspace.counters,
        q.stride(0),
        kv.stride(0),
        window or 0,
        splits.min_keys if splits is not None else 0,
        SCALE=_LOG2_E / head_dim**0.5,
        MAX_SPLITS=MAX_SPLITS,
        COUNTED=splits is None,
        **tiles.arguments(kv, group, window),
    )


def launch_prefill(out: Tensor, q: Tensor, kv: Tensor, index: AttentionIndex, window: int | None) -> None:
    """Writes the rows of out that are chunks of prompts."""
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    tiles = _prefill_tiles(q.dtype, head_dim, group)
    # At most this many tiles: each sequence may leave one partly empty.
    num_tiles = index.max_prefill_tokens // (tiles.rows // group) + index.max_prefills
    _prefill[(num_kv_heads, num_tiles)](
        out,
        q,
        kv,
        index.counts,
        index.rows,
        index.starts,
        index.table_starts,
        index.first_tokens,
        index.tables,
        q.stride(0),
        kv.stride(0),
        window or 0,
        SCALE=_LOG2_E / head_dim**0.5,
        **tiles.arguments(kv, group, window),
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """rows: query heads times tokens of a program. keys: read at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def arguments(self, kv: Tensor, group: int, window: int | None) -> dict[str, Any]:
        """What all kernels are compiled for."""
        return {
            "GROUP": group,
            "HEAD_DIM": kv.shape[4],
            "PAGE_SIZE": kv.shape[3],
            "ROWS": self.rows,
            "KEYS": self.keys,
            "DIMS": triton.next_power_of_2(kv.shape[4]),
            "WINDOWED": window is not None,
            "PRECISION": "ieee" if kv.dtype == torch.float32 else "tf32",
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **launch_options(kv.device),
        }


def _decode_tiles(dtype: torch.dtype, head_dim: int, group: int, fill_device: bool) -> _Tiles:
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return _Tiles(rows, keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=1)
    if head_dim > 128:
        return _Tiles(rows, keys=64, num_warps=4, num_stages=3)
    # Page numbers are loaded ahead of the keys that they lead to: three stages hold one tile of keys, five
    # hold two. Where programs fill the device, more of them hide loads better than deeper ones do.
    return _Tiles(rows, keys=64, num_warps=2, num_stages=3 if fill_device else 5)


def _prefill_tiles(dtype: torch.dtype, head_dim: int, group: int) -> _Tiles:
    if dtype == torch.float32:
        rows = max(32, triton.next_power_of_2(group))
        return _Tiles(rows, keys=32 if head_dim <= 128 else 16, num_warps=8, num_stages=1)
    rows = max(128, triton.next_power_of_2(group))
    return _Tiles(rows, keys=64, num_warps=8, num_stages=3 if head_dim <= 128 else 2)


@triton.jit(do_not_specialize=["window", "min_keys"])
def _decode(
    out,
    q,
    kv,
    counts,
    rows,
    starts,
    table_starts,
    tables,
    sums,
    weights,
    counters,
    q_stride,
    page_stride,
    window,
    min_keys,
    SCALE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One split of the keys of one KV head of one decode. The first splits of all decodes go first.

    COUNTED: how many decodes and splits there are is read from counts, and may need fewer programs.
    """
    let_next_start(OVERLAPS)
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    if COUNTED:
        num_decodes, num_splits, min_keys = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
        sequence = tl.program_id(1) % tl.maximum(num_decodes, 1)
        split = tl.program_id(1) // tl.maximum(num_decodes, 1)
    else:
        sequence, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    position = tl.load(starts + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    table = tables + tl.load(table_starts + sequence)
    wait_for_previous(OVERLAPS)
    if split >= num_splits:
        return

    num_keys = position + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(num_keys - window, 0) // KEYS * KEYS
    split_keys = tl.maximum(tl.cdiv(tl.cdiv(num_keys - first, num_splits), KEYS) * KEYS, min_keys)
    active = tl.maximum(tl.cdiv(num_keys - first, split_keys), 1)
    if split >= active:
        return

    heads, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    query_heads = kv_head * GROUP + heads
    shown = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        q + row * q_stride + query_heads[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0
    )
    begin = first + split * split_keys
    acc, peak, total = _attend(
        tl.zeros((ROWS, DIMS), tl.float32),
        tl.full((ROWS,), -1e30, tl.float32),
        tl.zeros((ROWS,), tl.float32),
        queries,
        tl.zeros((ROWS,), tl.int32) + position,
        kv + kv_head * PAGE_SIZE * HEAD_DIM,
        table,
        begin,
        tl.minimum(begin + split_keys, num_keys),
        num_kv_heads * PAGE_SIZE * HEAD_DIM,
        page_stride,
        window,
        SCALE,
        HEAD_DIM,
        PAGE_SIZE,
        KEYS,
        DIMS,
        True,
        WINDOWED,
        PRECISION,
    )
    out += (row * num_kv_heads + kv_head) * GROUP * HEAD_DIM
    if active == 1:
        tl.store(
            out + heads[:, None] * HEAD_DIM + dims[None, :],
            _mean(acc, total).to(out.dtype.element_ty),
            mask=shown,
        )
        return

    program = sequence * num_kv_heads + kv_head
    partial = program * num_splits * GROUP
    own = partial + split * GROUP + heads
    tl.store(sums + own.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], acc, mask=shown)
    tl.store(weights + own * 2, peak, mask=heads < GROUP)
    tl.store(weights + own * 2 + 1, total, mask=heads < GROUP)
    # All threads have stored before one of them announces it to the other programs.
    tl.debug_barrier()
    if tl.atomic_add(counters + program, 1, sem="acq_rel") == active - 1:
        _combine(out, sums, weights, partial, active, MAX_SPLITS, GROUP, HEAD_DIM, DIMS)
        tl.store(counters + program, 0)


@triton.jit
def _combine(
    out,
    sums,
    weights,
    partial,
    active,
    MAX_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """The query heads of one decode out of what its splits have found."""
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, DIMS)
    there = splits < active
    for head in range(GROUP):
        rows = partial + splits * GROUP + head
        peaks = tl.load(weights + rows * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(weights + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        acc = tl.load(
            sums + rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :],
            mask=there[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        factors = tl.exp2(peaks - tl.max(peaks, 0))
        mean = tl.sum(acc * factors[:, None], 0) / tl.sum(totals * factors, 0)
        tl.store(out + head * HEAD_DIM + dims, mean.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["window"])
def _prefill(
    out,
    q,
    kv,
    counts,
    rows,
    starts,
    table_starts,
    first_tokens,
    tables,
    q_stride,
    page_stride,
    window,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """ROWS // GROUP tokens of one sequence, for one KV head."""
    let_next_start(OVERLAPS)
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    num_decodes, num_prefills = tl.load(counts), tl.load(counts + 3)
    # Later tokens have more keys: they go first, so that no long program starts last.
    last_tile = tl.load(first_tokens + num_prefills) // TOKENS + num_prefills - 1
    tile = last_tile - tl.program_id(1)
    prefill = _prefill_of(tile, first_tokens, num_prefills, TOKENS)
    before = tl.load(first_tokens + prefill)
    num_tokens = tl.load(first_tokens + prefill + 1) - before
    first_token = (tile - before // TOKENS - prefill) * TOKENS
    sequence = num_decodes + prefill
    start = tl.load(starts + sequence)
    first_row = tl.load(rows + sequence).to(tl.int64)
    table = tables + tl.load(table_starts + sequence)
    wait_for_previous(OVERLAPS)
    if (tile < 0) | (first_token >= num_tokens):
        return

    lanes, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    tokens = first_token + lanes // GROUP
    shown = ((lanes < TOKENS * GROUP) & (tokens < num_tokens))[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = first_row + tokens
    query_heads = kv_head * GROUP + lanes % GROUP
    queries = tl.load(
        q + (q_rows * q_stride + query_heads * HEAD_DIM)[:, None] + dims[None, :], mask=shown, other=0.0
    )
    first_position = start + first_token
    positions = start + tokens
    num_keys = tl.maximum(start + tl.minimum(first_token + TOKENS, num_tokens), 0)
    layer = kv + kv_head * PAGE_SIZE * HEAD_DIM
    values = num_kv_heads * PAGE_SIZE * HEAD_DIM
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    peak = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if WINDOWED:
        masked = tl.maximum(first_position + 1 - window, 0) // KEYS * KEYS
    else:
        # Keys that all tokens of the tile see.
        masked = tl.maximum(first_position + 1, 0) // KEYS * KEYS
        acc, peak, total = _attend(
            acc,
            peak,
            total,
            queries,
            positions,
            layer,
            table,
            0,
            masked,
            values,
            page_stride,
            window,
            SCALE,
            HEAD_DIM,
            PAGE_SIZE,
            KEYS,
            DIMS,
            False,
            False,
            PRECISION,
        )
    acc, peak, total = _attend(
        acc,
        peak,
        total,
        queries,
        positions,
        layer,
        table,
        masked,
        num_keys,
        values,
        page_stride,
        window,
        SCALE,
        HEAD_DIM,
        PAGE_SIZE,
        KEYS,
        DIMS,
        True,
        WINDOWED,
        PRECISION,
    )
    targets = (q_rows * num_kv_heads * GROUP + query_heads) * HEAD_DIM
    tl.store(out + targets[:, None] + dims[None, :], _mean(acc, total).to(out.dtype.element_ty), mask=shown)


@triton.jit
def _mean(acc, total):
    """0 where there were no keys: in rows of padding."""
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _prefill_of(tile, first_tokens, num_prefills, TOKENS: tl.constexpr):
    """The last prefill whose first tile is not after `tile`; prefill i starts at first_tokens[i] // TOKENS
    + i."""
    low = 0
    high = num_prefills
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first_tokens + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    acc,
    peak,
    total,
    queries,
    positions,
    layer,
    table,
    begin,
    end,
    values,
    page_stride,
    window,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folds the keys and values at positions begin ... end - 1 into a running softmax.

    acc: [ROWS, DIMS], sums of values, weighted relative to peak: [ROWS], the highest score, in powers of two;
    total: [ROWS], of the weights. peak starts at a finite value, lower than any score: a row that sees none
    of the keys keeps what it has.
    values: offset of a page's values from its keys.
    """
    dims = tl.arange(0, DIMS)
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        pages = tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)
        tokens = layer + (pages * page_stride + keys % PAGE_SIZE * HEAD_DIM)
        shown = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(tokens[:, None] + dims[None, :], mask=shown, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * SCALE
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            if WINDOWED:
                visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        factor = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * factor + tl.sum(weights, 1)
        v = tl.load((tokens + values)[:, None] + dims[None, :], mask=shown, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total
