"""The side ops on the GPU against plain loops in float64, outside and inside CUDA graphs."""

import pytest
import torch

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.lora_segments import Segments
from lora_cases import BASE, MIXES, make_mix
from side_cases import (
    SideAdapter,
    SideCheck,
    check_step,
    filled_pool,
    make_outside_layout,
    make_side_adapters,
    no_rows,
    outside_of,
    side_layout,
    slots_of,
)

DTYPES = [torch.float32, torch.bfloat16]
"""Of float16 the interpreter sees to."""

SMALL = make_outside_layout(vocab=2099)
WIDE = make_outside_layout(vocab=32003, hidden=2056, head_dim=128, num_layers=1)
"""A vocabulary that is odd, and several blocks of columns of a row."""


def case(layout: AdapterLayout, dtype: torch.dtype) -> tuple[list[SideAdapter], RankPagePool]:
    adapters = make_side_adapters(outside_of(layout), dtype)
    return adapters, filled_pool(adapters, layout, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_the_loop(mix: str, dtype: torch.dtype) -> None:
    adapters, pool = case(SMALL, dtype)
    for batch in (1, 2, 3, 7, 16, 33, 64, 133):
        check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_model_equals_the_loop(dtype: torch.dtype) -> None:
    adapters, pool = case(WIDE, dtype)
    check_step(pool, adapters, [(7, 1), (BASE, 3), (2, 5), (3, 1), (7, 3), (6, 4), (4, 1), (5, 2)], dtype)


def test_parts_over_many_pages_equal_the_loop() -> None:
    elements = side_layout(make_outside_layout(num_layers=1)).page_elements
    layout = make_outside_layout(vocab=elements // 2 - 3, num_layers=1)
    adapters, pool = case(layout, torch.float32)
    check_step(pool, adapters, make_mix("distinct", 9, len(adapters)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_serves_whatever_step_is_staged(dtype: torch.dtype) -> None:
    """Also steps of fewer rows, of plain adapters alone, and of slots that were bound anew."""
    adapters, pool = case(SMALL, dtype)
    num_rows = 24
    side = pool.graph_step(num_rows).side
    assert side is not None
    check = SideCheck.of(adapters, num_rows, dtype, "cuda")
    check.outputs(side)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = check.outputs(side)
    mixes: list[Segments] = [make_mix(mix, 24, len(adapters)) for mix in ("distinct", "uniform", "skewed")]
    mixes += [[(3, 1)] * 20, mixes[0], [(7, 1), (3, 2), (BASE, 1)], [(3, 1)], [(7, 5)]]
    for segments in mixes:
        step = pool.step(segments)
        assert step is not None
        graph.replay()
        check.check([*slots_of(segments), *[BASE] * (num_rows - len(slots_of(segments)))], outputs)
    pool.clear(0)
    host = adapters[6].host_pages(side_layout(SMALL), dtype)
    pool.load(0, range(len(host)), host, no_rows(SMALL), adapters[6].shape)
    assert pool.step([(0, 4), (1, 2)]) is not None
    graph.replay()
    moved = [adapters[6], *adapters[1:]]
    SideCheck(moved, dtype, check.tokens, check.x, check.logits, check.heads, check.weights).check(
        [0] * 4 + [1] * 2 + [BASE] * 18, outputs
    )


def test_rows_that_are_drawn_get_what_the_step_gives_them() -> None:
    adapters, pool = case(SMALL, torch.float32)
    step = pool.step([(0, 3), (BASE, 2), (5, 4), (3, 2), (0, 1)])
    assert step is not None
    assert step.side is not None
    check = SideCheck.of(adapters, 5, torch.float32, "cuda")
    rows = torch.tensor([2, 4, 8, 10, 11], device="cuda")
    check.check([0, BASE, 5, 3, 0], check.outputs(step.side.at(rows)))
