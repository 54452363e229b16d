"""The matmul alone on one GPU, by the kernel that a call would get, beside torch.mm: what a fused
op cannot be faster than.

The shapes are projections of the models that `agmm tune --model` knows, of both halves of a layer,
at tensor parallelism 2, 4 and 8, with rows between 64 and 8192 that `--seed` draws, and B by column
and by row. All signals are set beforehand.

    python benchmarks/alone.py --json new.json
    python benchmarks/alone.py --from h100.json --from h200.json --plot alone.png
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from agmm.bench import figures, presets
from agmm.bench.measure import release_memory
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import SAMPLES, time_ways
from agmm.bench.way import ROOF
from agmm.cli.terminal import console, plain_table
from agmm.errors import InvalidArgument
from agmm.ops import async_input_mm
from agmm.planning.problems import OPS
from agmm.planning.shapes import Shape
from agmm.testing.cases import make_operands
from agmm.testing.reference import allowed_error, gathered_product, relative_error

OURS = "agmm"
BANDS = ((64, 256), (257, 1024), (1025, 8192))
"""Bands of rows; as many shapes are drawn in each."""
MOST_EVEN = 0.7  # of the row counts are multiples of 64, or of 16 below 128: batches of servers
CHUNKS, PIVOT = 4, 1
LAYOUTS = ("column", "row")
TICKS = (64, 256, 1024, 4096)


class Case(NamedTuple):
    shape: Shape
    b_layout: str


def projections(ops: Sequence[str] = OPS) -> list[tuple[int, int]]:
    """N and K of one rank's projections that call one of the ops."""
    found = set()
    for model in presets.MODELS:
        for tp in (2, 4, 8):
            for op in ops:
                try:
                    shapes = presets.shapes(model, [BANDS[0][0]], tp, op)
                except InvalidArgument:  # a model that so many ranks cannot share
                    continue
                found |= {(shape.N, shape.K) for shape in shapes}
    return sorted(found)


def drawn_rows(draw: random.Random, lowest: int, highest: int) -> int:
    """A number of rows, of which every size is as likely."""
    m = round(2 ** draw.uniform(math.log2(lowest), math.log2(highest)))
    if draw.random() < MOST_EVEN:
        step = 64 if m >= 128 else 16
        m = max(lowest, m // step * step)
    return m


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` shapes, each with both layouts of B."""
    draw = random.Random(seed)
    pairs = projections()
    for i in range(count):
        m = drawn_rows(draw, *BANDS[i % len(BANDS)])
        n, k = draw.choice(pairs)
        for b_layout in LAYOUTS:
            yield Case(Shape(m // CHUNKS * CHUNKS, n, k), b_layout)


def measure(case: Case, samples: int, chunks: int) -> dict[str, dict[str, Any]]:
    """Checks and times torch.mm and the planned kernel, with A in so many chunks of rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    operands = make_operands(case.shape, 0, 1, dtype=torch.bfloat16, device=device)
    A, B = operands.A, operands.B
    if case.b_layout == "row":
        B = B.contiguous()
    signals = torch.ones(chunks, dtype=torch.int32, device=device).view(torch.uint32)
    pivot = min(PIVOT, chunks - 1)
    out = A.new_empty(case.shape.M, case.shape.N)
    reference = gathered_product(A, B)
    allowed = allowed_error(relative_error(torch.mm(A, B), reference))
    error = relative_error(async_input_mm.on_cuda(A, B, signals, pivot), reference)
    del reference
    release_memory(device)
    timed = time_ways(
        {
            ROOF: lambda: torch.mm(A, B, out=out),
            OURS: lambda: async_input_mm.on_cuda(A, B, signals, pivot),
        },
        samples=samples,
        device=device,
    )
    roof = statistics.median(timed[ROOF])
    ways: dict[str, dict[str, Any]] = {}
    for name, values in timed.items():
        median = statistics.median(values)
        ways[name] = {
            "median_us": round(median, 2),
            "ratio_to_roof": round(median / roof, 4),
            "tflops": round(case.shape.flops(1) / median / 1e6, 1),
        }
    ways[OURS] |= {"relative_error": error, "wrong": bool(error > allowed)}
    return ways


def summary(report: dict[str, Any]) -> list[list[str]]:
    """The number, geometric mean, 97th percentile and largest ratio of each band and layout."""
    rows = []
    for lowest, highest in BANDS:
        for b_layout in LAYOUTS:
            ratios = sorted(
                entry["ways"][OURS]["ratio_to_roof"]
                for entry in report["shapes"]
                if entry["b_layout"] == b_layout and lowest <= entry["M"] <= highest
            )
            if not ratios:
                continue
            figure = (
                statistics.geometric_mean(ratios),
                ratios[min(len(ratios) - 1, int(0.97 * len(ratios)))],
                ratios[-1],
            )
            cells = [f"{value:.3f}" for value in figure]
            rows.append([f"{lowest} to {highest}", b_layout, str(len(ratios)), *cells])
    return rows


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """The ratio over rows, one panel for each GPU and layout of B."""
    figure = figures.new_figure(figures.PAGE_WIDTH, 2.9 * len(reports) + 0.4)
    axes = None
    panels = [(report, b_layout) for report in reports for b_layout in LAYOUTS]
    for place, (report, b_layout) in enumerate(panels, 1):
        axes = figure.add_subplot(len(reports), len(LAYOUTS), place, sharey=axes)
        found = [entry for entry in report["shapes"] if entry["b_layout"] == b_layout]
        rows = [entry["M"] for entry in found]
        ratios = [entry["ways"][OURS]["ratio_to_roof"] for entry in found]
        axes.plot(rows, ratios, "o", color=figures.VERMILION, markersize=3.5)
        axes.axhline(1.0, color=figures.GREY)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TICKS, [str(rows) for rows in TICKS])
        axes.set_xlabel("rows")
        axes.set_ylabel("time ÷ torch.mm")
        name = report["machine"].get("device_name", "GPU")
        axes.set_title(f"{name}, B by {b_layout}", loc="left", fontsize=10)
        figures.strip(axes, grid="both")
    figure.suptitle(
        "all_gather_matmul: the matmul alone ÷ torch.mm (lower is better), 1 GPU",
        x=0.01,
        ha="left",
        fontsize=10.5,
    )
    figures.save(figure, path)


def main(
    count: Annotated[int, typer.Option(min=1, help="Shapes, each with both layouts.")] = 96,
    seed: Annotated[int, typer.Option(help="Of the shapes.")] = 0,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    chunks: Annotated[int, typer.Option(min=1, help="Row chunks of A.")] = CHUNKS,
    limit_s: Annotated[float, typer.Option(help="Begin no shape later than so.")] = math.inf,
    from_paths: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A report of this; nothing is measured. May be repeated."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", dir_okay=False)] = None,
) -> None:
    """Time the planned matmul alone beside torch.mm on one GPU, or show a report of that."""
    if from_paths and json_path is not None:
        raise typer.BadParameter("found it with --from, wanted one of them", param_hint="--json")
    if not from_paths and not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    if from_paths:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in from_paths]
    else:
        report = new_report(replace(Options(world_size=1, samples=samples).resolved(), ways=None))
        stderr = console(stderr=True)
        begin = time.monotonic()
        drawn = list(cases(count, seed))
        for i, case in enumerate(drawn, 1):
            if time.monotonic() - begin > limit_s:
                stderr.print(f"stopped after {i - 1} of {len(drawn)}, at {limit_s:g} s")
                break
            stderr.print(f"[{i}/{len(drawn)}] {case.shape}, B by {case.b_layout}")
            m, n, k = case.shape.M, case.shape.N, case.shape.K
            ways = measure(case, samples, chunks)
            report["shapes"].append(
                {"M": m, "N": n, "K": k, "b_layout": case.b_layout, "ways": ways}
            )
        reports = [report]
    for report in reports:
        table = plain_table(f"time ÷ torch.mm, {report['machine'].get('device_name', 'GPU')}")
        for heading in ("rows", "B by", "shapes", "mean", "97%", "largest"):
            table.add_column(heading)
        for row in summary(report):
            table.add_row(*row)
        console().print(table)
    entries = [entry for report in reports for entry in report["shapes"]]
    wrong = [entry for entry in entries if entry["ways"][OURS]["wrong"]]
    for entry in wrong:
        console().print(f"wrong: {entry['M']}x{entry['N']}x{entry['K']}, B by {entry['b_layout']}")
    if json_path is not None:
        write_json(report, json_path)
    if plot_path is not None:
        plot(reports, plot_path)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
