"""How output looks: tables and facts for people, JSON for programs, one line for an error."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table

from deltaplane.errors import DeltaplaneError, UnavailableError

T = TypeVar("T")

_PIPE_WIDTH = 10_000  # nobody reads a pipe by its columns: never wrap there


def console() -> Console:
    """Standard output, where no text of an answer is taken for markup."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def printable(text: str) -> str:
    """The text with its control characters, but line feed and tab, as �: it cannot steer a terminal."""
    return "".join("�" if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 else c for c in text)


def as_json(message: Message) -> dict[str, Any]:
    """The message as protobuf's JSON, zeros included; 64-bit numbers are texts there."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(value: object) -> None:
    """One line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Mapping[str, Callable[[T], object]], rows: Iterable[T]) -> None:
    """A line for each row. A column that is empty in all of them is left out; numbers stand to the right."""
    rows = list(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    cells = []
    for title, value in columns.items():
        column = [_cell(value(row)) for row in rows]
        if any(column) or not rows:
            table.add_column(
                title, justify="right" if all(map(_is_number, column)) else "left", overflow="fold"
            )
            cells.append(column)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    _print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Name and value, a line each; empty values are left out."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if text := _cell(value):
            table.add_row(name, text)
    _print(table)


def print_error(error: DeltaplaneError, *, source: str = "") -> None:
    """One line on standard error. source: the stream that failed, where there are several."""
    line = " ".join(f"{source + ': ' if source else ''}{error}".split())
    if isinstance(error, UnavailableError) and not error.reason:
        line += " (is a server running there? --address and --admin-address name others)"
    print(f"deltactl: error: {printable(line)}", file=sys.stderr)


def size(count: int) -> str:
    """Bytes in the unit that gives one to three digits before the point."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def moment(when: Timestamp) -> str:
    """Local time; empty for a time that is not set."""
    return when.ToDatetime(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S") if when.seconds else ""


def age(when: Timestamp) -> str:
    """How long ago, in its largest unit; empty for a time that is not set."""
    if not when.seconds:
        return ""
    seconds = max(0, round(time.time() - when.ToNanoseconds() / 1e9))
    for unit, span in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= span:
            return f"{seconds // span} {unit} ago"
    return f"{seconds} s ago"


def pairs(mapping: Mapping[str, object]) -> str:
    """The mapping as key=value, by key."""
    return " ".join(f"{key}={value}" for key, value in sorted(mapping.items()))


def _print(table: Table) -> None:
    """Without the spaces that fill the last column up."""
    printer = console()
    with printer.capture() as capture:
        printer.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)


def _cell(value: object) -> str:
    return "" if value is None else printable(str(value))


def _is_number(text: str) -> bool:
    return not text or text.replace(".", "", 1).isdecimal()
