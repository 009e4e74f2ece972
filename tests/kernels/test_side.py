"""The side ops of a pool on a CPU against plain loops: mixes, ranks, types, odd sizes, many pages."""

import pytest
import torch

from deltaplane_kernels.layout import AdapterLayout
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.norm import rms_norm
from deltaplane_kernels.side_pages import SideShape
from lora_cases import BASE, MIXES, make_mix
from side_cases import (
    EPS,
    SideAdapter,
    check_step,
    filled_pool,
    head_by_loop,
    make_outside_layout,
    make_side_adapter,
    make_side_adapters,
    no_rows,
    norm_by_loop,
    outside_of,
    same_bits,
    side_layout,
)

LAYOUT = make_outside_layout()
OUTSIDE = outside_of(LAYOUT)


@pytest.fixture(scope="module")
def adapters() -> list[SideAdapter]:
    return make_side_adapters(OUTSIDE)


@pytest.fixture(scope="module")
def pool(adapters: list[SideAdapter]) -> RankPagePool:
    return filled_pool(adapters, LAYOUT)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_equal_the_loop(pool: RankPagePool, adapters: list[SideAdapter], mix: str, batch: int) -> None:
    check_step(pool, adapters, make_mix(mix, batch, len(adapters), seed=batch))


def test_prompts_beside_decodes_equal_the_loop(pool: RankPagePool, adapters: list[SideAdapter]) -> None:
    check_step(pool, adapters, [(7, 1), (BASE, 3), (2, 200), (3, 1), (7, 50), (6, 40), (4, 1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_loop(dtype: torch.dtype) -> None:
    adapters = make_side_adapters(OUTSIDE, dtype)
    check_step(filled_pool(adapters, LAYOUT, dtype), adapters, make_mix("distinct", 20, len(adapters)), dtype)


def test_sizes_that_are_no_multiple_of_the_alignment_equal_the_loop() -> None:
    layout = make_outside_layout(vocab=99, hidden=60, head_dim=13)
    adapters = make_side_adapters(outside_of(layout))
    check_step(filled_pool(adapters, layout), adapters, make_mix("distinct", 20, len(adapters)))


def test_parts_over_many_pages_equal_the_loop() -> None:
    """A vocabulary of which a page holds two rows."""
    elements = side_layout(make_outside_layout(num_layers=1)).page_elements
    layout = make_outside_layout(vocab=elements // 2 - 3, num_layers=1)
    adapters = make_side_adapters(outside_of(layout))
    assert side_layout(layout).place(adapters[7].shape).num_pages > 20
    check_step(filled_pool(adapters, layout), adapters, make_mix("distinct", 9, len(adapters)))


def test_rows_that_are_drawn_get_what_the_step_gives_them(
    pool: RankPagePool, adapters: list[SideAdapter]
) -> None:
    step = pool.step([(0, 3), (BASE, 2), (5, 4), (3, 2), (0, 1)])
    assert step is not None
    assert step.side is not None
    slots, rows = [0, BASE, 5, 3, 0], torch.tensor([2, 4, 8, 10, 11])
    x, logits = torch.randn(5, 64), torch.randn(5, 200)
    expected = head_by_loop(adapters, slots, x, logits)
    side = step.side.at(rows)
    side.add_head_delta(x, logits)
    torch.testing.assert_close(logits.double(), expected, rtol=2e-5, atol=2e-5)
    weight, norm = torch.randn(16), "layers.0.self_attn.q_norm"
    expected = norm_by_loop(adapters, slots, norm, weight, x[:, :16])
    y = rms_norm(x[:, :16], side.norm_weight(norm, weight), EPS)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_norm_that_no_row_has_is_the_bases_own(pool: RankPagePool) -> None:
    step = pool.step([(0, 2), (BASE, 1)])
    assert step is not None
    assert step.side is not None
    weight = torch.randn(64)
    assert step.side.norm_weight("norm", weight) is weight


def test_a_step_of_plain_adapters_has_no_side(pool: RankPagePool) -> None:
    step = pool.step([(3, 2), (BASE, 1)])
    assert step is not None
    assert step.side is None


def test_an_adapter_that_overflows_reaches_no_other_row() -> None:
    good = make_side_adapter(OUTSIDE, head=4, embedding=4, norms=["norm"])
    huge = make_side_adapter(OUTSIDE, head=4, embedding=4, norms=["norm"], seed=1)
    for part in (*(huge.head or ()), *(huge.embedding or ()), *huge.norms.values()):
        part.fill_(3e38)
    pool = filled_pool([good, huge], LAYOUT)
    outputs = []
    for slots in ([0, 1, BASE, 1, 0], [0, BASE, BASE, BASE, 0]):
        step = pool.step([(slot, 1) for slot in slots])
        assert step is not None
        assert step.side is not None
        x, logits = torch.ones(5, 64), torch.ones(5, 200)
        step.side.embed(torch.zeros(5, dtype=torch.int64), x)
        step.side.add_head_delta(torch.ones(5, 64), logits)
        outputs.append((x, logits))
    for loud, quiet in zip(*outputs, strict=True):
        assert not loud[[1, 3]].isfinite().any()
        assert same_bits(loud[[0, 2, 4]], quiet[[0, 2, 4]])


def test_a_slot_is_bound_again_with_other_parts(adapters: list[SideAdapter]) -> None:
    pool = filled_pool([adapters[0], adapters[4]], LAYOUT)
    for slot in (0, 1):
        pool.clear(slot)
    layout = side_layout(LAYOUT)
    pool.load(1, [3], adapters[0].host_pages(layout, torch.float32), no_rows(LAYOUT), adapters[0].shape)
    pool.load(0, [1], adapters[1].host_pages(layout, torch.float32), no_rows(LAYOUT), adapters[1].shape)
    check_step(pool, [adapters[1], adapters[0]], [(0, 2), (1, 3), (BASE, 1)])


def test_pages_that_do_not_fit_the_parts_are_refused() -> None:
    pool = RankPagePool(LAYOUT, 4, 1, torch.float32)
    host = torch.zeros(2, pool.layout.page_elements)
    with pytest.raises(ValueError, match="takes 1 pages, not 2"):
        pool.load(0, [0, 1], host, no_rows(LAYOUT), SideShape(head_rank=1))
    with pytest.raises(ValueError, match="nothing outside"):
        RankPagePool(make_outside_layout_without(), 4, 1, torch.float32).load(
            0, [0], host[:1], no_rows(LAYOUT), SideShape(head_rank=1)
        )


def make_outside_layout_without() -> AdapterLayout:
    return AdapterLayout(LAYOUT.num_layers, LAYOUT.linears)
