"""What `agmm doctor` says of one thing, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.markup import escape
from rich.table import Table

from agmm.cli.terminal import plain_table

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """One fact, and its meaning for the user. 'broken' means that agmm cannot work as installed."""

    name: str
    found: str
    meaning: str
    status: Status = "ok"


def table(findings: list[Finding]) -> Table:
    """The findings as a table."""
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[bold red]BROKEN[/]"}
    out = plain_table()
    out.add_column("")
    out.add_column("what", no_wrap=True)
    out.add_column("found", overflow="fold", ratio=1)
    out.add_column("what it means", overflow="fold", ratio=1)
    for f in findings:
        out.add_row(marks[f.status], f.name, escape(f.found), escape(f.meaning))
    return out


def is_broken(findings: list[Finding]) -> bool:
    """Whether any finding says that agmm cannot work as installed."""
    return any(f.status == "broken" for f in findings)
