"""How the commands print: the same look in a terminal, a pipe and a file."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 160  # the widest table fits
_FOLDED_WIDTH = 16  # narrower, a column of text has a word a line


def console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; into a pipe or a file, wide enough for every table row."""
    terminal = Console(stderr=stderr, highlight=False)
    if terminal.is_terminal:
        return terminal
    return Console(stderr=stderr, highlight=False, width=_PIPED_WIDTH)


def plain_table(title: str | None = None) -> Table:
    """An empty table without vertical lines."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def whole(table: Table) -> Table:
    """The table, whose columns keep what is in them where the terminal is too narrow. Columns that
    fold do so down to a few characters."""
    for column in table.columns:
        texts = [Text.from_markup(str(cell)) for cell in column.cells]
        header = str(column.header)
        words = [header] if column.no_wrap else header.split()
        lines = [line for text in texts for line in text.split()] + [Text(word) for word in words]
        widest = max((line.cell_len for line in lines), default=0)
        folds = column.overflow == "fold"
        column.min_width = min(widest, _FOLDED_WIDTH) if folds else widest
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table with all that is in it; a terminal that is too narrow breaks its lines."""
    between = 3  # beside a column: its padding and the place of a vertical line
    needed = sum((column.min_width or 0) + between for column in whole(table).columns)
    width = console.width
    console.width = max(width, needed)
    try:
        console.print(table)
    finally:
        console.width = width
