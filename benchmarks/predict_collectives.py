"""What is predicted of the collectives on GPUs, beside NCCL's: a table in Markdown, and a picture
of time over bytes. Needs no GPU.

    python benchmarks/predict_collectives.py
    python benchmarks/predict_collectives.py --op all_gather --ranks 2,4
    python benchmarks/predict_collectives.py --plot docs/images/collectives.png

Bytes are those of the whole tensor.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from agmm.bench import figures
from agmm.cli.gpu_names import find_gpu
from agmm.planning.cost_model import collectives
from agmm.planning.cost_model.collectives import Kind

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


def plot(kind: Kind, counts: list[int], gpu: str, path: Path) -> None:
    figure = figures.new_figure(5.0 * len(counts), 4.0)
    for place, ranks in enumerate(counts, 1):
        axes = figure.add_subplot(1, len(counts), place)
        for method in collectives.methods(kind):
            times = [collectives.collective_us(kind, method, n, ranks) for n in PLOTTED]
            axes.plot(PLOTTED, times, color=COLOURS[method], label=f"agmm, {method}")
        times = [collectives.by_library_us(kind, n, ranks, gpu) for n in PLOTTED]
        axes.plot(PLOTTED, times, color=figures.GREY, linestyle="--", label="NCCL")
        axes.axvline(collectives.MOST_BYTES, color=figures.BLACK, linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(2, 200)
        ticks = PLOTTED[::4]
        axes.set_xticks(ticks, [size(n) for n in ticks])
        axes.set_title(f"{kind}, {ranks} ranks: predicted, not measured", fontsize=10)
        axes.set_xlabel("bytes in all; dotted: NCCL beyond")
        axes.set_ylabel("µs")
        axes.legend(fontsize=8, frameon=False)
        figures.strip(axes, grid="both")
    figures.save(figure, path)


def main(
    op: Annotated[Op, typer.Option(help="Which collective.")] = Op.all_reduce,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "4,8",
    gpu: Annotated[str, typer.Option(help="NCCL's times, as for agmm explain.")] = "h200",
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Where to write the picture.")
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
        plot(kind, counts, name, picture)


if __name__ == "__main__":
    typer.run(main)
