"""How the commands print: the same look in a terminal, a pipe and a file."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agmm.errors import InvalidArgument

_PIPED_WIDTH = 160
_FOLDED_WIDTH = 16


def console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; into a pipe or a file, wide enough for every table row."""
    terminal = Console(stderr=stderr, highlight=False)
    if terminal.is_terminal:
        return terminal
    return Console(stderr=stderr, highlight=False, width=_PIPED_WIDTH)


_DURATIONS = ((1e4, 1.0, "µs"), (1e7, 1e3, "ms"), (6e8, 1e6, "s"), (3.6e11, 3.6e9, "h"))
"""Below so many µs, by so many µs, with this unit."""
_US_PER_DAY = 86400e6


def duration(us: float) -> str:
    """A time in the unit in which it can be read: "323.8 µs", "17.1 ms", "4.0 days"."""
    for limit, unit_us, unit in _DURATIONS:
        if us < limit:
            return f"{us / unit_us:.1f} {unit}"
    days = us / _US_PER_DAY
    return f"{days:.1f} days" if days < 1000 else f"{days / 365:.3g} years"


def size(count: float) -> str:
    """A number of bytes in the unit in which it can be read: "512 bytes", "1.8 TiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(count).bit_length() - 1) // 10)
    number = count / 1024**power
    return f"{number:.0f} {units[power]}" if number >= 100 else f"{number:.3g} {units[power]}"


def check_writable(path: Path, option: str) -> None:
    """Makes the folder of a file that is to be written, and tries the file, before a long run.

    Raises:
        InvalidArgument: it cannot be written.
    """
    try:
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument(
            f"{option}: found {path}, wanted a file that can be written ({reason})"
        ) from None


def plain_table(title: str | None = None) -> Table:
    """An empty table without vertical lines."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def whole(table: Table) -> Table:
    """The same table, whose columns keep what is in them where the terminal is too narrow. Those
    that fold do so down to a few characters."""
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
