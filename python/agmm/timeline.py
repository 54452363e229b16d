"""The picture of the overlap: when each chunk of A arrived and when its tiles were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PLOT_EXTRA = "pip install 'agmm[plot]'"

_ARRIVAL = "#444444"
_GAP_NOTICED = 0.01


ChunkEvent = Mapping[str, int]
"""One chunk, or one group of a chunk's tiles: 'chunk', 'source' (its rank) and, in ns of one clock,
'arrived_ns', 'start_ns' and 'end_ns'."""


class PlotUnavailable(RuntimeError):
    """matplotlib is not installed."""


def waited_share(events: Sequence[ChunkEvent]) -> float:
    """The share of the time from first start to last end in which nothing was computed."""
    if not events:
        raise ValueError("events: found none, wanted at least one")
    begin = min(e["start_ns"] for e in events)
    end = max(e["end_ns"] for e in events)
    if end <= begin:
        return 0.0
    busy, reached = 0, begin
    for e in sorted(events, key=lambda e: e["start_ns"]):
        busy += max(0, e["end_ns"] - max(e["start_ns"], reached))
        reached = max(reached, e["end_ns"])
    return 1.0 - busy / (end - begin)


def draw(events: Sequence[ChunkEvent], path: Path, *, title: str, rank: int = 0) -> None:
    """Writes the picture of one rank's call to `path` (PNG, or what the suffix says).

    One lane per chunk, in the order in which they are computed: a mark where it arrived, bars where
    its tiles were computed. A dashed line stands where all of A had arrived: all-gather followed by
    matmul could start there at the earliest. Raises PlotUnavailable without matplotlib.
    """
    if not events:
        raise ValueError("events: found none, wanted at least one")
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable(f"matplotlib is not installed; {PLOT_EXTRA} brings it") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedFormatter, FixedLocator

    origin = min(min(e["start_ns"], e["arrived_ns"]) for e in events)
    last = max(max(e["end_ns"], e["arrived_ns"]) for e in events)
    divisor, unit = (1e6, "ms") if last - origin >= 2_000_000 else (1e3, "µs")

    def x(ns: int) -> float:
        return (ns - origin) / divisor

    first_start: dict[int, int] = {}
    for e in events:
        first_start[e["chunk"]] = min(first_start.get(e["chunk"], e["start_ns"]), e["start_ns"])
    lanes = {c: i for i, c in enumerate(sorted(first_start, key=lambda c: first_start[c]))}
    sources = {e["chunk"]: e["source"] for e in events}
    colors = [matplotlib.colormaps["tab10"](i) for i in range(10)]

    figure = Figure(figsize=(9.6, 2.3 + 0.55 * len(lanes)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for e in events:
        lane = lanes[e["chunk"]]
        axes.barh(
            lane,
            x(e["end_ns"]) - x(e["start_ns"]),
            left=x(e["start_ns"]),
            height=0.56,
            color=colors[e["source"] % len(colors)],
            edgecolor="white",
            linewidth=0.4,
        )
    arrived = {e["chunk"]: e["arrived_ns"] for e in events}
    for chunk, lane in lanes.items():
        axes.plot([x(arrived[chunk])] * 2, [lane - 0.4, lane + 0.4], color=_ARRIVAL, linewidth=2.2)
    all_here = max(arrived.values())
    axes.axvline(x(all_here), color=_ARRIVAL, linestyle="--", linewidth=1.2, zorder=0)

    axes.yaxis.set_major_locator(FixedLocator(list(lanes.values())))
    axes.yaxis.set_major_formatter(
        FixedFormatter(
            [
                f"chunk {c} (own)" if sources[c] == rank else f"chunk {c}, rank {sources[c]}"
                for c in lanes
            ]
        )
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"time on rank {rank} since the call began ({unit})")
    axes.set_xlim(left=min(0.0, -0.01 * x(last)), right=x(last) * 1.02 or 1.0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    idle = waited_share(events)
    note = f"; {idle:.0%} of the time waiting" if idle >= _GAP_NOTICED else "; never waiting"
    axes.set_title(title + note, loc="left", fontsize=10.5)
    figure.legend(
        handles=[
            Patch(color="#888888", label="computing its tiles (colour: source rank)"),
            Line2D([], [], color=_ARRIVAL, linewidth=2.2, label="chunk arrived"),
            Line2D(
                [],
                [],
                color=_ARRIVAL,
                linestyle="--",
                linewidth=1.2,
                label="all of A here: all-gather + matmul would start only now",
            ),
        ],
        loc="outside lower left",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
