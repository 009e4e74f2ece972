"""The rows of a step as the CUDA kernels read them: tiles of rows that share a slot, or a blend of slots.

A table of 32-bit integers:

    [0]        number of tiles n
    [1]        4 + 4 n, where the row list starts
    [2], [3]   0
    [4 + 4 i]  tile i: its row in the slot table (see lora_slots.py), the place in the row list of its first
               row, its number of rows, 0
    [4 + 4 n]  the row list: numbers of the rows that have an adapter, those of a slot together

Tiles of 16 bytes are read at once. Rows of the base model are in no tile.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

HEADER = 4
TILE_FIELDS = 4

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
    return HEADER + (TILE_FIELDS + 1) * max_tokens


def write_table(
    table: NDArray[np.int32], runs_by_slot: Mapping[int, Sequence[tuple[int, int]]], num_tokens: int
) -> int:
    """Writes a step's table and answers how many integers it has.

    table: at least table_size(num_tokens) of them.
    runs_by_slot: the rows [start, stop) of each row of the slot table that is in the step; no row of the step
        is in two runs.
    num_tokens: rows of the step, with those of the base.
    """
    most = tile_rows(num_tokens)
    tiles: list[int] = []
    rows: list[int] = []
    for slot, runs in runs_by_slot.items():
        first = len(rows)
        for start, stop in runs:
            rows += range(start, stop)
        for place in range(first, len(rows), most):
            tiles += (slot, place, min(most, len(rows) - place), 0)
    rows_at = HEADER + len(tiles)
    size = rows_at + len(rows)
    table[:size] = [len(tiles) // TILE_FIELDS, rows_at, 0, 0, *tiles, *rows]
    return size
