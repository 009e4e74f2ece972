"""Filters and page tokens of lists: the small languages that callers send."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.versions import AdapterState, Tier

_TERM = re.compile(
    r"""(?P<field>name|state|pinned|labels\.(?P<key>[A-Za-z0-9._/-]+))
        (?P<op>[=:])
        (?P<value>"[^"]*"|[^\s"]+)
        (?:\s+AND\s+(?=\S)|$)""",
    re.VERBOSE,
)
_GRAMMAR = "terms joined by AND, each of state=STATE, pinned=true|false, name:prefix* or labels.key=value"


class Filterable(Protocol):
    """What a filter looks at; adapters and their views have it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> AdapterState: ...
    @property
    def pinned_tier(self) -> Tier | None: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


Filter = Callable[[Filterable], bool]


def everything(_: Filterable) -> bool:
    """The filter that lets all adapters through."""
    return True


def parse_filter(text: str) -> Filter:
    """The predicate of a filter; `everything` where the text is empty.

    Grammar: `state=RESIDENT AND pinned=true AND name:prefix* AND labels.key="a value"`.
    Errors: InvalidArgumentError (field "filter").
    """
    if not text.strip():
        return everything
    terms: list[Filter] = []
    rest = text.strip()
    while rest:
        match = _TERM.match(rest)
        if match is None:
            raise _bad(f"{rest!r} is not understood; a filter is {_GRAMMAR}")
        terms.append(_predicate(match))
        rest = rest[match.end() :]
    return terms[0] if len(terms) == 1 else lambda adapter: all(term(adapter) for term in terms)


def _predicate(match: re.Match[str]) -> Filter:
    value = match["value"].strip('"')
    match match["field"], match["op"]:
        case "state", "=":
            return _by_state(value)
        case "pinned", "=":
            return _by_pin(value)
        case "name", ":" if value.endswith("*"):
            return lambda adapter: adapter.name.startswith(value[:-1])
        case _, "=" if match["key"]:
            key = match["key"]
            return lambda adapter: adapter.labels.get(key) == value
    raise _bad(f"{match[0]!r} is not understood; a filter is {_GRAMMAR}")


def _by_state(value: str) -> Filter:
    if value not in AdapterState.__members__:
        raise _bad(f"there is no state {value!r}; states are {', '.join(AdapterState.__members__)}")
    state = AdapterState[value]
    return lambda adapter: adapter.state is state


def _by_pin(value: str) -> Filter:
    if value not in ("true", "false"):
        raise _bad(f"pinned is true or false, not {value!r}")
    return lambda adapter: (adapter.pinned_tier is not None) is (value == "true")


def _bad(description: str) -> InvalidArgumentError:
    return InvalidArgumentError.for_field("filter", description)


@dataclass(frozen=True, slots=True)
class PageToken:
    """Where the next page of a list begins: behind a name, under the same filter."""

    after: str
    filter: str

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps([self.after, self.filter]).encode()).decode()

    @classmethod
    def decode(cls, token: str, filter: str) -> "PageToken":
        """The token of a list with this filter; an empty one is the beginning.

        Errors: InvalidArgumentError (field "page_token").
        """
        if not token:
            return cls("", filter)
        try:
            after, used = json.loads(base64.urlsafe_b64decode(token.encode()))
        except (ValueError, TypeError, RecursionError):
            after = used = None
        if not isinstance(after, str) or not isinstance(used, str):
            raise InvalidArgumentError.for_field(
                "page_token", "this is no token of a list: send next_page_token as it was received"
            )
        if used != filter:
            raise InvalidArgumentError.for_field(
                "page_token", f"it belongs to the filter {used!r}, not to {filter!r}: keep the filter"
            )
        return cls(after, filter)
