"""What `agmm doctor` prints. It needs no extra of agmm: without them it prints plain lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agmm import _installation
from agmm.bench.machine import machine_facts
from agmm.cli import doctor, doctor_links, doctor_report, findings


def run(*, as_json: bool, as_report: bool = False) -> bool:
    """Prints the findings; returns whether agmm works as installed."""
    found = doctor.diagnose()
    links = doctor_links.gpu_links(_installation.load_core()[0])
    if as_report:
        print(doctor_report.report(machine_facts(), found, _link_lines(links)))
        return not findings.is_broken(found)
    if as_json:
        facts = machine_facts()
        body: dict[str, Any] = {"machine": facts, "findings": [asdict(f) for f in found]}
        if links is not None:
            body["gpu_links"] = [[str(link) for link in row] for row in links]
        print(json.dumps(body, indent=1))
        return not findings.is_broken(found)
    try:
        from agmm.cli.doctor_tables import findings_table, link_table
        from agmm.cli.terminal import console, print_table
    except ImportError:
        print(findings.as_text(found))
        for line in _link_lines(links):
            print(line)
    else:
        print_table(console(), findings_table(found))
        if links is not None:
            print_table(console(), link_table(links))
    return not findings.is_broken(found)


def _link_lines(links: Sequence[Sequence[Any]] | None) -> list[str]:
    """The links of each GPU, a line each; none where they are unknown."""
    return [
        f"links of GPU {a}: {' '.join('X' if a == b else str(link) for b, link in enumerate(row))}"
        for a, row in enumerate(links or [])
    ]
