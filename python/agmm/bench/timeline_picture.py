"""Pictures of timelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agmm.bench import figures
from agmm.bench.timeline import (
    WORDS,
    ChunkEvent,
    chunk_name,
    first_ns,
    last_ns,
    origins_of,
    wait_of,
    waited,
    waited_share,
)
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARRIVAL = "#444444"
_WAITING = "#BBBBBB"
_GAP_NOTICED = 0.01
_COLORS = (
    figures.BLUE,
    figures.ORANGE,
    figures.GREEN,
    figures.PURPLE,
    figures.SKY,
    figures.VERMILION,
    figures.YELLOW,
    figures.GREY,
)
_COLUMNS_FROM_RANKS = 3
_BARS_WITH_EDGES = 24
"""The most bars in a lane that have edges; the edges of more would look like gaps."""


def draw(events: Sequence[ChunkEvent], path: Path, *, title: str, rank: int = 0) -> None:
    """Writes the picture of one rank's call to `path` (PNG, or what the suffix says). It does not
    draw a matmul + reduce-scatter.

    One lane per chunk, in the order in which they are computed: a mark where it arrived, bars where
    its tiles were computed, grey where they waited. A dashed line stands where all of A
    was first found complete. Raises
    PlotUnavailable without matplotlib.
    """
    if not events:
        raise ValueError("events: found none, wanted at least one")
    figure = figures.new_figure(9.6, 2.3 + 0.55 * len(_lanes(events)))
    axes = figure.subplots()
    origin = first_ns(events)
    divisor, unit = _unit(last_ns(events) - origin)
    _draw_lanes(axes, events, rank, origin, divisor, ALL_GATHER_MATMUL)
    axes.set_xlabel(f"time on rank {rank} since the {_origin_name(events)} ({unit})")
    axes.set_title(f"{title}; {_waiting(events)}", loc="left", fontsize=10.5)
    _legend(figure, [events], columns=3, op=ALL_GATHER_MATMUL)
    figures.save(figure, path)


def draw_ranks(
    by_rank: Sequence[Sequence[ChunkEvent]],
    path: Path,
    *,
    title: str,
    one_clock: bool,
    op: str = ALL_GATHER_MATMUL,
) -> None:
    """Draws what `draw` does, with a panel for each rank, all with one scale of time.

    In a matmul + reduce-scatter the mark is where a chunk had been sent, grey comes after an own
    tile, and the dashed line is where the last tile was computed. Time begins with the first call
    of all ranks where `one_clock` holds, else with each rank's.
    """
    if not by_rank or not all(by_rank):
        raise ValueError("events: found none of some rank, wanted at least one of each")
    columns = 1 if len(by_rank) < _COLUMNS_FROM_RANKS else 2
    rows = -(-len(by_rank) // columns)
    lanes = max(len(_lanes(events)) for events in by_rank)
    figure = figures.new_figure(4.0 + 5.2 * columns, 1.5 + rows * (0.9 + 0.32 * lanes))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    origins = origins_of(by_rank, one_clock)
    longest = max(last_ns(events) - o for events, o in zip(by_rank, origins, strict=True))
    divisor, unit = _unit(longest)
    right = longest / divisor
    origin = _origin_name([e for events in by_rank for e in events])
    since = (
        f"first {origin.removeprefix('first ')} of all ranks" if one_clock else f"rank's {origin}"
    )
    for rank, (events, axes) in enumerate(zip(by_rank, grid.flat, strict=False)):
        _draw_lanes(axes, events, rank, origins[rank], divisor, op)
        axes.set_title(f"rank {rank}; {_waiting(events)}", loc="left", fontsize=9.5)
        axes.set_xlim(-0.01 * right, right * 1.02 or 1.0)
        axes.tick_params(labelsize=8.5, labelbottom=True)
        if rank + columns >= len(by_rank):
            axes.set_xlabel(f"time since the {since} ({unit})", fontsize=9)
    for axes in list(grid.flat)[len(by_rank) :]:
        axes.remove()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    _legend(figure, by_rank, columns=2 if columns == 1 else 4, op=op)
    figures.save(figure, path)


def _origin_name(events: Sequence[ChunkEvent]) -> str:
    return "call" if all("called_ns" in e for e in events) else "first event"


def _unit(longest_ns: int) -> tuple[float, str]:
    return (1e6, "ms") if longest_ns >= 2_000_000 else (1e3, "µs")


def _lanes(events: Sequence[ChunkEvent]) -> dict[int, int]:
    """The chunks in the order in which they are computed, with their places."""
    first_start: dict[int, int] = {}
    for e in events:
        first_start[e["chunk"]] = min(first_start.get(e["chunk"], e["start_ns"]), e["start_ns"])
    return {c: i for i, c in enumerate(sorted(first_start, key=lambda c: first_start[c]))}


def _waiting(events: Sequence[ChunkEvent]) -> str:
    idle = waited_share(events)
    return f"{idle:.0%} of the time waiting" if idle >= _GAP_NOTICED else "never waiting"


def _draw_lanes(
    axes: Axes, events: Sequence[ChunkEvent], rank: int, origin: int, divisor: float, op: str
) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    def x(ns: int) -> float:
        return (ns - origin) / divisor

    lanes = _lanes(events)
    sources = {e["chunk"]: e["source"] for e in events}
    arrived: dict[int, int] = {}
    for e in events:
        arrived[e["chunk"]] = max(arrived.get(e["chunk"], e["arrived_ns"]), e["arrived_ns"])
    for chunk, lane in lanes.items():
        mine = [e for e in events if e["chunk"] == chunk]
        waits = [wait_of(e) for e in mine if waited(e)]
        axes.broken_barh(
            [(x(begin), x(end) - x(begin)) for begin, end in waits],
            (lane - 0.1, 0.2),
            facecolor=_WAITING,
        )
        axes.broken_barh(
            [(x(e["start_ns"]), x(e["end_ns"]) - x(e["start_ns"])) for e in mine],
            (lane - 0.28, 0.56),
            facecolor=_COLORS[sources[chunk] % len(_COLORS)],
            edgecolor="white",
            linewidth=0.4 if len(mine) <= _BARS_WITH_EDGES else 0.0,
        )
        axes.plot([x(arrived[chunk])] * 2, [lane - 0.4, lane + 0.4], color=_ARRIVAL, linewidth=2.2)
    is_scatter = op == MATMUL_REDUCE_SCATTER
    computed_ns = max(e.get("computed_ns", e["end_ns"]) for e in events)
    line_ns = computed_ns if is_scatter else max(arrived.values())
    axes.axvline(x(line_ns), color=_ARRIVAL, linestyle="--", linewidth=1.2, zorder=0)
    axes.yaxis.set_major_locator(FixedLocator(list(lanes.values())))
    axes.yaxis.set_major_formatter(FixedFormatter([chunk_name(c, sources[c], rank) for c in lanes]))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    last = x(last_ns(events))
    first = min(0.0, *(x(ns) for ns in arrived.values()))  # a peer may have called earlier
    axes.set_xlim(left=first - 0.01 * last, right=last * 1.02 or 1.0)
    figures.strip(axes, grid="x")


def _legend(
    figure: Figure, by_rank: Sequence[Sequence[ChunkEvent]], *, columns: int, op: str
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = WORDS[op]
    handles: list[Any] = [Patch(color="#888888", label=words.bars)]
    if any(waited(e) for events in by_rank for e in events):
        handles.append(Patch(color=_WAITING, label=words.wait))
    handles += [
        Line2D([], [], color=_ARRIVAL, linewidth=2.2, label=words.mark),
        Line2D(
            [],
            [],
            color=_ARRIVAL,
            linestyle="--",
            linewidth=1.2,
            label=words.line,
        ),
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, fontsize=8, frameon=False
    )
