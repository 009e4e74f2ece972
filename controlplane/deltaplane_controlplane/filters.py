"""Filters and page tokens of lists: the small languages that callers send."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from deltaplane_controlplane.errors import InvalidArgumentError
from deltaplane_controlplane.operation_views import OperationKind, OperationState, OperationView
from deltaplane_controlplane.ports import AdapterManifest
from deltaplane_controlplane.versions import AdapterState, Tier

MAX_FILTER_LENGTH = 2048
_MAX_TOKEN_LENGTH = 1024 + 16 * MAX_FILTER_LENGTH
"""A name and a filter, each character of which JSON may write as two times six, in base64."""

_TERM = re.compile(
    r"""(?P<field>[a-z_]+)(?:\.(?P<key>[A-Za-z0-9._/-]+))?
        (?P<op>>=|<=|=|:)
        (?P<value>"[^"]*"|[^\s"]+)
        (?:\s+AND\s+(?=\S)|$)""",
    re.VERBOSE,
)
_GRAMMAR = (
    "terms joined by AND, each of state=STATE, pinned=true|false|host|device, name:prefix*, labels.key=value,"
    " digest=SHA256, digest:prefix*, base_model=name, features:feature, rank=N, rank>=N or rank<=N"
)
_OPERATION_GRAMMAR = "terms joined by AND, each of state=STATE, kind=KIND, adapter=name or done=true|false"


class Filterable(Protocol):
    """What a filter looks at; adapters and their views have it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> AdapterState: ...
    @property
    def pins(self) -> frozenset[Tier]: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def manifest(self) -> AdapterManifest: ...


Filter = Callable[[Filterable], bool]
OperationFilter = Callable[[OperationView], bool]
_T = TypeVar("_T")
_Member = TypeVar("_Member", bound=Enum)


def everything(_: object) -> bool:
    """The filter that lets all through."""
    return True


def parse_filter(text: str) -> Filter:
    """The predicate of a filter; `everything` where the text is empty.

    Grammar: `state=RESIDENT AND pinned=true AND name:prefix* AND labels.key="a value" AND rank>=16`.
    Errors: InvalidArgumentError (field "filter").
    """
    return _parse(text, _adapter_predicate, _GRAMMAR)


def parse_operation_filter(text: str) -> OperationFilter:
    """The predicate of a filter of operations, likewise.

    Grammar: `state=RUNNING AND kind=LOAD AND adapter=name AND done=false`.
    """
    return _parse(text, _operation_predicate, _OPERATION_GRAMMAR)


def _parse(
    text: str, predicate: Callable[[re.Match[str], str], Callable[[_T], bool] | None], grammar: str
) -> Callable[[_T], bool]:
    if len(text) > MAX_FILTER_LENGTH:
        raise _bad(f"{len(text)} characters are more than the {MAX_FILTER_LENGTH} that are read")
    terms: list[Callable[[_T], bool]] = []
    rest = text.strip()
    while rest:
        match = _TERM.match(rest)
        term = predicate(match, match["value"].strip('"')) if match is not None else None
        if match is None or term is None:
            raise _bad(f"{rest!r} is not understood; a filter is {grammar}")
        terms.append(term)
        rest = rest[match.end() :]
    if not terms:
        return everything
    return terms[0] if len(terms) == 1 else lambda item: all(term(item) for term in terms)


def _adapter_predicate(match: re.Match[str], value: str) -> Filter | None:
    """None where the term is not understood."""
    key = match["key"]
    match match["field"], match["op"]:
        case "labels", "=" if key:
            return lambda adapter: adapter.labels.get(key) == value
        case _ if key:
            return None
        case "state", "=":
            state = _member(AdapterState, "state", value)
            return lambda adapter: adapter.state is state
        case "pinned", "=":
            return _by_pin(value)
        case "name", ":" if value.endswith("*"):
            return lambda adapter: adapter.name.startswith(value[:-1])
        case "digest", ":" if value.endswith("*"):
            return lambda adapter: adapter.manifest.digest.startswith(value[:-1].lower())
        case "digest", "=":
            return lambda adapter: adapter.manifest.digest == value.lower()
        case "base_model", "=":
            return lambda adapter: adapter.manifest.base_model == value
        case "features", ":":
            return lambda adapter: value in adapter.manifest.features
        case "rank", op if value.isdecimal():
            return _by_rank(op, int(value))
    return None


def _by_rank(op: str, rank: int) -> Filter | None:
    match op:
        case "=":
            return lambda adapter: adapter.manifest.rank == rank
        case ">=":
            return lambda adapter: adapter.manifest.rank >= rank
        case "<=":
            return lambda adapter: adapter.manifest.rank <= rank
    return None


def _by_pin(value: str) -> Filter:
    match value:
        case "true" | "false":
            return lambda adapter: bool(adapter.pins) is (value == "true")
        case "host" | "device":
            return lambda adapter: Tier(value) in adapter.pins
    raise _bad(f"pinned is true, false, host or device, not {value!r}")


def _operation_predicate(match: re.Match[str], value: str) -> OperationFilter | None:
    match match["field"], match["op"], match["key"]:
        case "adapter", "=", None:
            return lambda operation: operation.adapter == value
        case "state", "=", None:
            state = _member(OperationState, "state", value)
            return lambda operation: operation.state is state
        case "kind", "=", None:
            kind = _member(OperationKind, "kind", value)
            return lambda operation: operation.kind is kind
        case "done", "=", None if value in ("true", "false"):
            return lambda operation: (operation.end_time is not None) is (value == "true")
    return None


def _member(enum: type[_Member], field: str, value: str) -> _Member:
    if value not in enum.__members__:
        raise _bad(f"there is no {field} {value!r}; there is {', '.join(enum.__members__)}")
    return enum[value]


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
            if len(token) > _MAX_TOKEN_LENGTH:
                raise ValueError
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
