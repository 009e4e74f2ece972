"""How a product of few rows is shared out among the blocks of a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_kernels.few_rows_cuda import (
    BARRIERS,
    COLUMNS,
    GROUP,
    OUTPUTS,
    ROWS,
    SHARED_BYTES,
    SPLITS,
    SUMS,
    X_STAGES,
    Tiling,
    plan_tiling,
    weight_stages,
)

H200 = {1: 132, 2: 132, 4: 120, 8: 120}
"""Blocks that it holds, by splits."""


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((6144, 4096), Tiling(48, 1, 128)),
        ((4096, 4096), Tiling(64, 2, 128)),
        ((28672, 4096), Tiling(112, 1, 128)),
        ((4096, 14336), Tiling(64, 2, 128)),
    ],
    ids=["qkv", "o", "gate_up", "down"],
)
def test_the_products_of_llama_3_8b_take_128_blocks(shape: tuple[int, int], tiling: Tiling) -> None:
    assert plan_tiling(*shape, H200) == tiling


@given(
    out_features=st.integers(1, 4096).map(lambda groups: groups * GROUP),
    in_features=st.integers(1, 256).map(lambda boxes: boxes * 64),
    multiprocessors=st.integers(8, 200),
)
def test_a_tiling_covers_all_and_fits_the_gpu(
    out_features: int, in_features: int, multiprocessors: int
) -> None:
    resident_blocks = {splits: multiprocessors // splits * splits for splits in SPLITS}
    tiling = plan_tiling(out_features, in_features, resident_blocks)
    assert 1 <= tiling.blocks <= resident_blocks[tiling.splits]
    tiles_at_once, rest = divmod(tiling.blocks, tiling.splits)
    assert rest == 0
    tiles = -(-out_features // tiling.outputs)
    if tiling.splits > 1:
        assert tiles_at_once == tiles  # blocks that sum up take one tile each
        assert tiling.outputs // GROUP % tiling.splits == 0
        assert in_features >= COLUMNS * tiling.splits  # no block is without columns
    else:
        assert tiles_at_once <= tiles


@pytest.mark.parametrize("x_rows", range(GROUP, ROWS + 1, GROUP))
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_block_holds_enough_of_the_weight_and_no_more_than_it_may(outputs: int, x_rows: int) -> None:
    stages = weight_stages(outputs, x_rows)
    assert stages >= X_STAGES
    rows = stages * outputs + X_STAGES * x_rows
    assert 2 * COLUMNS * rows + 16 * SUMS * outputs // GROUP + 8 * BARRIERS <= SHARED_BYTES
