"""When each chunk of A arrived and when its tiles were computed: pictures, and traces to open."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agmm.bench import figures

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
"""More bars in a lane have no edges, which would look like gaps."""

ChunkEvent = Mapping[str, int]
"""One chunk, or one tile of a chunk: 'chunk', 'source' (its rank) and, in ns of one clock,
'arrived_ns', 'start_ns' and 'end_ns'. Where known also 'wait_begin_ns', from which it was
awaited until 'start_ns', 'sm', the multiprocessor, the tile's place, 'row' and 'column', and
'called_ns', when the rank made the call: the origin of its times. Without it that is its first
event."""


def waited_share(events: Sequence[ChunkEvent]) -> float:
    """The share of the time from the call to the last end in which nothing was computed; from the
    first start where it is not known when the call was."""
    if not events:
        raise ValueError("events: found none, wanted at least one")
    begin = min(e.get("called_ns", e["start_ns"]) for e in events)
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
    its tiles were computed, grey where they waited. A dashed line stands where all of A had
    arrived: all-gather followed by matmul could start there at the earliest. Raises
    PlotUnavailable without matplotlib.
    """
    if not events:
        raise ValueError("events: found none, wanted at least one")
    figure = figures.new_figure(9.6, 2.3 + 0.55 * len(_lanes(events)))
    axes = figure.subplots()
    origin = _first_ns(events)
    divisor, unit = _unit(_last_ns(events) - origin)
    _draw_lanes(axes, events, rank, origin, divisor)
    axes.set_xlabel(f"time on rank {rank} since the {_origin_name(events)} ({unit})")
    axes.set_title(f"{title}; {_waiting(events)}", loc="left", fontsize=10.5)
    _legend(figure, [events], columns=3)
    figures.save(figure, path)


def draw_ranks(
    by_rank: Sequence[Sequence[ChunkEvent]], path: Path, *, title: str, one_clock: bool
) -> None:
    """As `draw`, with a panel for each rank, all with the same scale of time.

    Time begins with the first call of all ranks where `one_clock` holds, else with each rank's.
    """
    if not by_rank or not all(by_rank):
        raise ValueError("events: found none of some rank, wanted at least one of each")
    columns = 1 if len(by_rank) < _COLUMNS_FROM_RANKS else 2
    rows = -(-len(by_rank) // columns)
    lanes = max(len(_lanes(events)) for events in by_rank)
    figure = figures.new_figure(4.0 + 5.2 * columns, 1.5 + rows * (0.9 + 0.32 * lanes))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    origins = _origins(by_rank, one_clock)
    longest = max(_last_ns(events) - o for events, o in zip(by_rank, origins, strict=True))
    divisor, unit = _unit(longest)
    right = longest / divisor
    origin = _origin_name([e for events in by_rank for e in events])
    since = (
        f"first {origin.removeprefix('first ')} of all ranks" if one_clock else f"rank's {origin}"
    )
    for rank, (events, axes) in enumerate(zip(by_rank, grid.flat, strict=False)):
        _draw_lanes(axes, events, rank, origins[rank], divisor)
        axes.set_title(f"rank {rank}; {_waiting(events)}", loc="left", fontsize=9.5)
        axes.set_xlim(-0.01 * right, right * 1.02 or 1.0)
        axes.tick_params(labelsize=8.5, labelbottom=True)
        if rank + columns >= len(by_rank):
            axes.set_xlabel(f"time since the {since} ({unit})", fontsize=9)
    for axes in list(grid.flat)[len(by_rank) :]:
        axes.remove()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    _legend(figure, by_rank, columns=2 if columns == 1 else 4)
    figures.save(figure, path)


def trace(
    by_rank: Sequence[Sequence[ChunkEvent]], *, title: str, one_clock: bool
) -> dict[str, Any]:
    """The events of each rank in the format of Chrome's tracing, which Perfetto reads too.

    A process per rank; in it a thread of the chunks' arrivals (instant events) and one per
    multiprocessor, or per lane of tiles that do not overlap where that is not known. Times are in
    µs, since the first call of all ranks where `one_clock` holds, else since each rank's own.
    """
    origins = _origins(by_rank, one_clock)
    found: list[dict[str, Any]] = []
    for rank, (events, origin) in enumerate(zip(by_rank, origins, strict=True)):
        found += _rank_trace(rank, events, origin)
    clock = "one clock of all ranks" if one_clock else "each rank since its own call"
    return {
        "traceEvents": found,
        "displayTimeUnit": "ns",
        "otherData": {"title": title, "clock": clock},
    }


def write_trace(
    by_rank: Sequence[Sequence[ChunkEvent]], path: Path, *, title: str, one_clock: bool
) -> None:
    """Writes `trace` as JSON and makes the folder of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(by_rank, title=title, one_clock=one_clock)) + "\n")


def _rank_trace(rank: int, events: Sequence[ChunkEvent], origin: int) -> list[dict[str, Any]]:
    def us(ns: int) -> float:
        return (ns - origin) / 1e3

    sms = _threads(events)
    by_sm = all("sm" in e for e in events)
    names = {0: "chunk arrivals"}
    names |= {sm + 1: f"SM {sm}" if by_sm else f"lane {sm}" for sm in sms}
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for tid in sorted(names):
        place = {"pid": rank, "tid": tid}
        found.append({"ph": "M", "name": "thread_name", **place, "args": {"name": names[tid]}})
        found.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}})
    arrivals = {e["chunk"]: e for e in events}
    for chunk, e in sorted(arrivals.items(), key=lambda item: item[1]["arrived_ns"]):
        found.append(
            {
                "ph": "i",
                "s": "t",
                "cat": "arrival",
                "name": f"{_chunk_name(chunk, e['source'], rank)} arrived",
                "pid": rank,
                "tid": 0,
                "ts": us(e["arrived_ns"]),
                "args": {"chunk": chunk, "source": e["source"]},
            }
        )
    for sm, tiles in sms.items():
        place = {"pid": rank, "tid": sm + 1}
        for e in tiles:
            args = {key: e[key] for key in ("chunk", "source", "row", "column") if key in e}
            waited = e["start_ns"] - e.get("wait_begin_ns", e["start_ns"])
            if waited > 0:
                found.append(
                    {
                        "ph": "X",
                        "cat": "wait",
                        "name": f"wait for chunk {e['chunk']}",
                        **place,
                        "ts": us(e["wait_begin_ns"]),
                        "dur": waited / 1e3,
                        "args": args,
                    }
                )
            found.append(
                {
                    "ph": "X",
                    "cat": "tile",
                    "name": _tile_name(e),
                    **place,
                    "ts": us(e["start_ns"]),
                    "dur": (e["end_ns"] - e["start_ns"]) / 1e3,
                    "args": args,
                }
            )
    return found


def _threads(events: Sequence[ChunkEvent]) -> dict[int, list[ChunkEvent]]:
    """The events by multiprocessor, or else in as few lanes as hold them without overlap."""
    in_order = sorted(events, key=_begin_ns)
    threads: dict[int, list[ChunkEvent]] = {}
    if all("sm" in e for e in events):
        for e in in_order:
            threads.setdefault(e["sm"], []).append(e)
        return threads
    for e in in_order:
        free = (i for i, tiles in threads.items() if tiles[-1]["end_ns"] <= _begin_ns(e))
        threads.setdefault(next(free, len(threads)), []).append(e)
    return threads


def _begin_ns(e: ChunkEvent) -> int:
    return min(e["start_ns"], e.get("wait_begin_ns", e["start_ns"]))


def _chunk_name(chunk: int, source: int, rank: int) -> str:
    return f"chunk {chunk} (own)" if source == rank else f"chunk {chunk}, rank {source}"


def _tile_name(e: ChunkEvent) -> str:
    place = f" tile {e['row']}, {e['column']}" if "row" in e and "column" in e else ""
    return f"chunk {e['chunk']}{place}"


def _origin_name(events: Sequence[ChunkEvent]) -> str:
    return "call" if all("called_ns" in e for e in events) else "first event"


def _first_ns(events: Sequence[ChunkEvent]) -> int:
    if all("called_ns" in e for e in events):
        return min(e["called_ns"] for e in events)
    return min(min(_begin_ns(e), e["arrived_ns"]) for e in events)


def _last_ns(events: Sequence[ChunkEvent]) -> int:
    return max(max(e["end_ns"], e["arrived_ns"]) for e in events)


def _origins(by_rank: Sequence[Sequence[ChunkEvent]], one_clock: bool) -> list[int]:
    origins = [_first_ns(events) for events in by_rank]
    return [min(origins)] * len(origins) if one_clock else origins


def _unit(longest_ns: int) -> tuple[float, str]:
    return (1e6, "ms") if longest_ns >= 2_000_000 else (1e3, "µs")


def _lanes(events: Sequence[ChunkEvent]) -> dict[int, int]:
    """Chunks in the order in which they are computed, with their places."""
    first_start: dict[int, int] = {}
    for e in events:
        first_start[e["chunk"]] = min(first_start.get(e["chunk"], e["start_ns"]), e["start_ns"])
    return {c: i for i, c in enumerate(sorted(first_start, key=lambda c: first_start[c]))}


def _waiting(events: Sequence[ChunkEvent]) -> str:
    idle = waited_share(events)
    return f"{idle:.0%} of the time waiting" if idle >= _GAP_NOTICED else "never waiting"


def _draw_lanes(
    axes: Axes, events: Sequence[ChunkEvent], rank: int, origin: int, divisor: float
) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    def x(ns: int) -> float:
        return (ns - origin) / divisor

    lanes = _lanes(events)
    sources = {e["chunk"]: e["source"] for e in events}
    arrived = {e["chunk"]: e["arrived_ns"] for e in events}
    for chunk, lane in lanes.items():
        mine = [e for e in events if e["chunk"] == chunk]
        waits = [(e["wait_begin_ns"], e["start_ns"]) for e in mine if _waited(e)]
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
    axes.axvline(x(max(arrived.values())), color=_ARRIVAL, linestyle="--", linewidth=1.2, zorder=0)
    axes.yaxis.set_major_locator(FixedLocator(list(lanes.values())))
    axes.yaxis.set_major_formatter(
        FixedFormatter([_chunk_name(c, sources[c], rank) for c in lanes])
    )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    last = x(_last_ns(events))
    first = min(0.0, *(x(ns) for ns in arrived.values()))  # a peer may have called earlier
    axes.set_xlim(left=first - 0.01 * last, right=last * 1.02 or 1.0)
    figures.strip(axes, grid="x")


def _waited(e: ChunkEvent) -> bool:
    return e.get("wait_begin_ns", e["start_ns"]) < e["start_ns"]


def _legend(figure: Figure, by_rank: Sequence[Sequence[ChunkEvent]], *, columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color="#888888", label="computing its tiles (colour: source rank)")]
    if any(_waited(e) for events in by_rank for e in events):
        handles.append(Patch(color=_WAITING, label="a tile waiting for it"))
    handles += [
        Line2D([], [], color=_ARRIVAL, linewidth=2.2, label="chunk arrived"),
        Line2D(
            [],
            [],
            color=_ARRIVAL,
            linestyle="--",
            linewidth=1.2,
            label="all of A here: all-gather + matmul would start only now",
        ),
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, fontsize=8, frameon=False
    )
