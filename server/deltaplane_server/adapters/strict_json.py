"""JSON from files nobody vouches for."""

import json
from typing import Any

from deltaplane_server.adapters.unservable import shown, unservable


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`, UTF-8. what: its name in errors.

    Errors: InvalidArgumentError where it is something else, or has a key twice, NaN, or Infinity.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise unservable(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise unservable(f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {shown(key)} is there twice")
        value[key] = item
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
