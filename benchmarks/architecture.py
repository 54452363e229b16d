"""The picture of the parts of agmm: the way of a call through them, and what ranks exchange."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agmm.bench import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "architecture.png"
_HEIGHT = 7.9
"""The height of the picture in inches, which its places are counted in."""
_SMALL, _LARGE = 9, 10.5
"""Sizes of text in points, which `figures.PAGE_WIDTH` makes 11 and 13 pixels on a page."""
_PALE = {
    figures.GREY: "#F2F2F2",
    figures.BLUE: "#E3EFF8",
    figures.GREEN: "#E2F3EC",
    figures.ORANGE: "#FCF1DC",
    figures.VERMILION: "#FAE7DC",
}
"""The fill of a box by the colour of its edge."""

Point = tuple[float, float]


class _Canvas:
    """Boxes and arrows at places in inches, which are counted from the top on the left."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes

    def box(
        self, at: Point, size: Point, title: str, lines: str = "", *, color: str, top: float = 0.0
    ) -> None:
        """A box whose title stands over its lines, all in its middle, or ``top`` below its edge."""
        from matplotlib.patches import FancyBboxPatch

        (x, y), (width, height) = at, size
        self._axes.add_patch(
            FancyBboxPatch(
                *((x, -y - height), width, height),
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=_PALE[color],
                edgecolor=color,
                linewidth=1.2,
            )
        )
        count = lines.count("\n") + 1 if lines else 0
        first = y + (top or height / 2 - 0.09 * count)
        self.text((x + width / 2, first), title, size=_LARGE, weight="bold")
        if lines:
            self.text((x + width / 2, first + 0.1 + 0.09 * count), lines)

    def text(
        self,
        at: Point,
        text: str,
        *,
        size: float = _SMALL,
        weight: str = "normal",
        ha: str = "center",
    ) -> None:
        self._axes.text(
            *(at[0], -at[1], text),
            ha=ha,
            va="center",
            fontsize=size,
            fontweight=weight,
            linespacing=1.25,
        )

    def arrow(
        self,
        start: Point,
        end: Point,
        *,
        color: str = figures.BLACK,
        dashed: bool = False,
        back: bool = False,
    ) -> None:
        self._axes.annotate(
            "",
            xy=(end[0], -end[1]),
            xytext=(start[0], -start[1]),
            arrowprops={
                "arrowstyle": "<|-|>" if back else "-|>",
                "color": color,
                "linewidth": 1.4,
                "linestyle": "--" if dashed else "-",
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )


def draw(path: Path) -> None:
    """Draw the picture into a file."""
    figure = figures.new_figure(figures.PAGE_WIDTH, _HEIGHT)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, figures.PAGE_WIDTH)
    axes.set_ylim(-_HEIGHT, 0)
    axes.axis("off")
    canvas = _Canvas(axes)
    _way_of_a_call(canvas)
    _between_ranks(canvas, 4.75)
    figures.save(figure, path)


def _way_of_a_call(canvas: _Canvas) -> None:
    """Draw the packages that a call goes through, from the caller to what computes it."""
    canvas.text((0.1, 0.2), "The way of a call", size=_LARGE, weight="bold", ha="left")
    canvas.box((0.1, 0.4), (3.0, 0.75), "agmm.nn", "layers and parallel styles", color=figures.GREY)
    canvas.box(
        *((3.3, 0.4), (4.2, 0.75)),
        "agmm.integrations",
        "async TP, FSDP2, transformers, PEFT, …",
        color=figures.GREY,
    )
    canvas.box(
        *((0.1, 1.5), (7.4, 0.75)),
        "agmm.ops and agmm.collectives",
        "check the arguments, choose the route, keep what later calls of the kind need",
        color=figures.BLUE,
    )
    canvas.box(
        *((0.1, 2.6), (3.0, 0.75)),
        "agmm.planning",
        "kernel and transport: a row of a\ntable, else the cost model",
        color=figures.GREEN,
    )
    canvas.box(
        *((3.3, 2.6), (4.2, 0.75)),
        "agmm.runtime",
        "groups and links; the workspace with\nits slots, signals and credits",
        color=figures.GREEN,
    )
    canvas.box(
        *((0.1, 3.7), (5.4, 0.85)),
        "agmm._core, C++",
        "CUTLASS matmuls, copy engines, SM push, tile push;\n"
        "CPU ranks: shared memory, torch's matmul",
        color=figures.ORANGE,
    )
    canvas.box(
        (5.7, 3.7), (1.8, 0.85), "unfused", "torch's matmul,\nNCCL or gloo", color=figures.GREY
    )
    for start in ((1.6, 1.15), (5.4, 1.15), (5.4, 2.25), (4.4, 3.35), (6.6, 3.35)):
        canvas.arrow(start, (start[0], start[1] + 0.35))
    canvas.arrow((1.6, 2.25), (1.6, 2.6), back=True)  # the plan comes back


def _between_ranks(canvas: _Canvas, y: float) -> None:
    """Draw what two ranks exchange in a gather, below ``y``."""
    title = "An all-gather + matmul: what rank 0 sends; rank 1 sends its shard likewise"
    canvas.text((0.1, y + 0.1), title, size=_LARGE, weight="bold", ha="left")
    top = y + 0.35
    for x, rank in ((0.1, 0), (4.5, 1)):
        canvas.box((x, top), (3.0, 2.65), f"rank {rank}", color=figures.GREY, top=0.18)
        canvas.box((x + 0.15, top + 0.4), (2.7, 0.5), "A_shard", color=figures.BLUE)
        canvas.box(
            *((x + 0.7, top + 1.1), (2.15, 0.6)),
            "slot",
            "chunks, a signal for each",
            color=figures.GREEN,
        )
        canvas.box(
            *((x + 0.15, top + 1.9), (2.7, 0.6)),
            "matmul",
            "own rows first; other tiles wait\nfor the signals of their chunks",
            color=figures.ORANGE,
        )
        canvas.arrow((x + 0.42, top + 0.9), (x + 0.42, top + 1.9))
        canvas.arrow((x + 1.78, top + 1.7), (x + 1.78, top + 1.9))
    sender, slot_of_0, slot_of_1 = 2.95, 2.95, 5.2
    canvas.arrow((sender, top + 0.6), (slot_of_1, top + 1.25), color=figures.BLUE)
    canvas.text((3.8, top + 0.45), "1 chunks,\nthen signals")
    canvas.arrow(
        (slot_of_1, top + 1.55), (slot_of_0, top + 1.55), color=figures.VERMILION, dashed=True
    )
    canvas.text((3.8, top + 1.82), "2 credit to\nwrite again")
