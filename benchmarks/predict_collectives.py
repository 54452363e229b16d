"""What is predicted of the collectives on GPUs, beside NCCL's: a table in Markdown, and a picture
of time over bytes. Needs no GPU.

    python benchmarks/predict_collectives.py
    python benchmarks/predict_collectives.py --op all_gather --ranks 2,4
    python benchmarks/predict_collectives.py --plot all_reduce.png \\
        --measured benchmarks/results/collectives/nvidia-h200-x4.json

Bytes are those of the whole tensor.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agmm.bench import figures
from agmm.cli.gpu_names import find_gpu
from agmm.planning.cost_model import collectives
from agmm.planning.cost_model.collectives import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 10 << 20, 16 << 20)
PLOTTED = [1024 << i for i in range(16)]
COLOURS = {
    "one_shot": figures.BLUE,
    "two_shot": figures.GREEN,
    "blocks": figures.ORANGE,
}


class Op(str, Enum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"


def cells(kind: Kind, nbytes: int, ranks: int, gpu: str) -> list[str]:
    us = collectives.by_kernel_us(kind, nbytes, ranks)
    library_us = collectives.by_library_us(kind, nbytes, ranks, gpu)
    return [f"{us:.1f}", collectives.collective_method(kind, nbytes, ranks), f"{library_us:.1f}"]


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def measured(kind: Kind, report: dict[str, Any]) -> dict[str, dict[int, float]]:
    """The times of a report of `benchmarks/collectives.py`, less those of the events: of agmm and
    of the backend, by the bytes of the whole tensor."""
    ranks = report["settings"]["world_size"]
    found: dict[str, dict[int, float]] = {"agmm": {}, "backend": {}}
    for entry in report["shapes"]:
        ways = entry["ways"]
        for by, times in found.items():
            if f"{kind}, {by}" in ways:
                us = ways[f"{kind}, {by}"]["median_us"] - ways["nothing"]["median_us"]
                times[entry["bytes"] * (1 if kind == "all_reduce" else ranks)] = us
    return found


def plot(
    kind: Kind, reports: list[dict[str, Any]], counts: list[int], gpu: str, path: Path
) -> None:
    """A panel for each number of ranks: predicted times as lines, and where a report has as many
    ranks, measured ones as marks."""
    figure = figures.new_figure(figures.PAGE_WIDTH, 4.2)
    axes: Axes | None = None
    for place, ranks in enumerate(counts, 1):
        axes = figure.add_subplot(1, len(counts), place, sharey=axes)
        for method in collectives.methods(kind):
            times = [collectives.collective_us(kind, method, n, ranks) for n in PLOTTED]
            axes.plot(PLOTTED, times, color=COLOURS[method], label=f"agmm, {method}, predicted")
        times = [collectives.by_library_us(kind, n, ranks, gpu) for n in PLOTTED]
        axes.plot(PLOTTED, times, color=figures.GREY, linestyle="--", label="NCCL, predicted")
        axes.axvline(
            collectives.MOST_BYTES,
            color=figures.BLACK,
            linewidth=0.8,
            linestyle=":",
            label="NCCL is taken beyond",
        )
        found = [report for report in reports if report["settings"]["world_size"] == ranks]
        for report in found:
            for by, colour in (("agmm", figures.VERMILION), ("backend", figures.GREY)):
                points = measured(kind, report)[by]
                name = {"agmm": "agmm", "backend": "NCCL"}[by]
                axes.plot(
                    list(points),
                    list(points.values()),
                    "o",
                    color=colour,
                    markersize=4.5,
                    label=f"{name}, measured on {report['machine']['device_name']}",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(2, 200)
        ticks = PLOTTED[::4]
        axes.set_xticks(ticks, [size(n) for n in ticks])
        note = "" if found else ", predicted only"
        axes.set_title(f"{ranks} ranks{note}", loc="left", fontsize=10)
        axes.set_xlabel("bytes in all")
        axes.set_ylabel("µs")
        figures.strip(axes, grid="both")
    listed = " and ".join(map(str, counts))
    figure.suptitle(
        f"{kind}, {listed} ranks on {gpu}: time over bytes", x=0.01, ha="left", fontsize=10.5
    )
    handles = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower left",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    figures.save(figure, path)


def main(
    op: Annotated[Op, typer.Option(help="Which collective.")] = Op.all_reduce,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "4,8",
    gpu: Annotated[str, typer.Option(help="NCCL's times, as for agmm explain.")] = "h200",
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Where to write the picture.")
    ] = None,
    reports: Annotated[
        list[Path] | None,
        typer.Option("--measured", help="Reports whose times the picture has. May be repeated."),
    ] = None,
) -> None:
    """Predict a collective by agmm's kernels and by NCCL."""
    kind: Kind = op.value
    name = find_gpu(gpu)
    counts = [int(count) for count in ranks.split(",")]
    headings = ["in all"]
    for count in counts:
        headings += [f"{count} ranks", "by", "NCCL"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for nbytes in SIZES:
        row = [size(nbytes)]
        for count in counts:
            row += cells(kind, nbytes, count, name)
        print(f"| {' | '.join(row)} |")
    if picture is not None:
        plot(kind, [json.loads(path.read_text()) for path in reports or []], counts, name, picture)


if __name__ == "__main__":
    typer.run(main)
