"""Pictures of a report of `agmm bench`: time over the roof by M, and speed-ups as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agmm.bench import figures
from agmm.bench.reports import Report, op_of, shape_of, title_of, where
from agmm.bench.way import ROOF
from agmm.errors import InvalidArgument
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from agmm.planning.shapes import Shape
from agmm.planning.tables import gpu_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIME_OVER_ROOF = "time_over_roof"
SPEEDUP = "speedup"
BASELINE = "unfused"
_ROWS = {
    ALL_GATHER_MATMUL: "M, gathered rows",
    MATMUL_REDUCE_SCATTER: "M, rows before the scatter",
    MATMUL_ALL_REDUCE: "M, rows of the sum",
}
OURS = "agmm"

_MAX_COLUMNS = 2
_MOST_IN_HALF = 6
"""The most M whose numbers can be read below a panel of half the width."""
_BARS_PER_ROW, _LEAST_GROUPS, _MOST_GROUPS = 36, 3, 9
"""What fits side by side on a page: bars, and groups of bars whose shapes can be read below."""
_MOST_IN_THREE = 6
"""The most entries of a legend that has three columns; with more, some name is too long."""
_BELOW = 0.2
"""The room below the lowest mark, for the number under it, as a share of the range of the marks."""
_LOG_FROM_RATIO = 4.0
"""The y axis is logarithmic where the largest ratio is at least this."""
_ROOF_SHOWN, _LOWEST_TOP = 2.0, 0.1
"""The bars' y axis ends at most this many times as far above 1 as the highest bar, and no lower
than that; a roof above is a number, so that it does not flatten the bars."""


@dataclass(frozen=True)
class Style:
    """The look of a way: colour by implementation, dashed or hatched as a CUDA graph, hollow or
    pale where it returns A, thick for agmm."""

    color: str
    marker: str
    graph: bool
    returns_A: bool
    emphasised: bool

    @classmethod
    def of(cls, name: str, others: Sequence[str]) -> Style:
        """The style of a way; `others` are those unknown to this version, in their order."""
        base = name.removesuffix("-graph")
        family = base.removesuffix("-A")
        looks = {
            "agmm": (figures.VERMILION, "o"),
            "unfused": (figures.GREY, "s"),
            "agmm-fused": (figures.ORANGE, "o"),
            "torch-decomposed": (figures.SKY, "^"),
            "torch-fused": (figures.SKY, "^"),
            "torch-native": (figures.GREEN, "D"),
        }
        spare = [
            (figures.BLUE, "v"),
            (figures.PURPLE, "P"),
            (figures.ORANGE, "X"),
            (figures.BLACK, "*"),
        ]
        color, marker = looks[family] if family in looks else spare[others.index(name) % len(spare)]
        return cls(
            color,
            marker,
            graph=base != name,
            returns_A=base.endswith("-A") or base == "torch-native",
            emphasised=family == "agmm",
        )


def picture_name(what: str, report: Report) -> str:
    """Return the file name of a picture: what it shows, the op, the GPU, the ranks, and the dtype
    where it is not bfloat16."""
    settings, machine = report["settings"], report["machine"]
    device = str(settings.get("device", "unknown"))
    gpu = gpu_name(machine["device_name"]) if machine.get("device_name") else device
    gpu = device if device == "cpu" else gpu
    dtype = settings.get("dtype", "bfloat16")
    parts = [what, op_of(report), gpu, f"x{settings.get('world_size', 0)}"]
    return "-".join([*parts, *([dtype] if dtype != "bfloat16" else [])]) + ".png"


def write(report: Report, folder: Path) -> tuple[list[Path], list[str]]:
    """Writes the pictures that the report has the times for into `folder`, which is made.

    Returns their paths, and for each picture left out why. Raises PlotUnavailable without
    matplotlib, and InvalidArgument where the folder cannot be written to.
    """
    figures.need_matplotlib()
    written, left_out = [], []
    for what, draw in ((TIME_OVER_ROOF, time_over_roof), (SPEEDUP, speedup)):
        name = picture_name(what, report)
        try:
            figure = draw(report)
        except InvalidArgument as error:
            left_out.append(f"no {name}: {error}")
            continue
        try:
            figures.save(figure, folder / name)
        except OSError as error:
            raise InvalidArgument(f"plot: {folder} cannot be written to ({error})") from None
        written.append(folder / name)
    return written, left_out


def time_over_roof(report: Report) -> Figure:
    """Draws the time of each way over that of the matmul alone: by M, a line per way, in a panel
    per (N, K) that has several M; as bars for the shapes that have an (N, K) of their own.

    Raises InvalidArgument where no shape has a time of the roof and of another way.
    """
    by_shape: dict[Shape, dict[str, float]] = {}
    for entry in report["shapes"]:
        shape = shape_of(entry)
        assert isinstance(shape, Shape)  # mixtures of experts are not drawn
        if ratios := _ratios(entry, ROOF):
            by_shape[shape] = ratios
    if not by_shape:
        raise InvalidArgument(
            f"report: found no shape with times of {ROOF!r} and another way, wanted one"
        )
    panels: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
    for shape, ratios in by_shape.items():
        panels.setdefault((shape.N, shape.K), {})[shape.M] = ratios
    lines = {sizes: panel for sizes, panel in panels.items() if len(panel) > 1}
    single = {s: ratios for s, ratios in by_shape.items() if (s.N, s.K) not in lines}
    styles = _styles(_names(by_shape.values()))
    is_wide = any(len(panel) > _MOST_IN_HALF for panel in lines.values())
    columns = 1 if is_wide else max(1, min(_MAX_COLUMNS, len(lines)))
    line_rows, bar_rows = math.ceil(len(lines) / columns), _rows_of(list(single), len(styles))
    rows = line_rows + len(bar_rows)
    figure = figures.new_figure(figures.PAGE_WIDTH, 2.9 * rows + 1.3)
    grid = figure.add_gridspec(rows, columns)
    found = [1.0, *(ratio for ratios in by_shape.values() for ratio in ratios.values())]
    lowest, largest = min(found), max(found)
    axes: Axes | None = None
    for place, ((n, k), panel) in enumerate(lines.items()):
        axes = figure.add_subplot(grid[place // columns, place % columns], sharey=axes)
        _ratio_panel(axes, panel, styles)
        is_gather = op_of(report) == ALL_GATHER_MATMUL
        axes.set_title(
            f"N = {n} per rank, K = {k}" if is_gather else f"N = {n}, K = {k} per rank",
            loc="left",
            fontsize=10,
        )
        axes.set_xlabel(_ROWS[op_of(report)])
    for place, shapes in enumerate(bar_rows):
        axes = figure.add_subplot(grid[line_rows + place, :], sharey=axes)
        _bar_row(axes, shapes, single, {}, styles, None)
    for axes in figure.axes:
        axes.set_ylabel("time ÷ matmul alone")
        if largest >= _LOG_FROM_RATIO:
            axes.set_yscale("log", base=2)
            _log2_ticks(axes.yaxis, [2.0**i for i in range(math.ceil(math.log2(largest)) + 1)])
            axes.set_ylim(lowest * (lowest / largest) ** _BELOW, largest * 1.1)
        else:
            axes.set_ylim(lowest - _BELOW * (largest - lowest), largest * 1.03)
    _title(figure, report, "time ÷ matmul alone (1 is the roof; lower is better)")
    op = op_of(report)
    _legend(figure, _line_handles(styles, op) if lines else _bar_handles(styles, True, op))
    return figure


def speedup(report: Report) -> Figure:
    """Draws bars of the time of matmul and collective, unfused, over that of each way, a group per
    shape.

    Bars start at 1, so that they point down where a way is slower. A line over each group, or a
    number where that is far above, is the matmul alone. Raises InvalidArgument where no shape has
    a time of the baseline and of another way.
    """
    groups: dict[Any, dict[str, float]] = {}
    roofs: dict[Any, float] = {}
    for entry in report["shapes"]:
        ratios = _ratios(entry, BASELINE)
        roof = ratios.pop(ROOF, None)
        if ratios:
            shape = shape_of(entry)
            groups[shape] = {name: 1.0 / r for name, r in ratios.items()}
            if roof is not None:
                roofs[shape] = 1.0 / roof
    if not groups:
        raise InvalidArgument(
            f"report: found no shape with times of {BASELINE!r} and another way, wanted one"
        )
    styles = _styles(_names(groups.values()))
    rows = _rows_of(list(groups), len(styles))
    figure = figures.new_figure(figures.PAGE_WIDTH, 2.9 * len(rows) + 1.3)
    highest = max(value for by_way in groups.values() for value in by_way.values())
    needed = 1.1 * (max(highest, *roofs.values(), 1.0) - 1.0)
    top = 1.0 + max(_LOWEST_TOP, min(needed, _ROOF_SHOWN * (highest - 1.0)))
    grid = figure.subplots(len(rows), 1, squeeze=False, sharey=True).flat
    for axes, shapes in zip(grid, rows, strict=True):
        _bar_row(axes, shapes, groups, roofs, styles, top)
        axes.set_xlim(-0.6, len(rows[0]) - 0.4)
        axes.set_ylabel("speed-up")
    baseline = title_of(BASELINE, op_of(report))
    _title(figure, report, f"speed-up over {baseline} (higher is better)")
    _legend(figure, _bar_handles(styles, bool(roofs), op_of(report)))
    return figure


def _rows_of(shapes: list[Any], bars: int) -> list[list[Any]]:
    """The shapes in rows that fit on a page, as even as can be; `bars` is the number in a group."""
    if not shapes:
        return []
    most = max(_LEAST_GROUPS, min(_MOST_GROUPS, _BARS_PER_ROW // bars))
    per_row = math.ceil(len(shapes) / math.ceil(len(shapes) / most))
    return [shapes[i : i + per_row] for i in range(0, len(shapes), per_row)]


def _ratio_panel(
    axes: Axes, panel: Mapping[int, Mapping[str, float]], styles: Mapping[str, Style]
) -> None:
    ms = sorted(panel)
    for name, style in styles.items():
        points = [(m, panel[m][name]) for m in ms if name in panel[m]]
        if points:
            axes.plot(
                [m for m, _ in points],
                [ratio for _, ratio in points],
                color=style.color,
                marker=style.marker,
                markerfacecolor="white" if style.returns_A else style.color,
                linestyle=(0, (4, 2)) if style.graph else "-",
                linewidth=2.6 if style.emphasised else 1.2,
                markersize=7 if style.emphasised else 5,
                alpha=1.0 if style.emphasised else 0.85,
                zorder=3 if style.emphasised else 2,
            )
    for m in ms:
        ours = panel[m].get(OURS)
        if ours is not None:
            _label(axes, m, ours, f"{ours:.2f}", below=True)
    axes.axhline(1.0, color=figures.BLACK, linewidth=1.0, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(ms[0] * 2**-0.6, ms[-1] * 2**0.6)
    _log2_ticks(axes.xaxis, ms)
    figures.strip(axes, grid="y")


def _label(axes: Axes, x: float, y: float, text: str, *, below: bool = False) -> None:
    """Writes a number of agmm's beside its mark, legible on any line behind it."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        (x, y),
        textcoords="offset points",
        xytext=(0, -15 if below else 3),
        ha="center",
        fontsize=8.5,
        fontweight="bold",
        color=figures.VERMILION,
        path_effects=[withStroke(linewidth=3.5, foreground="white")],
        zorder=5,
    )


def _bar_row(
    axes: Axes,
    shapes: Sequence[Any],
    groups: Mapping[Any, Mapping[str, float]],
    roofs: Mapping[Any, float],
    styles: Mapping[str, Style],
    top: float | None,
) -> None:
    from matplotlib.ticker import FixedLocator

    width = 0.86 / len(styles)
    for place, shape in enumerate(shapes):
        for i, (name, style) in enumerate(styles.items()):
            value = groups[shape].get(name)
            if value is None:
                continue
            x = place - 0.43 + (i + 0.5) * width
            axes.bar(x, value - 1.0, width * 0.92, bottom=1.0, **_bar_look(style))
            if name == OURS:
                _label(axes, x, max(value, 1.0), f"{value:.2f}")
        roof = roofs.get(shape)
        if roof is None or top is None:
            continue
        if roof <= top:
            axes.hlines(roof, place - 0.45, place + 0.45, color=figures.BLACK, linewidth=1.6)
        else:
            axes.text(place, top, f"roof ↑ {roof:.2f}", ha="center", va="top", fontsize=8.5)
    if top is not None:
        axes.set_ylim(top=top)
    axes.axhline(1.0, color=figures.BLACK, linewidth=1.0)
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(shapes)))))
    axes.set_xticklabels([f"M = {s.M}\nN = {s.N}\nK = {s.K}" for s in shapes], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    figures.strip(axes, grid="y")


def _bar_look(style: Style) -> dict[str, Any]:
    return {
        "facecolor": (style.color, 0.45 if style.returns_A else 1.0),
        "edgecolor": "white" if style.graph else style.color,
        "hatch": "////" if style.graph else None,
        "linewidth": 0.0 if style.graph else 0.8,
    }


def _line_handles(styles: Mapping[str, Style], op: str) -> list[Any]:
    from matplotlib.lines import Line2D

    roof = Line2D([], [], color=figures.BLACK, linewidth=1.0, label=title_of(ROOF, op))
    return [
        *(
            Line2D(
                [],
                [],
                color=style.color,
                marker=style.marker,
                markerfacecolor="white" if style.returns_A else style.color,
                linestyle=(0, (4, 2)) if style.graph else "-",
                linewidth=2.6 if style.emphasised else 1.2,
                label=title_of(name, op),
            )
            for name, style in styles.items()
        ),
        roof,
    ]


def _bar_handles(styles: Mapping[str, Style], with_roof: bool, op: str) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [Patch(label=title_of(name, op), **_bar_look(style)) for name, style in styles.items()]
    roof = Line2D([], [], color=figures.BLACK, linewidth=1.6, label=title_of(ROOF, op))
    return [*bars, roof] if with_roof else bars


def _legend(figure: Figure, handles: list[Any]) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=3 if len(handles) <= _MOST_IN_THREE else 2,
        fontsize=9,
        frameon=False,
        handlelength=3.2,
    )


def _title(figure: Figure, report: Report, text: str) -> None:
    figure.suptitle(f"{op_of(report)}: {text}\n{where(report)}", x=0.01, ha="left", fontsize=10.5)


def _log2_ticks(axis: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())


def _ratios(entry: dict[str, Any], base: str) -> dict[str, float]:
    """The time of each other way over that of `base`; empty without one."""
    times = {n: w["median_us"] for n, w in entry["ways"].items() if w["median_us"] is not None}
    if base not in times:
        return {}
    return {name: us / times[base] for name, us in times.items() if name != base}


def _names(ratios: Any) -> list[str]:
    """The ways that these shapes have, agmm's last, so that they are drawn over the others."""
    names = list(dict.fromkeys(name for by_way in ratios for name in by_way))
    return sorted(names, key=lambda name: name.startswith("agmm"))


def _styles(names: Sequence[str]) -> dict[str, Style]:
    return {name: Style.of(name, list(names)) for name in names}
