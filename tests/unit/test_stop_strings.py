"""Stop strings in streams, against a search that sees the whole text."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaplane_server.engine.stop_strings import StopMatcher

letters = st.text("ab", max_size=4)
pieces_lists = st.lists(st.text("abc", max_size=5), max_size=12)
stops_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


@dataclass(frozen=True)
class Found:
    sent: str
    matched: str | None


def stream(pieces: Sequence[str], stops: tuple[str, ...], *, include: bool = False, free: int = 0) -> Found:
    """What is sent of a text in pieces, of which stops do not count in the first `free`."""
    matcher = StopMatcher(stops, include_stop=include)
    sent = ""
    for index, piece in enumerate(pieces):
        sent += matcher.push(piece, counts=index >= free)
        if matcher.matched is not None:
            return Found(sent, matcher.matched)
    return Found(sent + matcher.flush(), None)


def search(pieces: Sequence[str], stops: tuple[str, ...], *, include: bool = False, free: int = 0) -> Found:
    """The definition: the stop that is complete after the fewest characters, and of those the longest."""
    text = "".join(pieces)
    first = len("".join(pieces[:free])) + 1
    for end in range(first, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return Found(text[: end if include else end - len(stop)], stop)
    return Found(text, None)


@given(pieces=pieces_lists, stops=stops_lists, include=st.booleans(), free=st.integers(0, 5))
@settings(max_examples=1000, deadline=None)
def test_equals_a_search_of_the_whole_text(
    pieces: list[str], stops: tuple[str, ...], include: bool, free: int
) -> None:
    expected = search(pieces, stops, include=include, free=free)
    assert stream(pieces, stops, include=include, free=free) == expected


@given(pieces=pieces_lists, stops=stops_lists)
@settings(max_examples=500, deadline=None)
def test_holds_back_exactly_what_may_become_a_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    text = sent = ""
    for piece in pieces:
        text += piece
        assert matcher.would_match(piece) == (search([text], stops).matched is not None)
        sent += matcher.push(piece)
        if matcher.matched is not None:
            return
        may_become = (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert sent == text[: len(text) - max(may_become)]


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "matched"),
    [
        (["Hello", " wor", "ld"], ("wor",), "Hello ", "wor"),
        (["one\n", "\ntwo"], ("\n\n",), "one", "\n\n"),
        (["a</st", "op>b"], ("</stop>",), "a", "</stop>"),
        (["aaab"], ("aab",), "a", "aab"),
        (["abcd"], ("abcd", "bc"), "a", "bc"),
        (["xabc"], ("abc", "c", "bc"), "x", "abc"),
        (["no stop", " here"], ("stop!",), "no stop here", None),
        (["ünï", "🦊x"], ("ï🦊",), "ün", "ï🦊"),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], sent: str, matched: str | None) -> None:
    assert stream(pieces, stops) == Found(sent, matched)
    assert stream(list("".join(pieces)), stops) == Found(sent, matched), "it hangs on the tokens' borders"


def test_the_stop_may_stay() -> None:
    assert stream(["Hello wor", "ld"], ("world",), include=True) == Found("Hello world", "world")


def test_nothing_is_held_back_without_stops() -> None:
    matcher = StopMatcher(())
    assert matcher.push("text") == "text"
    assert not matcher.would_match("text")
    assert matcher.flush() == ""


def test_a_stop_before_min_tokens_is_text() -> None:
    """One that only ends after them counts."""
    assert stream(["stop", " and stop", " x"], ("stop",), free=1) == Found("stop and ", "stop")
    assert stream(["st", "op"], ("stop",), free=1) == Found("", "stop")
