"""The rows of a step as the CUDA kernels read them: tiles of rows that share a slot, or a blend of slots.

A table of 32-bit integers:

    [0]            number of tiles n
    [1]            t + 4 n, where the row list starts
    [2]            number of rows T
    [3]            0
    [4 + 2 i]      row i: its row in the slot table (see lora_slots.py), and its place in the row list
    [t + 4 i]      tile i: its row in the slot table, the place in the row list of its first row, its number
                   of rows, 0; t = 4 + 2 T, a multiple of 4 by two zeros where T is odd
    [t + 4 n]      the row list: numbers of the rows that have an adapter, those of a slot together

Tiles of 16 bytes, and rows of 8, are read at once. Rows of the base model are in no tile, and in no place of
the list. Where rows stand depends on no other number, so that they are read without delay.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

HEADER = 4
ROW_FIELDS, TILE_FIELDS = 2, 4

SHORT_TILE, LONG_TILE = 16, 64
"""Most rows of a tile, where one block computes on all of them: in steps of decodes or of some prompts, and
in longer ones."""

SHORT_STEP = 1024
"""Rows up to which a step has short tiles: they spread few rows over all of the GPU."""


def tile_rows(num_tokens: int) -> int:
    """The most rows of a tile in a step of num_tokens rows."""
    return SHORT_TILE if num_tokens <= SHORT_STEP else LONG_TILE


def table_size(max_tokens: int) -> int:
    """Integers that the table of a step of at most max_tokens rows takes; at worst each row has a tile."""
    return tiles_at(max_tokens) + (TILE_FIELDS + 1) * max_tokens


def tiles_at(num_tokens: int) -> int:
    """Where the tiles of a step of num_tokens rows start."""
    return HEADER + ROW_FIELDS * (num_tokens + num_tokens % 2)


def write_table(
    table: NDArray[np.int32],
    runs_by_row: Mapping[int, Sequence[tuple[int, int]]],
    base_row: int,
    num_tokens: int,
) -> int:
    """Writes a step's table and answers how many integers it has.

    table: at least table_size(num_tokens) of them.
    runs_by_row: the rows [start, stop) of each row of the slot table that is in the step; no row of the step
        is in two runs.
    base_row: the row of the slot table for all others.
    num_tokens: rows of the step, with those of the base.
    """
    most = tile_rows(num_tokens)
    tiles: list[int] = []
    rows: list[int] = []
    slots: list[int] = []
    for slot, runs in runs_by_row.items():
        first = len(rows)
        for start, stop in runs:
            rows += range(start, stop)
        slots += [slot] * (len(rows) - first)
        for place in range(first, len(rows), most):
            tiles += (slot, place, min(most, len(rows) - place), 0)
    begin = tiles_at(num_tokens)
    rows_at = begin + len(tiles)
    size = rows_at + len(rows)
    table[:HEADER] = len(tiles) // TILE_FIELDS, rows_at, num_tokens, 0
    table[begin:size] = tiles + rows
    entries = table[HEADER:begin].reshape(-1, ROW_FIELDS)
    entries[:num_tokens] = base_row, 0
    entries[num_tokens:] = 0
    numbers = np.asarray(rows, dtype=np.intp)
    entries[numbers, 0] = slots
    entries[numbers, 1] = np.arange(len(rows))
    return size
