"""How the commands print: the same look in a terminal, a pipe and a file."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; into a pipe or a file, wide enough for every table row."""
    terminal = Console(stderr=stderr, highlight=False)
    if terminal.is_terminal:
        return terminal
    return Console(stderr=stderr, highlight=False, width=_PIPED_WIDTH)


def plain_table(title: str | None = None) -> Table:
    """An empty table without vertical lines."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
