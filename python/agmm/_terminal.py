"""How the commands print: the same look in a terminal, a pipe and a file."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from agmm.errors import InvalidArgument

_PIPED_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; into a pipe or a file, wide enough for every table row."""
    terminal = Console(stderr=stderr, highlight=False)
    if terminal.is_terminal:
        return terminal
    return Console(stderr=stderr, highlight=False, width=_PIPED_WIDTH)


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
