"""Which digests are kept, and for which files they hold."""

from collections.abc import Sequence

import pytest

from deltaplane_server.adapters.files import FileState
from deltaplane_server.adapters.known_digests import KnownDigests

SECOND = 1_000_000_000
LARGEST = (1 << 64) - 1
CONFIG = FileState(device=1, inode=2, size=3, mtime_ns=40 * SECOND, ctime_ns=50 * SECOND)
WEIGHTS = FileState(device=LARGEST, inode=LARGEST, size=1 << 40, mtime_ns=-1, ctime_ns=60 * SECOND)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("field", FileState._fields)
def test_a_digest_holds_for_the_same_states_only(place: int, field: str) -> None:
    known = KnownDigests()
    states = [CONFIG, WEIGHTS]
    known.put(states, "digest", read_from=62 * SECOND)
    assert known.get(states) == "digest"
    states[place] = states[place]._replace(**{field: getattr(states[place], field) - 1})
    assert known.get(states) is None
    assert known.get([WEIGHTS, CONFIG]) is None


@pytest.mark.parametrize("states", [[CONFIG, WEIGHTS], [WEIGHTS, CONFIG]])
def test_a_file_must_be_two_seconds_old(states: Sequence[FileState]) -> None:
    known = KnownDigests()
    known.put(states, "digest", read_from=62 * SECOND - 1)
    assert known.get(states) is None
    known.put(states, "digest", read_from=62 * SECOND)
    assert known.get(states) == "digest"


@pytest.mark.parametrize("states", [[None, WEIGHTS], [CONFIG, None], [None, None]])
def test_nothing_is_known_of_files_that_changed_while_they_were_read(
    states: Sequence[FileState | None],
) -> None:
    known = KnownDigests()
    known.put(states, "digest", read_from=62 * SECOND)
    assert known.get(states) is None


def test_files_are_good_that_were_put_so_and_only_as_long_as_they_are_known() -> None:
    known = KnownDigests()
    hashed, good, young = ([CONFIG._replace(inode=inode)] for inode in (1, 2, 3))
    known.put(hashed, "digest", read_from=62 * SECOND)
    known.put(good, "digest", read_from=62 * SECOND, are_good=True)
    known.put(young, "digest", read_from=51 * SECOND, are_good=True)
    assert [known.are_good(states) for states in (hashed, good, young, [None])] == [False, True, False, False]
    known.put(good, "digest", read_from=62 * SECOND)
    assert known.are_good(good)
    for inode in range(4, 100_003):
        known.put([CONFIG._replace(inode=inode)], "digest", read_from=62 * SECOND)
    assert known.get(good) == "digest"
    known.put([CONFIG._replace(inode=100_003)], "digest", read_from=62 * SECOND)
    known.put([CONFIG._replace(inode=100_004)], "digest", read_from=62 * SECOND)
    assert known.are_good(good)  # it was used
    for inode in range(100_005, 200_005):
        known.put([CONFIG._replace(inode=inode)], "digest", read_from=62 * SECOND)
    assert not known.are_good(good)


def test_the_100_000_that_were_used_last_are_kept() -> None:
    known = KnownDigests()

    def put(inode: int) -> None:
        known.put([CONFIG._replace(inode=inode)], str(inode), read_from=62 * SECOND)

    def get(inode: int) -> str | None:
        return known.get([CONFIG._replace(inode=inode)])

    for inode in range(100_000):
        put(inode)
    assert get(0) == "0"
    put(100_000)
    assert [get(inode) for inode in (0, 1, 2, 100_000)] == ["0", None, "2", "100000"]
