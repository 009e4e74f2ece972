"""KV pages without the prefix cache: given, grown and taken back."""

import random

import pytest

from deltaplane_server.scheduling.kv_pages import KvPages
from deltaplane_server.scheduling.sequence import Sequence
from fake_runner import make_sequence


def compute_all(pages: KvPages, sequence: Sequence) -> None:
    """As a step does that computes all that is left."""
    start = sequence.num_computed
    sequence.num_computed = sequence.num_tokens
    pages.cache(sequence, start, sequence.num_computed)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_prompt_gets_the_pages_it_needs(num_tokens: int, num_pages: int) -> None:
    pages = KvPages(num_pages=4)
    sequence = make_sequence(1, range(num_tokens))
    assert pages.fits(sequence)
    pages.allocate(sequence)
    assert len(sequence.pages) == num_pages
    assert pages.num_free == 4 - num_pages
    assert sequence.num_computed == 0
    pages.check_integrity([sequence])


def test_spare_pages_stay_free() -> None:
    pages = KvPages(num_pages=4)
    sequence = make_sequence(1, range(48))
    assert pages.fits(sequence, spare=1)
    assert not pages.fits(sequence, spare=2)
    assert not pages.fits(make_sequence(2, range(65)))


def test_a_sequence_grows_by_a_page_when_its_last_is_full() -> None:
    pages = KvPages(num_pages=2)
    sequence = make_sequence(1, range(15))
    pages.allocate(sequence)
    for num_tokens in range(16, 33):
        sequence.tokens.append(num_tokens)
        assert pages.extend(sequence)
        assert len(sequence.pages) == (1 if num_tokens <= 16 else 2)
    sequence.tokens.append(33)
    assert not pages.extend(sequence), "there is no third page"
    assert len(sequence.pages) == 2
    pages.check_integrity([sequence])


def test_pages_come_back_and_are_given_again() -> None:
    pages = KvPages(num_pages=3)
    first, second = make_sequence(1, range(20)), make_sequence(2, range(40))
    pages.allocate(first)
    assert not pages.fits(second)
    pages.free(first)
    assert first.pages == []
    assert first.num_computed == 0
    pages.free(first)
    assert pages.fits(second)
    pages.allocate(second)
    assert sorted(second.pages) == [0, 1, 2]
    pages.check_integrity([first, second])


def test_nothing_is_shared_without_the_prefix_cache() -> None:
    pages = KvPages(num_pages=8)
    first, second = make_sequence(1, [7] * 40), make_sequence(2, [7] * 40)
    pages.allocate(first)
    compute_all(pages, first)
    pages.free(first)
    pages.allocate(second)
    assert second.num_computed == 0
    assert (pages.queries, pages.hits) == (0, 0)


def test_integrity_notices_a_page_that_is_lost() -> None:
    pages = KvPages(num_pages=4)
    sequence = make_sequence(1, range(20))
    pages.allocate(sequence)
    sequence.pages.pop()
    with pytest.raises(AssertionError, match="miscounted"):
        pages.check_integrity([sequence])


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_random_use_keeps_the_books(enable_prefix_caching: bool) -> None:
    draw = random.Random(3)
    pages = KvPages(num_pages=20, page_size=2, enable_prefix_caching=enable_prefix_caching)
    held: list[Sequence] = []
    for number in range(3000):
        event = draw.random()
        if event < 0.4:
            sequence = make_sequence(number, [draw.randint(0, 1) for _ in range(draw.randint(1, 12))])
            if pages.fits(sequence):
                free = pages.num_free
                pages.allocate(sequence)
                assert pages.num_free >= free - len(sequence.pages)
                held.append(sequence)
                compute_all(pages, sequence)
        elif event < 0.7 and held:
            sequence = draw.choice(held)
            sequence.tokens.append(draw.randint(0, 1))
            if pages.extend(sequence):
                compute_all(pages, sequence)
            else:
                sequence.tokens.pop()
        elif held:
            pages.free(held.pop(draw.randrange(len(held))))
        pages.check_integrity(held)
    for sequence in held:
        pages.free(sequence)
    assert pages.num_free == 20
