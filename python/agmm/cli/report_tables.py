"""Tables of reports, of two of them side by side, and of what tuning found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agmm.bench.compare import STANDARD_ERRORS, Change, Comparison, Verdict, summary
from agmm.bench.ratios import Ratio, ratios
from agmm.bench.reports import dtype_of, op_of, shape_of, summarize, title_of
from agmm.bench.tuner import Outcome
from agmm.cli.terminal import plain_table, print_table
from agmm.planning.problems import ALL_GATHER_MATMUL


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a table per shape and the summary of them all."""
    machine, settings = report["machine"], report["settings"]
    console.print(
        f"{op_of(report)}, {settings['world_size']} ranks on {machine['device_name']}, "
        f"{dtype_of(report)}; "
        f"torch {machine['torch']}, CUDA {machine['cuda'] or '-'}, NCCL {machine['nccl'] or '-'}, "
        f"driver {machine['driver'] or '-'}, agmm {machine['agmm']}, "
        f"commit {report['commit'] or '-'}",
        highlight=False,
    )
    console.print(
        f"median of {settings['samples']} interleaved samples, each the maximum over the ranks",
        highlight=False,
    )
    for shape_report in report["shapes"]:
        print_table(console, shape_table(shape_report, op_of(report)))
    print_table(console, summary_table(report))
    compared = ratios(report, op_of(report))
    if compared and len(report["shapes"]) > 1:
        print_table(console, ratio_table(compared))


def ratio_table(compared: Sequence[Ratio]) -> Table:
    """A line for each way of agmm beside each other one: their times' ratio over all shapes."""
    table = plain_table("time ÷ time of another way")
    for heading in ("way", "÷ way"):
        table.add_column(heading, overflow="fold")
    for heading in ("shapes", "geometric mean", "worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    for one in compared:
        table.add_row(
            *(one.way, one.other, str(one.shapes)),
            *(f"{one.mean:.3f}", f"{one.worst:.3f}", one.worst_shape),
        )
    return table


def shape_table(shape_report: dict[str, Any], op: str = ALL_GATHER_MATMUL) -> Table:
    """One shape's ways: µs, TFLOPS per rank, ratio to the roof, relative error."""
    table = plain_table(shape_of(shape_report).title)
    table.add_column("way", overflow="fold")
    headings = ["µs", "TFLOPS/rank", "÷ roof", "error"]
    with_host = any(w["host_time_us"] is not None for w in shape_report["ways"].values())
    if with_host:
        headings.append("host µs")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for name, w in shape_report["ways"].items():
        table.add_row(
            title_of(name, op),
            "WRONG" if w["wrong"] else number(w["median_us"], ".1f"),
            number(w["tflops"], ".4g"),
            number(w["ratio_to_roof"], ".3f"),
            number(w["relative_error"], ".2e"),
            *([number(w["host_time_us"], ".1f")] if with_host else []),
            escape(w["reason"] or ""),
        )
    return table


def summary_table(report: dict[str, Any]) -> Table:
    """One row per shape: roof, best other way, agmm eager and as a graph."""
    table = plain_table("summary (µs)")
    table.add_column("shape", no_wrap=True)
    for heading in ("roof", "best other"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("(way)", no_wrap=True)
    for heading in ("agmm", "agmm graph", "agmm ÷ roof", "best other ÷ agmm", "host µs"):
        table.add_column(heading, justify="right")
    for shape_report in report["shapes"]:
        s = summarize(shape_report, op_of(report))
        host = shape_report["ways"].get("agmm", {}).get("host_time_us")
        table.add_row(
            str(s.shape),
            number(s.roof, ".1f"),
            number(s.best_other_us, ".1f"),
            s.best_other or "-",
            number(s.agmm, ".1f"),
            number(s.agmm_graph, ".1f"),
            number(s.agmm_ratio, ".3f"),
            number(s.speedup, ".3f"),
            number(host, ".1f"),
        )
    return table


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the warning, a table per shape, what only one report has, and a summary."""
    if comparison.differences:
        console.print(
            f"not the same conditions: {'; '.join(comparison.differences)}",
            style="yellow",
            soft_wrap=True,
            markup=False,
        )
    for shape in dict.fromkeys(c.shape for c in comparison.changes):
        changes = [c for c in comparison.changes if c.shape == shape]
        print_table(console, comparison_table(changes, comparison.op))
    for heading, lines in (("only old", comparison.only_old), ("only new", comparison.only_new)):
        for line in lines:
            console.print(f"{heading}: {line}", soft_wrap=True, markup=False)
    console.print(summary(comparison), soft_wrap=True, markup=False)


def comparison_table(changes: Sequence[Change], op: str) -> Table:
    """The changes of one shape, a row per way."""
    built = plain_table(changes[0].shape.title)
    built.add_column("way", no_wrap=True)
    for heading in ("old µs", "new µs", "new ÷ old", "± noise", "in roofs"):
        built.add_column(heading, justify="right", no_wrap=True)
    built.add_column("", no_wrap=True)
    for c in changes:
        flagged = c.verdict in (Verdict.faster, Verdict.slower)
        noise = None if c.noise_us is None else STANDARD_ERRORS * c.noise_us / c.old_us
        built.add_row(
            title_of(c.way, op),
            f"{c.old_us:.1f}",
            f"{c.new_us:.1f}",
            f"{c.ratio:.3f}",
            "-" if noise is None else f"{noise:.3f}",
            "-" if c.ratio_in_roofs is None else f"{c.ratio_in_roofs:.3f}",
            c.verdict.value.upper() if flagged else c.verdict.value,
            style={Verdict.faster: "green", Verdict.slower: "red"}.get(c.verdict),
        )
    return built


def tuning_table(outcomes: Sequence[Outcome], what: str = "") -> Table:
    """One row per shape of what was tuned: old and new plan with their times, gain, and ratio to
    the roof."""
    table = plain_table(f"tuned{f': {what}' if what else ''} (µs)")
    table.add_column("shape", no_wrap=True)
    table.add_column("old plan", overflow="fold")
    table.add_column("new plan", overflow="fold")
    for heading in ("old", "new", "gain", "÷ roof", "unfused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for o in outcomes:
        if o.row is None:
            table.add_row(str(o.shape), o.old.name, "none could be measured", *["-"] * 5)
            continue
        gain = None if o.old_us is None else 100 * (1 - o.row.us / o.old_us)
        ratio = None if o.row.roof_us is None else o.row.us / o.row.roof_us
        table.add_row(
            str(o.shape),
            o.old.name,
            "the same" if o.row.plan == o.old else o.row.plan.name,
            number(o.old_us, ".1f"),
            number(o.row.us, ".1f"),
            "-" if gain is None else f"{gain:.1f}%",
            number(ratio, ".3f"),
            number(o.row.unfused_us, ".1f"),
        )
    return table


def number(value: float | None, spec: str) -> str:
    """The value in that format, a dash for None."""
    return "-" if value is None else format(value, spec)
