"""Several texts that grow at the same time, in columns on a terminal or one below the other elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deltaplane.cli import show

MIN_COLUMN_WIDTH = 24
REFRESHES_PER_SECOND = 12


@dataclass
class Pane:
    """One text. note: how it stands, below it."""

    title: str
    text: str = ""
    note: str = "waiting"
    failed: bool = False


class _Columns:
    """The panes in equal columns: live, as many last lines as the terminal has; else all."""

    def __init__(self, panes: Sequence[Pane], *, is_live: bool) -> None:
        self._panes = panes
        self._is_live = is_live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width // len(self._panes) - 4  # borders and padding of a panel
        bodies = [Text(show.printable(pane.text)).wrap(console, width) for pane in self._panes]
        height = max(1, *(len(body) for body in bodies))
        if self._is_live:
            height = min(height, max(1, console.height - 4))
        table = Table.grid(expand=True)
        panels = []
        for pane, body in zip(self._panes, bodies, strict=True):
            table.add_column(ratio=1)
            lines = list(body)[-height:] if self._is_live else list(body)
            panels.append(
                Panel(
                    Text("\n").join(lines),
                    title=Text(pane.title),
                    subtitle=Text(pane.note),
                    height=height + 2,
                    border_style="red" if pane.failed else "green",
                )
            )
        table.add_row(*panels)
        yield table


@contextmanager
def shown(panes: Sequence[Pane], *, columns: int) -> Iterator[None]:
    """Shows the panes while they change and, however that ends, as they are at the end.

    columns: how many panes there may be in the end.
    Where output is no terminal, or a column would be narrower than MIN_COLUMN_WIDTH, they are printed one
    below the other at the end.
    """
    console = show.console()
    if not console.is_terminal or console.width < MIN_COLUMN_WIDTH * columns:
        try:
            yield
        finally:
            _print_blocks(panes)
        return
    live = Live(
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        get_renderable=lambda: _Columns(panes, is_live=True),
    )
    try:
        with live:
            yield
    finally:
        console.print(_Columns(panes, is_live=False))


def _print_blocks(panes: Sequence[Pane]) -> None:
    blocks = [
        f"== {pane.title} ({pane.note})\n{show.printable(pane.text).rstrip()}\n"
        for pane in panes
        if pane.text or not pane.failed
    ]
    print("\n".join(blocks), end="", flush=True)
