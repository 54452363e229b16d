"""What `agmm doctor` says of one thing, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """One fact, and its meaning for the user. 'broken' means that agmm cannot work as installed."""

    name: str
    found: str
    meaning: str
    status: Status = "ok"


def as_text(findings: list[Finding]) -> str:
    """The findings in plain lines."""
    width = max(len(f.name) for f in findings)
    mark = {"ok": "ok", "note": "note", "broken": "BROKEN"}
    return "\n".join(
        f"{mark[f.status]:6}  {f.name:{width}}  {_line(f.found)}: {_line(f.meaning)}"
        for f in findings
    )


def _line(text: str) -> str:
    return "; ".join(text.splitlines())


def is_broken(findings: list[Finding]) -> bool:
    """Whether any finding says that agmm cannot work as installed."""
    return any(f.status == "broken" for f in findings)
