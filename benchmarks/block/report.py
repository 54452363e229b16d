"""The tables of a report."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agmm.cli.report_tables import number
from agmm.cli.terminal import plain_table
from benchmarks.block.ways import BASE, WAYS

Passes = dict[str, dict[str, Any]]
"""The ways' results for one token count, by pass."""


def by_tokens(report: dict[str, Any]) -> dict[int, Passes]:
    """The passes of each token count, in the report's order."""
    found: dict[int, Passes] = {}
    for entry in report["shapes"]:
        found.setdefault(entry["tokens"], {})[entry["pass"]] = entry["ways"]
    return found


def token_table(tokens: int, passes: Passes) -> Table:
    """One token count's ways: µs, speed-up over the first, memory, worst error."""
    table = plain_table(f"{tokens} tokens")
    table.add_column("way", no_wrap=True)
    for which in passes:
        table.add_column(f"{which}, µs", justify="right")
        table.add_column(f"× {BASE}", justify="right", no_wrap=True)
    table.add_column("peak MiB", justify="right")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    *_, last = passes.values()
    for name in last:
        cells, notes, errors = [], {}, []
        for which, ways in passes.items():
            result = ways[name]
            median, base = result["median_us"], ways.get(BASE, {}).get("median_us")
            cells.append("WRONG" if result["wrong"] else number(median, ".1f"))
            cells.append(number(base / median if base and median else None, ".3f"))
            text = result["reason"] or result["note"]
            if text:
                notes[which] = text
            if result["relative_error"] is not None:
                errors.append(result["relative_error"])
        same = len(set(notes.values())) == 1 and len(notes) == len(passes)
        shown = list(notes.values())[:1] if same else [f"{k}: {v}" for k, v in notes.items()]
        table.add_row(
            name,
            *cells,
            number(last[name]["peak_mib"] if len(passes) > 1 else None, ".0f"),
            number(max(errors, default=None), ".1e"),
            escape("; ".join(shown)),
        )
    return table


def summary_table(report: dict[str, Any]) -> Table:
    """One row per token count and pass: the first way, the best without agmm, the best with it."""
    table = plain_table("summary (µs)")
    table.add_column("tokens", justify="right")
    table.add_column("pass", no_wrap=True)
    table.add_column(BASE, justify="right")
    for heading in ("best other", "best agmm"):
        table.add_column(heading, justify="right")
        table.add_column("(way)", no_wrap=True)
    table.add_column(f"{BASE} ÷ agmm", justify="right")
    table.add_column("best other ÷ agmm", justify="right")
    for entry in report["shapes"]:
        medians = {name: result["median_us"] for name, result in entry["ways"].items()}
        times = {name: time for name, time in medians.items() if time is not None}
        base = times.get(BASE)
        best: dict[bool, tuple[float | None, str]] = {}
        for is_agmm in (False, True):
            some = [(t, n) for n, t in times.items() if WAYS[n].is_agmm == is_agmm]
            best[is_agmm] = min(some, default=(None, "-"))
        (other, other_name), (ours, our_name) = best[False], best[True]
        table.add_row(
            str(entry["tokens"]),
            entry["pass"],
            number(base, ".1f"),
            number(other, ".1f"),
            other_name,
            number(ours, ".1f"),
            our_name,
            number(base / ours if base and ours else None, ".3f"),
            number(other / ours if other and ours else None, ".3f"),
        )
    return table


def render(report: dict[str, Any], out: Console) -> None:
    """Prints a table per token count and the summary of them all."""
    machine, settings = report["machine"], report["settings"]
    block, kept = settings["block"], settings["save_gathered"]
    fp8 = f", layers in fp8 ({settings['fp8']})" if settings.get("fp8") else ""
    out.print(
        f"{settings['world_size']} ranks on {machine['device_name']}, {settings['dtype']}{fp8}; "
        f"torch {machine['torch']}, CUDA {machine['cuda'] or '-'}, NCCL {machine['nccl'] or '-'}, "
        f"driver {machine['driver'] or '-'}, agmm {machine['agmm']}, commit {report['commit']}"
    )
    out.print(
        f"hidden {block['hidden']}, ffn {block['ffn']}, heads {block['heads']}, "
        f"key-value heads {block['kv_heads']}; median of {settings['samples']} interleaved "
        "samples, each the maximum over the ranks; peak: activations, gradients and temporaries "
        "of torch's allocator, without the weights and without symmetric memory; in the backward "
        f"agmm's layers {'have kept the gathered rows' if kept else 'gather the rows again'}"
    )
    for tokens, passes in by_tokens(report).items():
        out.print(token_table(tokens, passes))
    out.print(summary_table(report))


def wrong_ways(report: dict[str, Any]) -> list[str]:
    """'way, pass, tokens' for every result that failed its check."""
    return [
        f"{name}, {entry['pass']}, {entry['tokens']} tokens"
        for entry in report["shapes"]
        for name, result in entry["ways"].items()
        if result["wrong"]
    ]
