"""The allocator of rank pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaplane_controlplane.rank_pages import RankPageAllocator


def test_prefers_pages_in_a_row() -> None:
    pages = RankPageAllocator(8)
    first, second, third = pages.allocate(2), pages.allocate(3), pages.allocate(2)
    assert (first, second, third) == ((0, 1), (2, 3, 4), (5, 6))
    pages.free(second)
    assert pages.allocate(3) == (2, 3, 4)


def test_takes_scattered_pages_when_there_are_not_enough_in_a_row() -> None:
    pages = RankPageAllocator(6)
    singles = [pages.allocate(1) for _ in range(6)]
    for scattered in (singles[0], singles[2], singles[4]):
        pages.free(scattered)
    assert pages.allocate(3) == (0, 2, 4)


def test_refuses_more_than_is_free_and_a_second_free() -> None:
    pages = RankPageAllocator(2)
    taken = pages.allocate(2)
    with pytest.raises(ValueError, match="1 rank pages asked for, 0 are free"):
        pages.allocate(1)
    pages.free(taken)
    with pytest.raises(ValueError, match="free already"):
        pages.free(taken)


@given(st.integers(1, 24), st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=40))
def test_no_page_has_two_owners(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    pages = RankPageAllocator(num_pages)
    owned: list[tuple[int, ...]] = []
    for takes, count in steps:
        if takes and count <= pages.num_free:
            owned.append(pages.allocate(count))
            assert len(owned[-1]) == count
        elif not takes and owned:
            pages.free(owned.pop(count % len(owned)))
        pages.check_integrity(page for group in owned for page in group)
