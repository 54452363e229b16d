"""What `agmm doctor` says, as tables."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from agmm.cli.findings import Finding
from agmm.cli.terminal import plain_table
from agmm.runtime.topology import Matrix


def findings_table(findings: list[Finding]) -> Table:
    """The findings, one a row."""
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[bold red]BROKEN[/]"}
    out = plain_table()
    out.add_column("")
    out.add_column("what", no_wrap=True)
    out.add_column("found", overflow="fold", ratio=1)
    out.add_column("what it means", overflow="fold", ratio=1)
    for f in findings:
        out.add_row(marks[f.status], f.name, escape(f.found), escape(f.meaning))
    return out


def link_table(links: Matrix) -> Table:
    """The matrix of links between GPUs."""
    out = plain_table("GPU links")
    out.caption = (
        "NV2: 2 NVLinks; PIX, PXB, PHB, NODE, SYS: PCIe, the farther the later, as `nvidia-smi "
        "topo -m` has it; -: no peer access"
    )
    out.caption_justify = "left"
    out.add_column("")
    for gpu in range(len(links)):
        out.add_column(str(gpu))
    for a, row in enumerate(links):
        out.add_row(str(a), *("X" if a == b else str(link) for b, link in enumerate(row)))
    return out
