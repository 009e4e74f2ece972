"""The side ops in Triton. See side.py for what they compute, side_tables.py for what they read.

The two numbers, for a decode step of Llama-3-8B with 64 rows in bfloat16, all of rank 16 on the head: 4.1 MB
of B for each distinct adapter, and 33 MB for reading and writing the logits; 296 MB where all adapters
differ, or 70 us at 4.26 TB/s (an H200 takes 85), for 0.3 GFLOP. So it is bound by bytes, and needs no tensor
cores. Where no row has anything, what counts is the launches: three a step, about 1 us each, of programs that
end after reading one number.

Programs run through the columns of a row by turns, so that also few rows are spread over all of the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaplane_kernels.overlap_triton import launch_options, let_next_start, wait_for_previous
from deltaplane_kernels.rank_pages import ALIGNMENT
from deltaplane_kernels.side_tables import (
    MAX_RANK,
    NUM_PARTS,
    PART_EMBEDDING_A,
    PART_EMBEDDING_B,
    PART_EMBEDDING_RANK,
    PART_HEAD_A,
    PART_HEAD_B,
    PART_HEAD_RANK,
    PART_TABLE,
    SideTables,
)

_RANKS = 8
"""Rank rows that a program reads at a time."""

_COLUMNS = 1024
_SHRINK_PROGRAMS = 4
"""Of each row."""

_EXPAND_PROGRAMS = 2048
"""Of all rows together, where these are fewer."""

_NUM_PARTS = tl.constexpr(NUM_PARTS)
_MAX_RANK = tl.constexpr(MAX_RANK)
_HEAD_RANK, _HEAD_A, _HEAD_B = (
    tl.constexpr(PART_HEAD_RANK),
    tl.constexpr(PART_HEAD_A),
    tl.constexpr(PART_HEAD_B),
)
_EMBEDDING_RANK, _EMBEDDING_A, _EMBEDDING_B = (
    tl.constexpr(PART_EMBEDDING_RANK),
    tl.constexpr(PART_EMBEDDING_A),
    tl.constexpr(PART_EMBEDDING_B),
)
_TABLE = tl.constexpr(PART_TABLE)


def embed(tables: SideTables, slots: Tensor, tokens: Tensor, x: Tensor) -> None:
    """slots: [T], int32, below 0 in rows that have nothing. tokens: [T], int64. x: [T, H], contiguous."""
    vocab, hidden = tables.layout.outside.vocab_size, tables.layout.outside.hidden_size
    _check(x, (len(slots), hidden), tables)
    if len(slots):
        block = min(triton.next_power_of_2(hidden), _COLUMNS)
        _embed[(len(slots), triton.cdiv(hidden, block))](
            x,
            tokens,
            slots,
            *_tables(tables),
            *_geometry(tables, vocab),
            *_geometry(tables, hidden),
            HIDDEN=hidden,
            BLOCK=block,
            RANKS=_RANKS,
            **launch_options(x.device),
        )


def add_head_delta(tables: SideTables, slots: Tensor, x: Tensor, logits: Tensor) -> None:
    """slots: [R], int32, below 0 in rows that have nothing. x: [R, H] and logits [R, V], contiguous."""
    num_rows = len(slots)
    vocab, hidden = tables.layout.outside.vocab_size, tables.layout.outside.hidden_size
    _check(x, (num_rows, hidden), tables)
    _check(logits, (num_rows, vocab), tables)
    if not num_rows:
        return
    shrunk = torch.empty(num_rows, MAX_RANK, dtype=torch.float32, device=x.device)
    options = launch_options(x.device)
    _shrink[(num_rows, _SHRINK_PROGRAMS)](
        shrunk,
        x,
        slots,
        *_tables(tables),
        *_geometry(tables, hidden),
        HIDDEN=hidden,
        BLOCK=min(triton.next_power_of_2(hidden), _COLUMNS),
        RANKS=_RANKS,
        **options,
    )
    blocks = triton.cdiv(vocab, _COLUMNS)
    _expand[(num_rows, min(max(_EXPAND_PROGRAMS // num_rows, 1), blocks))](
        logits,
        shrunk,
        slots,
        *_tables(tables),
        *_geometry(tables, vocab),
        vocab,
        BLOCK=_COLUMNS,
        RANKS=_RANKS,
        **options,
    )


def _check(tensor: Tensor, shape: tuple[int, int], tables: SideTables) -> None:
    if tensor.shape != shape or tensor.dtype != tables.pool.dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{tuple(tensor.shape)} of {tensor.dtype} where {shape} of {tables.pool.dtype}, contiguous, "
            "is needed"
        )


def _tables(tables: SideTables) -> tuple[Tensor, Tensor, Tensor, int, int]:
    return tables.parts, tables.pages, tables.pool, tables.pages.stride(0), tables.pool.stride(0)


def _geometry(tables: SideTables, width: int) -> tuple[int, int]:
    """Rows of a page, and elements from one to the next, of blocks of this width."""
    pitch = -(-width // ALIGNMENT) * ALIGNMENT
    return tables.layout.page_elements // pitch, pitch


@triton.jit
def _row_at(pool, slot_pages, first, row, rows_per_page, pitch, page_elements):
    """The first element of rows of a block. row: a number, or a tensor of them."""
    place = first + row
    page = tl.load(slot_pages + place // rows_per_page)
    return pool + page.to(tl.int64) * page_elements + (place % rows_per_page) * pitch


@triton.jit
def _embed(
    x,
    tokens,
    slots,
    parts,
    pages,
    pool,
    pages_stride,
    page_elements,
    vocab_rows,
    vocab_pitch,
    hidden_rows,
    hidden_pitch,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_previous(OVERLAPS)
    if slot >= 0:
        rank = tl.load(parts + slot * _NUM_PARTS + _EMBEDDING_RANK)
        table = tl.load(parts + slot * _NUM_PARTS + _TABLE)
        if rank > 0 or table >= 0:
            own_pages = pages + slot * pages_stride
            token = tl.load(tokens + row)
            columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = columns < HIDDEN
            target = x + row * HIDDEN + columns
            values = tl.load(target, mask=inside, other=0.0)
            if table >= 0:
                start = _row_at(pool, own_pages, table, token, hidden_rows, hidden_pitch, page_elements)
                values = tl.load(start + columns, mask=inside, other=0.0)
            total = values.to(tl.float32)
            a = tl.load(parts + slot * _NUM_PARTS + _EMBEDDING_A)
            b = tl.load(parts + slot * _NUM_PARTS + _EMBEDDING_B)
            for first in range(0, rank, RANKS):
                ranks = tl.minimum(first + tl.arange(0, RANKS), rank - 1)
                is_own = first + tl.arange(0, RANKS) < rank
                starts = _row_at(pool, own_pages, a, ranks, vocab_rows, vocab_pitch, page_elements)
                factors = tl.load(starts + token, mask=is_own, other=0.0).to(tl.float32)
                starts = _row_at(pool, own_pages, b, ranks, hidden_rows, hidden_pitch, page_elements)
                block = tl.load(
                    starts[:, None] + columns[None, :], mask=is_own[:, None] & inside[None, :], other=0.0
                )
                total += tl.sum(factors[:, None] * block.to(tl.float32), 0)
            tl.store(target, total.to(values.dtype), mask=inside)


@triton.jit
def _shrink(
    shrunk,
    x,
    slots,
    parts,
    pages,
    pool,
    pages_stride,
    page_elements,
    hidden_rows,
    hidden_pitch,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """shrunk [R, MAX_RANK] = x A^T, of the ranks that a row has."""
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_previous(OVERLAPS)
    if slot >= 0:
        rank = tl.load(parts + slot * _NUM_PARTS + _HEAD_RANK)
        a = tl.load(parts + slot * _NUM_PARTS + _HEAD_A)
        for first in range(tl.program_id(1) * RANKS, rank, tl.num_programs(1) * RANKS):
            ranks = first + tl.arange(0, RANKS)
            starts = _row_at(
                pool,
                pages + slot * pages_stride,
                a,
                tl.minimum(ranks, rank - 1),
                hidden_rows,
                hidden_pitch,
                page_elements,
            )
            total = tl.zeros((RANKS,), dtype=tl.float32)
            for begin in range(0, HIDDEN, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                inside = columns < HIDDEN
                values = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
                block = tl.load(starts[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
                total += tl.sum(values[None, :] * block.to(tl.float32), 1)
            tl.store(shrunk + row * _MAX_RANK + ranks, total, mask=ranks < rank)


@triton.jit
def _expand(
    logits,
    shrunk,
    slots,
    parts,
    pages,
    pool,
    pages_stride,
    page_elements,
    vocab_rows,
    vocab_pitch,
    vocab_size,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """logits += shrunk B, of the ranks that a row has."""
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_previous(OVERLAPS)
    if slot >= 0:
        rank = tl.load(parts + slot * _NUM_PARTS + _HEAD_RANK)
        b = tl.load(parts + slot * _NUM_PARTS + _HEAD_B)
        if rank > 0:
            for begin in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                inside = columns < vocab_size
                target = logits + row * vocab_size + columns
                values = tl.load(target, mask=inside, other=0.0)
                total = values.to(tl.float32)
                for first in range(0, rank, RANKS):
                    ranks = first + tl.arange(0, RANKS)
                    is_own = ranks < rank
                    factors = tl.load(shrunk + row * _MAX_RANK + ranks, mask=is_own, other=0.0)
                    starts = _row_at(
                        pool,
                        pages + slot * pages_stride,
                        b,
                        tl.minimum(ranks, rank - 1),
                        vocab_rows,
                        vocab_pitch,
                        page_elements,
                    )
                    block = tl.load(
                        starts[:, None] + columns[None, :], mask=is_own[:, None] & inside[None, :], other=0.0
                    )
                    total += tl.sum(factors[:, None] * block.to(tl.float32), 0)
                tl.store(target, total.to(values.dtype), mask=inside)
