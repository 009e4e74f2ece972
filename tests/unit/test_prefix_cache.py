"""The prefix cache: what is found again, for whom, and what is forgotten first."""

from collections.abc import Sequence

import pytest

from deltaplane_server.scheduling.kv_pages import KvPages
from deltaplane_server.scheduling.lease import AdapterUid
from deltaplane_server.scheduling.sequence import Sequence as TokenSequence
from fake_leases import FakeAdapters
from fake_runner import make_sequence


class Cache:
    """KV pages of 4 tokens, and sequences that use them."""

    def __init__(self, num_pages: int = 16) -> None:
        self.pages = KvPages(num_pages, 4, enable_prefix_caching=True)
        self.adapters = FakeAdapters(num_slots=4)
        self.held: list[TokenSequence] = []
        self._count = 0

    def start(self, tokens: Sequence[int], uid: AdapterUid = 0) -> TokenSequence:
        """Gives a new sequence its pages and computes all of it; num_cached is what was found."""
        self._count += 1
        sequence = make_sequence(self._count, tokens, lease=self.adapters.lease(uid) if uid else None)
        assert self.pages.fits(sequence)
        self.pages.allocate(sequence)
        sequence.num_cached = sequence.num_computed
        sequence.num_computed = sequence.num_tokens
        self.pages.cache(sequence, sequence.num_cached, sequence.num_tokens)
        self.held.append(sequence)
        self.pages.check_integrity(self.held)
        return sequence

    def end(self, sequence: TokenSequence) -> None:
        self.held.remove(sequence)
        self.pages.free(sequence)
        self.pages.check_integrity(self.held)

    def num_found(self, tokens: Sequence[int], uid: AdapterUid = 0) -> int:
        """Tokens that a new sequence finds."""
        sequence = self.start(tokens, uid)
        self.end(sequence)
        return sequence.num_cached


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_full_pages_are_shared_while_in_use(cache: Cache) -> None:
    first = cache.start(range(10))
    second = cache.start([*range(8), 90, 91])
    assert second.num_cached == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert cache.pages.num_free == 16 - 4


def test_full_pages_are_found_after_their_sequence_ended(cache: Cache) -> None:
    first = cache.start(range(10))
    pages = first.pages
    cache.end(first)
    assert cache.pages.num_free == 16
    second = cache.start(range(12))
    assert second.num_cached == 8
    assert second.pages[:2] == pages[:2]


@pytest.mark.parametrize(("num_tokens", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_always_computed(cache: Cache, num_tokens: int, found: int) -> None:
    cache.end(cache.start(range(40)))
    assert cache.num_found(range(num_tokens)) == found


def test_a_page_is_found_only_after_the_same_beginning(cache: Cache) -> None:
    cache.end(cache.start([1, 1, 1, 1, 2, 2, 2, 2, 0]))
    assert cache.num_found([3, 3, 3, 3, 2, 2, 2, 2, 0]) == 0
    assert cache.num_found([2, 2, 2, 2, 0]) == 0


def test_nothing_is_shared_between_versions_or_with_the_base(cache: Cache) -> None:
    """Uids differ for the base, for each adapter and for each version of one."""
    prompt = range(20)
    held = {uid: cache.start(prompt, uid) for uid in (0, 1, 2)}
    assert all(sequence.num_cached == 0 for sequence in held.values())
    assert len({page for sequence in held.values() for page in sequence.pages}) == 15
    for uid, sequence in held.items():
        cache.end(sequence)
        assert cache.num_found(prompt, uid) == 16
    assert cache.num_found(prompt, 3) == 0


def test_a_composition_shares_with_the_same_versions_and_weights_alone(cache: Cache) -> None:
    prompt = range(9)
    cache.end(cache.start(prompt, ((1, 0.5), (2, 0.25))))
    assert cache.num_found(prompt, ((1, 0.5), (2, 0.25))) == 8
    others: list[AdapterUid] = [
        0, 1, 2, ((1, 0.25), (2, 0.5)), ((1, 0.5),), ((1, 0.5), (2, -0.25)), ((1, 0.5), (3, 0.25)),
    ]  # fmt: skip
    assert [cache.num_found(prompt, uid) for uid in others] == [0] * len(others)


def test_a_composition_is_forgotten_with_any_of_its_versions(cache: Cache) -> None:
    prompt = range(9)
    for uid in (((1, 0.5), (2, 0.5)), ((2, 0.5), (3, 0.5)), 2):
        cache.end(cache.start(prompt, uid))
    cache.pages.forget(1)
    cache.pages.check_integrity(cache.held)
    assert cache.pages.num_free == 16
    assert cache.num_found(prompt, ((1, 0.5), (2, 0.5))) == 0
    assert cache.num_found(prompt, ((2, 0.5), (3, 0.5))) == cache.num_found(prompt, 2) == 8
    cache.pages.forget(2)
    assert cache.num_found(prompt, ((2, 0.5), (3, 0.5))) == cache.num_found(prompt, 2) == 0


def test_output_is_found_too(cache: Cache) -> None:
    """A conversation goes on from its last answer."""
    sequence = cache.start(range(6))
    for token in range(6, 13):
        sequence.tokens.append(token)
        assert cache.pages.extend(sequence)
        sequence.num_computed = sequence.num_tokens
        cache.pages.cache(sequence, sequence.num_tokens - 1, sequence.num_tokens)
    cache.end(sequence)
    assert cache.num_found(range(14)) == 12


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(num_pages=6)
    cache.end(cache.start([1] * 9))
    cache.end(cache.start([2] * 9))
    assert cache.num_found([1] * 9) == 8
    cache.end(cache.start([3] * 13))
    assert cache.num_found([1] * 9) == 8
    assert cache.num_found([2] * 9) == 0


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    cache = Cache(num_pages=4)
    cache.end(cache.start(range(16)))
    cache.end(cache.start([9] * 8))
    assert cache.num_found(range(9)) == 8


def test_pages_in_use_are_never_taken() -> None:
    cache = Cache(num_pages=4)
    held = cache.start(range(12))
    assert not cache.pages.fits(make_sequence(99, [5] * 8))
    cache.end(held)
    assert cache.pages.fits(make_sequence(99, [5] * 16))


def test_shared_pages_make_room() -> None:
    """A long prompt fits where most of it is in use by another."""
    cache = Cache(num_pages=5)
    cache.start(range(16))
    assert cache.pages.fits(make_sequence(98, range(17)))
    assert not cache.pages.fits(make_sequence(99, range(21)))


def test_idle_shared_pages_do_not_count_twice() -> None:
    """Those that nobody holds are free pages already."""
    cache = Cache(num_pages=5)
    cache.end(cache.start(range(16)))
    assert cache.pages.fits(make_sequence(98, range(20)))
    assert not cache.pages.fits(make_sequence(98, range(20)), spare=1)


def test_a_version_that_is_gone_is_forgotten(cache: Cache) -> None:
    prompt = range(13)
    kept = cache.start(prompt, 1)
    cache.end(cache.start(prompt, 2))
    cache.pages.forget(1)
    cache.pages.forget(2)
    cache.pages.forget(3)
    cache.pages.check_integrity(cache.held)
    assert cache.num_found(prompt, 1) == 0
    cache.pages.forget(1)
    assert cache.num_found(prompt, 2) == 0
    cache.end(kept)


def test_two_that_compute_the_same_at_once(cache: Cache) -> None:
    """Both keep their own pages; one of them is found later."""
    both = [make_sequence(number, range(9)) for number in (1, 2)]
    for sequence in both:
        cache.pages.allocate(sequence)
    for sequence in both:
        sequence.num_computed = 9
        cache.pages.cache(sequence, 0, 9)
    cache.pages.check_integrity(both)
    assert not set(both[0].pages) & set(both[1].pages)
    cache.pages.free(both[0])
    cache.pages.free(both[1])
    cache.pages.check_integrity([])
    assert cache.num_found(range(9)) == 8


def test_what_was_looked_up_and_found_is_counted(cache: Cache) -> None:
    cache.end(cache.start(range(9)))
    cache.end(cache.start(range(9)))
    assert (cache.pages.queries, cache.pages.hits) == (18, 8)


def test_digests_are_secret() -> None:
    """Two processes name the same tokens differently, so nobody can look for a collision beforehand."""
    digests = set()
    for _ in range(2):
        sequence = Cache().start(range(9))
        digests.add(tuple(sequence.page_digests))
        assert all(len(digest) == 16 for digest in sequence.page_digests)
    assert len(digests) == 2
