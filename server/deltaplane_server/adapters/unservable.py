"""The error for an adapter whose files cannot be served exactly."""

from collections.abc import Iterable

from deltaplane_controlplane.errors import InvalidArgumentError

MAX_LISTED = 5
MAX_SHOWN = 120


def unservable(description: str, *, reason: str | None = None) -> InvalidArgumentError:
    """The error for an adapter's source. description: what cannot be served, why, and how to mend it."""
    return InvalidArgumentError.for_field("source", description, reason=reason)


def shown(value: object) -> str:
    """A value out of a file as a message may have it: escaped, and not long."""
    try:
        text = repr(value)
    except RecursionError:  # repr may go less deep than the parser that made the value
        text = f"a {type(value).__name__} of many levels"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def listed(names: Iterable[str]) -> str:
    """The first names out of a file, sorted, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - MAX_LISTED
    return ", ".join(map(shown, ordered[:MAX_LISTED])) + (f" and {more} more" if more > 0 else "")
