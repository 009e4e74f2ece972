"""Rank pages and slots: where weights lie, loading, clearing, re-binding, and what is refused."""

import threading

import pytest
import torch
from torch import Tensor

from deltaplane_kernels.layout import AdapterLayout, LinearSlice, PackedLinear
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.rank_pages import RankPageLayout, SliceRows, runs_of_neighbours
from lora_cases import Adapter, add_delta_by_loop, make_adapter, make_layout

LAYOUT = make_layout()
QKV = LAYOUT.linears[0]


def make_pool(num_pages: int = 4, num_slots: int = 3, dtype: torch.dtype = torch.float32) -> RankPagePool:
    return RankPagePool(LAYOUT, num_pages, num_slots, dtype)


def load(pool: RankPagePool, slot: int, pages: list[int], adapter: Adapter) -> None:
    pool.load(slot, pages, adapter.host_pages(torch.float32), adapter.rows)


def qkv_of_slot(pool: RankPagePool, slot: int, x: Tensor) -> Tensor:
    step = pool.step([(slot, len(x))])
    assert step is not None
    y = torch.zeros(len(x), QKV.out_features)
    step.add_delta(0, "qkv_proj", x, y)
    return y


def check_slot(pool: RankPagePool, slot: int, adapter: Adapter) -> None:
    x = torch.randn(3, QKV.in_features, generator=torch.Generator().manual_seed(7))
    expected = add_delta_by_loop([adapter], [(0, 3)], 0, QKV, x, torch.zeros(3, QKV.out_features))
    torch.testing.assert_close(qkv_of_slot(pool, slot, x).double(), expected, rtol=2e-5, atol=2e-5)


def test_page_bytes_are_eight_rows_of_every_matrix_of_every_layer() -> None:
    row = 3 * 64 + (64 + 32 + 32) + 64 + 64 + 2 * 64 + 2 * 128 + 128 + 64
    assert make_pool().page_bytes == 2 * 8 * row * 4
    assert make_pool(dtype=torch.bfloat16).page_bytes == 2 * 8 * row * 2
    assert make_pool().pages.shape == (4, 2 * 8 * row)


def test_every_element_of_a_page_belongs_to_one_matrix() -> None:
    layout = RankPageLayout(LAYOUT)
    pages = torch.zeros(2, layout.page_elements)
    for layer in range(LAYOUT.num_layers):
        for linear in LAYOUT.linears:
            layout.a(pages, layer, linear.name).add_(1)
            for index in range(len(linear.slices)):
                layout.b(pages, layer, linear.name, index).add_(1)
    assert torch.equal(pages, torch.ones_like(pages))


def test_rows_start_at_multiples_of_eight_elements() -> None:
    layout = RankPageLayout(
        AdapterLayout(2, (PackedLinear("qkv_proj", 13, (LinearSlice("q", 5), LinearSlice("k", 9))),))
    )
    pages = torch.zeros(3, layout.page_elements)
    views = [layout.a(pages, 1, "qkv_proj"), *(layout.b(pages, 1, "qkv_proj", index) for index in range(2))]
    for view in views:
        assert view.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in view.stride()[:-1])
        assert view.stride(-1) == 1
    assert views[0].shape == (3, 2, 8, 13)
    assert [tuple(view.shape) for view in views[1:]] == [(3, 8, 5), (3, 8, 9)]


def test_views_of_some_pages_are_views_of_those() -> None:
    layout = RankPageLayout(LAYOUT)
    pages = torch.zeros(4, layout.page_elements)
    layout.a(pages[2:3], 1, "o_proj").fill_(1)
    assert layout.a(pages, 1, "o_proj")[2].all()
    assert not pages[[0, 1, 3]].any()


def test_a_full_float32_page_is_used_where_it_lies() -> None:
    pool = make_pool()
    load(pool, 0, [1], make_adapter(LAYOUT, 8))
    pool.pages[1].zero_()
    assert not qkv_of_slot(pool, 0, torch.ones(1, 64)).any()


def test_a_slot_is_bound_again_to_other_weights() -> None:
    pool = make_pool()
    first, second = make_adapter(LAYOUT, 8, seed=1), make_adapter(LAYOUT, 12, seed=2, modules=["q_proj"])
    load(pool, 1, [2], first)
    check_slot(pool, 1, first)
    pool.clear(1)
    load(pool, 1, [2, 0], second)
    check_slot(pool, 1, second)
    load(pool, 0, [1], first)
    check_slot(pool, 0, first)
    check_slot(pool, 1, second)
    pool.check_integrity()


def test_a_cleared_slot_serves_nobody() -> None:
    pool = make_pool()
    load(pool, 0, [0], make_adapter(LAYOUT, 8))
    pool.clear(0)
    with pytest.raises(ValueError, match="slot 0 holds no adapter"):
        pool.step([(0, 1)])
    with pytest.raises(ValueError, match="slot 0 holds no adapter"):
        pool.clear(0)


@pytest.mark.parametrize(
    ("slot", "pages", "complaint"),
    [
        (3, [0, 1], "slot 3 is not one of 0 to 2"),
        (-1, [0, 1], "slot -1 is not one of 0 to 2"),
        (0, [0, 4], "must be different ones of 0 to 3"),
        (0, [1, 1], "must be different ones of 0 to 3"),
        (2, [0, 1], "slot 2 is bound; clear it first"),
        (0, [2, 3], r"pages \[3\] belong to another slot"),
        (0, [0], "where 1 pages of this pool are"),
    ],
)
def test_a_load_that_does_not_fit_is_refused(slot: int, pages: list[int], complaint: str) -> None:
    pool = make_pool()
    resident = make_adapter(LAYOUT, 8, seed=1)
    load(pool, 2, [3], resident)
    with pytest.raises(ValueError, match=complaint):
        load(pool, slot, pages, make_adapter(LAYOUT, 16, seed=2))
    check_slot(pool, 2, resident)
    pool.check_integrity()


def test_rows_that_do_not_fit_are_refused() -> None:
    pool = make_pool()
    adapter = make_adapter(LAYOUT, 8)
    host = adapter.host_pages(torch.float32)
    with pytest.raises(ValueError, match="2 layers with 7 slices each"):
        pool.load(0, [0], host, adapter.rows[:1])
    with pytest.raises(ValueError, match="2 layers with 7 slices each"):
        pool.load(0, [0], host, [[SliceRows(8)] * 6, [SliceRows(8)] * 7])
    with pytest.raises(ValueError, match="takes 2 pages, not 1"):
        pool.load(0, [0], host, [[SliceRows(9)] * 7, [SliceRows(8)] * 7])
    with pytest.raises(ValueError, match="takes 2 pages, not 1"):
        pool.load(0, [0], host, [[SliceRows(7, has_gain=True, has_bias=True)] * 7, [SliceRows(8)] * 7])
    with pytest.raises(ValueError, match="bfloat16"):
        pool.load(0, [0], host.bfloat16(), adapter.rows)


def test_a_load_that_fails_midway_leaves_slot_and_pages_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    adapter = make_adapter(LAYOUT, 16)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("deltaplane_kernels.lora.adapter_deltas", out_of_memory)
        with pytest.raises(MemoryError):
            load(pool, 0, [0, 1], adapter)
    load(pool, 0, [1, 0], adapter)
    check_slot(pool, 0, adapter)


def test_loads_while_other_slots_are_in_use_change_nothing_there() -> None:
    pool = make_pool(num_pages=8, num_slots=4)
    resident = make_adapter(LAYOUT, 12, seed=1)
    load(pool, 0, [3, 6], resident)
    guest = make_adapter(LAYOUT, 16, seed=2)
    host, rows = guest.host_pages(torch.float32), guest.rows
    x = torch.randn(4, 64)
    expected = qkv_of_slot(pool, 0, x)
    done = threading.Event()

    def churn() -> None:
        for _ in range(50):
            pool.load(1, [4, 5], host, rows)
            pool.clear(1)
        done.set()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        while not done.is_set():
            assert torch.equal(qkv_of_slot(pool, 0, x), expected)
    finally:
        thread.join(30)
    pool.check_integrity()


def test_a_pool_made_in_inference_mode_takes_loads_from_other_threads() -> None:
    with torch.inference_mode():
        pool = make_pool()
    adapter = make_adapter(LAYOUT, 8)
    load(pool, 0, [0], adapter)
    with torch.inference_mode():
        check_slot(pool, 0, adapter)


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([2, 3, 4], [(0, 3)]),
        ([4, 3, 2], [(0, 1), (1, 2), (2, 3)]),
        ([7, 8, 1, 2, 3, 0, 9, 10], [(0, 2), (2, 5), (5, 6), (6, 8)]),
    ],
)
def test_pages_that_are_neighbours_in_order_are_copied_together(
    pages: list[int], runs: list[tuple[int, int]]
) -> None:
    assert runs_of_neighbours(pages) == runs
