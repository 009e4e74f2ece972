"""What the CUDA kernels are told: tiles of a step, splits of the input, sizes of tables and workspace."""

import random

import numpy as np
import pytest

from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.lora_cuda import SPLIT_ALIGNMENT, partial_elements, plan_splits
from deltaplane_kernels.lora_launch import (
    COLUMN_BLOCK,
    check_layout,
    column_blocks,
    widths_of_one_slice,
)
from deltaplane_kernels.lora_norm_cuda import (
    MAX_CLUSTER,
    MAX_ROWS,
    MAX_THREADS,
    MAX_WIDTH,
    VECTOR,
    plan_cluster,
)
from deltaplane_kernels.lora_slots import MAX_RANK
from deltaplane_kernels.lora_tiles import (
    HEADER,
    ROW_FIELDS,
    TILE_FIELDS,
    table_size,
    tile_rows,
    tiles_at,
    write_table,
)
from deltaplane_kernels.rank_pages import RankPageLayout

SLICES = (LinearSlice("slice_0", 16), LinearSlice("slice_1", 24))
UNWRITTEN = -77
BASE_ROW = 99


def table_of(runs_by_slot: dict[int, list[tuple[int, int]]], num_tokens: int) -> list[int]:
    table = np.full(table_size(num_tokens), UNWRITTEN, dtype=np.int32)
    used = write_table(table, runs_by_slot, BASE_ROW, num_tokens)
    assert (table[used:] == UNWRITTEN).all()
    return [int(value) for value in table[:used]]


def rows_by_slot(table: list[int], most: int) -> dict[int, list[int]]:
    """Reads a table as shrink and expand do."""
    num_tiles, rows_at, num_rows, _ = table[:HEADER]
    begin = tiles_at(num_rows)
    assert begin % TILE_FIELDS == 0
    assert rows_at == begin + TILE_FIELDS * num_tiles
    rows: dict[int, list[int]] = {}
    expected = 0
    for index in range(num_tiles):
        slot, first, count, _ = table[begin + TILE_FIELDS * index :][:TILE_FIELDS]
        assert first == expected
        assert 1 <= count <= most
        rows.setdefault(slot, []).extend(table[rows_at + first : rows_at + first + count])
        expected += count
    assert rows_at + expected == len(table)
    return rows


def rows_by_number(table: list[int]) -> dict[int, list[int]]:
    """The same and the rows of the base, from the entries of the rows."""
    _, rows_at, num_rows, _ = table[:HEADER]
    rows: dict[int, list[int]] = {}
    for number in range(num_rows):
        slot, place = table[HEADER + ROW_FIELDS * number :][:ROW_FIELDS]
        assert slot == BASE_ROW or table[rows_at + place] == number
        rows.setdefault(slot, []).append(number)
    return rows


def test_a_table_of_two_slots_and_the_base() -> None:
    assert table_of({3: [(0, 1), (4, 6)], 1: [(2, 3)]}, 7) == [
        *(2, 20 + 8, 7, 0),
        *(3, 0),
        *(BASE_ROW, 0),
        *(1, 3),
        *(BASE_ROW, 0),
        *(3, 1),
        *(3, 2),
        *(BASE_ROW, 0),
        *(0, 0),
        *(3, 0, 3, 0),
        *(1, 3, 1, 0),
        *(0, 4, 5),
        2,
    ]


def test_a_table_without_base_rows() -> None:
    assert table_of({3: [(0, 2)]}, 2) == [*(1, 8 + 4, 2, 0), *(3, 0, 3, 1), *(3, 0, 2, 0), *(0, 1)]


def test_a_long_run_takes_several_tiles() -> None:
    assert table_of({0: [(0, 35)]}, 35)[tiles_at(35) :][:12] == [0, 0, 16, 0, 0, 16, 16, 0, 0, 32, 3, 0]
    assert table_of({0: [(10, 310)]}, 1310)[tiles_at(1310) :][:20:4] == [0] * 5
    assert table_of({0: [(10, 310)]}, 1310)[tiles_at(1310) + 2 :][:20:4] == [64, 64, 64, 64, 44]


def test_a_step_of_one_row_each_fills_the_table_it_was_promised() -> None:
    runs = {slot: [(slot, slot + 1)] for slot in range(256)}
    assert len(table_of(runs, 256)) == table_size(256)


@pytest.mark.parametrize("seed", range(20))
def test_tables_hold_each_row_once_in_tiles_of_its_slot(seed: int) -> None:
    rng = random.Random(seed)
    runs: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for _ in range(rng.randrange(1, 60)):
        start += rng.randrange(3)
        stop = start + rng.choice((1, 1, 1, 5, 17, 70))
        runs.setdefault(rng.randrange(6), []).append((start, stop))
        start = stop
    num_tokens = start + rng.randrange(3)
    expected = {slot: [row for run in own for row in range(*run)] for slot, own in runs.items()}
    table = table_of(runs, num_tokens)
    assert rows_by_slot(table, tile_rows(num_tokens)) == expected
    base = sorted(set(range(num_tokens)).difference(*expected.values()))
    assert rows_by_number(table) == expected | ({BASE_ROW: base} if base else {})


def test_only_long_steps_have_long_tiles() -> None:
    assert [tile_rows(count) for count in (1, 64, 1024, 1025, 8192)] == [16, 16, 16, 64, 64]


@pytest.mark.parametrize("in_features", [8, 64, 1024, 1032, 2056, 4096, 14336, 28672])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 65, 256, 1024, 1025, 2048, 8192])
def test_splits_cover_the_input_and_none_is_empty(in_features: int, num_rows: int) -> None:
    splits = plan_splits(num_rows, in_features, 3, 132)
    assert splits.width % SPLIT_ALIGNMENT == 0
    assert (splits.count - 1) * splits.width < in_features <= splits.count * splits.width


def test_shrink_is_split_less_beside_a_product_and_over_many_rows() -> None:
    assert plan_splits(64, 4096, 3, 132).count == 2
    assert plan_splits(64, 14336, 1, 132).count == 7
    assert plan_splits(65, 4096, 3, 132).count == 4
    assert plan_splits(65, 14336, 1, 132).count == 14
    assert plan_splits(8192, 4096, 3, 132).count == 1
    assert plan_splits(8192, 14336, 1, 132).count == 3


def test_the_workspace_holds_the_partials_of_any_step() -> None:
    linears = (
        PackedLinear("qkv_proj", 4096, tuple(LinearSlice(name, 1024) for name in "qkv")),
        PackedLinear("down_proj", 14336, (LinearSlice("down", 4096),)),
    )
    layout = RankPageLayout(AdapterLayout(1, linears))
    elements = partial_elements(layout, 2000, 132)
    for rows in (1, 64, 65, 256, 1024, 1025, 1280, 2000):
        for linear in linears:
            slices = len(linear.slices)
            splits = plan_splits(rows, linear.in_features, slices, 132)
            assert splits.count * rows * slices * MAX_RANK <= elements


def test_no_block_of_columns_reaches_over_two_slices() -> None:
    linear = PackedLinear("qkv_proj", 64, (LinearSlice("q", COLUMN_BLOCK + 8), LinearSlice("k", 8)))
    layout = RankPageLayout(AdapterLayout(1, (linear,)))
    assert column_blocks(layout.placements["qkv_proj"]) == 3


@pytest.mark.parametrize("width", [8, 64, 72, 520, 2056, 4096, 8192, MAX_WIDTH - 8, MAX_WIDTH])
@pytest.mark.parametrize("num_rows", [1, 32, 33, MAX_ROWS])
def test_a_cluster_covers_a_row_in_whole_warps(num_rows: int, width: int) -> None:
    cluster = plan_cluster(num_rows, width)
    assert 1 < cluster.blocks <= MAX_CLUSTER
    assert cluster.columns % VECTOR == 0
    assert cluster.blocks * cluster.columns >= width > cluster.blocks * (cluster.columns - VECTOR)
    assert cluster.threads % 32 == 0
    assert cluster.threads <= MAX_THREADS
    assert cluster.threads - 32 < cluster.columns / VECTOR <= cluster.threads


def test_linears_of_one_slice_are_told_from_others() -> None:
    one, two = (PackedLinear(name, 64, slices) for name, slices in (("o", SLICES[:1]), ("qkv", SLICES)))
    assert widths_of_one_slice(RankPageLayout(AdapterLayout(1, (two, one)))) == {"o": 16}


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        (PackedLinear("o_proj", 60, (LinearSlice("o", 64),)), "o_proj has a width of 60"),
        (PackedLinear("o_proj", 64, (LinearSlice("o", 4),)), "o_proj has a width of 4"),
        (
            PackedLinear("all_proj", 64, tuple(LinearSlice(name, 64) for name in "abcde")),
            "all_proj has 5 slices; at most 4",
        ),
    ],
)
def test_layouts_that_the_kernels_do_not_take_are_refused(linear: PackedLinear, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(RankPageLayout(AdapterLayout(1, (linear,))))
