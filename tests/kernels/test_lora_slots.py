"""The slot table of the CUDA kernels: rows of adapters and of blends, and how long a blend keeps its row."""

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaplane_kernels.lora_segments import MAX_BLEND_ROWS, Blend
from deltaplane_kernels.lora_slots import (
    FACTORS_AT,
    HAS_BIAS,
    HAS_GAIN,
    IS_BLEND,
    MAX_PAGES,
    MAX_RANK,
    SLICES_AT,
    SlotTable,
)
from deltaplane_kernels.rank_pages import NO_ROWS, RANK_PAGE_ROWS, SliceRows

UNWRITTEN = -77
ROWS = {
    0: [[SliceRows(8), SliceRows(3)], [NO_ROWS, SliceRows(12)]],
    1: [[SliceRows(4), NO_ROWS], [NO_ROWS, SliceRows(17)]],
    2: [[SliceRows(5), NO_ROWS], [NO_ROWS, SliceRows(1)]],
}
PAGES = {0: [9, 4], 1: [1, 2, 3], 2: [7]}


def make_table(max_blends: int = 2) -> SlotTable:
    table = SlotTable(3, max_blends, 4, torch.device("cpu"))
    table.device.fill_(UNWRITTEN)
    for slot, rows in ROWS.items():
        table.bind(slot, PAGES[slot], rows)
    return table


def rows_of(table: SlotTable, *blends: Blend) -> list[int]:
    """The rows of a step's blends. The staging memory still holds another step's."""
    staging = torch.full((2, table.device.shape[1]), UNWRITTEN, dtype=torch.int32)
    return table.rows_of(blends, staging)


def pages_of(row: Tensor, count: int) -> list[tuple[int, float]]:
    """Pages and the factor of each."""
    factors = row.numpy()[FACTORS_AT:][:count].view(np.float32)
    return [(int(page), float(factor)) for page, factor in zip(row[:count], factors, strict=True)]


def test_a_row_has_pages_ranks_and_what_else_a_matrix_has() -> None:
    table = make_table()
    table.bind(
        1,
        [5, 6, 30],
        [[SliceRows(8, has_gain=True), NO_ROWS], [SliceRows(7, True, True), SliceRows(0, has_bias=True)]],
    )
    row = table.device[1].tolist()
    assert row[:2] == [5, 6]
    assert row[2] != 30, "a page that is no rank page"
    assert row[SLICES_AT:] == [8 | HAS_GAIN, 0, 7 | HAS_GAIN | HAS_BIAS, HAS_BIAS]
    assert table.device[0, SLICES_AT:].tolist() == [8, 3, 0, 12]


def test_the_flags_leave_room_for_ranks_and_a_row_for_all_pages() -> None:
    assert min(HAS_GAIN, HAS_BIAS, IS_BLEND) > MAX_RANK
    assert MAX_PAGES * RANK_PAGE_ROWS >= MAX_RANK + 2
    assert MAX_RANK >= MAX_BLEND_ROWS


def test_the_base_model_has_a_row_without_ranks() -> None:
    table = SlotTable(3, 2, 4, torch.device("cpu"))
    assert table.base_row == len(table.device) - 1 == 5
    rows_of(table)
    for slot, rows in ROWS.items():
        table.bind(slot, PAGES[slot], rows)
    rows_of(table, ((0, 0.5),), ((1, 0.5),))
    assert not table.device[table.base_row].any()


def test_a_rank_that_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="an adapter of rank 257; at most rank 256 runs on a GPU"):
        make_table().bind(0, range(33), [[SliceRows(257), NO_ROWS]] * 2)


def test_a_blend_has_its_members_pages_in_turn_and_each_ones_weight() -> None:
    table = make_table()
    [index] = rows_of(table, ((1, 0.5), (0, -2.0), (2, 3.0)))
    row = table.device[index]
    assert pages_of(row, 6) == [(1, 0.5), (2, 0.5), (3, 0.5), (9, -2.0), (4, -2.0), (7, 3.0)]
    last = 5 * RANK_PAGE_ROWS
    assert row[SLICES_AT:].tolist() == [
        IS_BLEND | last + 5,
        IS_BLEND | 3 * RANK_PAGE_ROWS + 3,
        0,
        IS_BLEND | last + 1,
    ]


def test_a_blend_keeps_its_row_while_its_members_stay() -> None:
    table = make_table()
    blend: Blend = ((0, 0.5), (1, 0.5))
    [row] = rows_of(table, blend)
    table.device[row] = UNWRITTEN
    assert rows_of(table, blend) == [row]
    assert (table.device[row] == UNWRITTEN).all(), "sent once"
    table.bind(2, [8], ROWS[2])
    assert rows_of(table, blend) == [row]
    assert (table.device[row] == UNWRITTEN).all(), "sent once"
    table.bind(1, [6, 5, 8], ROWS[1])
    [row] = rows_of(table, blend)
    assert pages_of(table.device[row], 5) == [(9, 0.5), (4, 0.5), (6, 0.5), (5, 0.5), (8, 0.5)]


def test_another_weight_is_another_blend() -> None:
    table = make_table()
    one, other = rows_of(table, ((0, 0.5),), ((0, 0.25),))
    assert {one, other} == {3, 4}
    assert pages_of(table.device[one], 2) == [(9, 0.5), (4, 0.5)]
    assert pages_of(table.device[other], 2) == [(9, 0.25), (4, 0.25)]


def test_the_blend_that_was_not_asked_for_the_longest_goes_first() -> None:
    table = make_table()
    first, second, third = (((slot, 1.0),) for slot in range(3))
    one, two = rows_of(table, first, second)
    assert rows_of(table, first) == [one]
    assert rows_of(table, third) == [two]
    assert rows_of(table, first, third) == [one, two]
    assert pages_of(table.device[two], 1) == [(7, 1.0)]


@pytest.mark.parametrize("seed", range(5))
def test_blends_of_a_step_have_rows_of_their_own_whatever_came_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = make_table(max_blends=3)
    choices: list[Blend] = [((slot, weight),) for slot in range(3) for weight in (1.0, 2.0, 3.0)]
    staging = torch.zeros(3, table.device.shape[1], dtype=torch.int32)
    for _ in range(100):
        blends = [choices[index] for index in rng.permutation(9)[: rng.integers(4)]]
        rows = table.rows_of(blends, staging)
        assert len(set(rows)) == len(rows)
        for row, ((slot, weight),) in zip(rows, blends, strict=True):
            assert row >= 3
            assert pages_of(table.device[row], len(PAGES[slot])) == [(page, weight) for page in PAGES[slot]]
