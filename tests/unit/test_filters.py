"""Filters and page tokens."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane import ControlPlane
from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.filters import MAX_FILTER_LENGTH, PageToken, parse_filter
from deltaplane_controlplane.versions import Tier
from deltaplane_controlplane.views import AdapterView


@pytest.fixture
def view(plane: ControlPlane) -> AdapterView:
    plane.add("law-1")
    plane.manager.update("law-1", labels={"team": "law", "a/b.c": "x AND y"})
    return plane.manager.pin("law-1", Tier.HOST)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("  ", True),
        ("state=HOST", True),
        ("state=RESIDENT", False),
        ("pinned=true", True),
        ("pinned=false", False),
        ("pinned=host", True),
        ("pinned=device", False),
        ("rank=8", True),
        ("rank>=8 AND rank<=8", True),
        ("rank>=9", False),
        ("rank<=7", False),
        ("features:dora", False),
        ('base_model=""', True),
        ("base_model=other", False),
        ("digest:*", True),
        ("digest=00", False),
        ("name:law*", True),
        ("name:*", True),
        ("name:tale*", False),
        ("labels.team=law", True),
        ("labels.team=tale", False),
        ("labels.unknown=law", False),
        ('labels.a/b.c="x AND y"', True),
        ('labels.a/b.c="x AND y" AND state=HOST', True),
        ("state=HOST  AND  pinned=true AND name:law*", True),
        ("state=HOST AND pinned=false", False),
    ],
)
def test_what_matches(view: AdapterView, text: str, matches: bool) -> None:
    assert parse_filter(text)(view) is matches


@pytest.mark.parametrize(
    "text",
    [
        "state",
        "state:HOST",
        "state=host",
        "pinned=yes",
        "name=law-1",
        "name:law-1",
        "rank=eight",
        "rank:8",
        "rank>8",
        "digest:abc",
        "features=dora",
        "base_model:base*",
        "name.x=y",
        "labels=x",
        "labels.=x",
        "state=HOST AND",
        "AND state=HOST",
        "state=HOST OR pinned=true",
        "state=HOST pinned=true",
        'labels.x="open',
        "state=HOST and pinned=true",
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_filter(text)
    assert caught.value.violations[0].field == "filter"


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgumentError):
        parse_filter(text)


@given(st.text(max_size=60))
def test_any_text_is_a_token_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgumentError):
        assert PageToken.decode(text, "f").filter == "f"


@given(st.text(), st.text())
def test_tokens_come_back_as_they_went(after: str, filter: str) -> None:
    token = PageToken(after, filter)
    assert PageToken.decode(token.encode(), filter) == token


def test_a_filter_and_its_token_may_be_long_and_no_longer() -> None:
    longest = f'labels.x="{chr(0x1F600) * (MAX_FILTER_LENGTH - 11)}"'
    parse_filter(longest)
    token = PageToken("n" * 128, longest)
    assert PageToken.decode(token.encode(), longest) == token
    with pytest.raises(InvalidArgumentError, match=f"{MAX_FILTER_LENGTH + 1} characters are more than"):
        parse_filter(longest + " ")
    with pytest.raises(InvalidArgumentError, match="this is no token of a list"):
        PageToken.decode(PageToken("", "f" * (1 << 20)).encode(), "f" * (1 << 20))
