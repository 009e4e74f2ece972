"""Pages in host memory that one adapter after the other is packed into."""

import gc
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from deltaplane_server.adapters.host_pages import HostPages


def make_pages(num_pages: int, page_elements: int = 6) -> HostPages:
    return HostPages(num_pages, page_elements, torch.bfloat16, pin_memory=False)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_pages_have_the_shape_and_dtype_also_when_they_are_used_again() -> None:
    pages = make_pages(3)
    for _ in range(4):
        taken = pages.take(2)
        assert taken.shape == (2, 6)
        assert taken.dtype == torch.bfloat16
        assert taken.is_contiguous()
        taken.fill_(7.0)
        del taken
        gc.collect()
    assert pages.num_free == 3


def test_nobody_gets_the_pages_of_another() -> None:
    pages = make_pages(6)
    taken = [pages.take(count).fill_(count) for count in (1, 3, 2)]
    assert pages.num_free == 0
    assert [bool(one.eq(count).all()) for one, count in zip(taken, (1, 3, 2), strict=True)] == [True] * 3
    assert all(shares_memory(one, taken[0]) for one in taken)


def test_pages_are_free_when_nobody_holds_the_tensor() -> None:
    pages = make_pages(2)
    taken = pages.take(2)
    assert pages.num_free == 0
    del taken
    gc.collect()
    assert pages.num_free == 2


def test_where_none_are_left_or_side_by_side_other_memory_is_given() -> None:
    pages = make_pages(4)
    held = [pages.take(1) for _ in range(4)]
    extra = pages.take(2)
    assert extra.shape == (2, 6)
    assert not shares_memory(extra, held[0])
    del held[2], held[0], extra
    gc.collect()
    assert pages.num_free == 2
    assert not shares_memory(pages.take(2), held[0])
    assert shares_memory(pages.take(1), held[0])
    assert pages.take(5).shape == (5, 6)


def test_pool_without_pages() -> None:
    assert make_pages(0).take(1).shape == (1, 6)


def test_many_threads_take_and_give_back() -> None:
    pages = make_pages(8, page_elements=50)

    def work(value: int) -> None:
        for count in (1, 2, 3) * 40:
            taken = pages.take(count).fill_(value)
            assert taken.eq(value).all()

    run_all([threading.Thread(target=work, args=(value,)) for value in range(4)])
    gc.collect()
    assert pages.num_free == 8


def run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
