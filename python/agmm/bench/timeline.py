"""When each chunk arrived, or was sent, and when its tiles were computed: pictures, and traces to
open."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agmm.bench import figures
from agmm.planning.plans import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER

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
event.

Of a matmul + reduce-scatter 'source' is the rank whose rows these are, and 'arrived_ns' when the
chunk's last tile had been sent; of the own chunk, when the last of the others' sums was there. An
own tile waited for them from 'wait_begin_ns' to 'wait_end_ns', after 'end_ns'. 'computed_ns': where
that is another than 'end_ns'."""


class _Words(NamedTuple):
    """What legends and traces say of an op."""

    bars: str
    wait: str
    mark: str
    marked: str
    """Of a chunk of another rank."""
    own_marked: str
    marks: str
    line: str


_WORDS = {
    ALL_GATHER_MATMUL: _Words(
        bars="computing its tiles (colour: source rank)",
        wait="a tile waiting for it",
        mark="chunk arrived",
        marked="arrived",
        own_marked="arrived",
        marks="chunk arrivals",
        line="all of A here: all-gather + matmul would start only now",
    ),
    MATMUL_REDUCE_SCATTER: _Words(
        bars="computing its tiles (colour: owner)",
        wait="an own tile waiting for the others' sums",
        mark="chunk sent; own: all sums here",
        marked="sent",
        own_marked="has all sums",
        marks="chunks sent",
        line="all tiles computed: matmul + reduce-scatter would send only now",
    ),
}


def waited_share(events: Sequence[ChunkEvent]) -> float:
    """The share of the time from the call to the last end, or the end of the last wait, in which
    nothing was computed; from the first start where it is not known when the call was."""
    if not events:
        raise ValueError("events: found none, wanted at least one")
    begin = min(e.get("called_ns", e["start_ns"]) for e in events)
    end = max(max(e["end_ns"], e.get("wait_end_ns", 0)) for e in events)
    if end <= begin:
        return 0.0
    busy, reached = 0, begin
    for e in sorted(events, key=lambda e: e["start_ns"]):
        busy += max(0, e["end_ns"] - max(e["start_ns"], reached))
        reached = max(reached, e["end_ns"])
    return 1.0 - busy / (end - begin)


def draw(events: Sequence[ChunkEvent], path: Path, *, title: str, rank: int = 0) -> None:
    """Writes the picture of one rank's call to `path` (PNG, or what the suffix says). Not of a
    matmul + reduce-scatter.

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
    """As `draw`, with a panel for each rank, all with the same scale of time.

    Of a matmul + reduce-scatter the mark is where a chunk had been sent, grey comes after an own
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
    origins = _origins(by_rank, one_clock)
    longest = max(_last_ns(events) - o for events, o in zip(by_rank, origins, strict=True))
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


def trace(
    by_rank: Sequence[Sequence[ChunkEvent]],
    *,
    title: str,
    one_clock: bool,
    op: str = ALL_GATHER_MATMUL,
) -> dict[str, Any]:
    """The events of each rank in the format of Chrome's tracing, which Perfetto reads too.

    A process per rank; in it a thread of when the chunks arrived or had been sent (instant events)
    and one per multiprocessor, or per lane of tiles that do not overlap where that is not known;
    waits that come after a tile, beside the next one, have threads of their own. Times are in
    µs, since the first call of all ranks where `one_clock` holds, else since each rank's own.
    """
    origins = _origins(by_rank, one_clock)
    found: list[dict[str, Any]] = []
    for rank, (events, origin) in enumerate(zip(by_rank, origins, strict=True)):
        found += _rank_trace(rank, events, origin, op)
    clock = "one clock of all ranks" if one_clock else "each rank since its own call"
    return {
        "traceEvents": found,
        "displayTimeUnit": "ns",
        "otherData": {"title": title, "clock": clock},
    }


def write_trace(
    by_rank: Sequence[Sequence[ChunkEvent]],
    path: Path,
    *,
    title: str,
    one_clock: bool,
    op: str = ALL_GATHER_MATMUL,
) -> None:
    """Writes `trace` as JSON and makes the folder of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(by_rank, title=title, one_clock=one_clock, op=op)) + "\n")


def _rank_trace(
    rank: int, events: Sequence[ChunkEvent], origin: int, op: str
) -> list[dict[str, Any]]:
    words = _WORDS[op]

    def us(ns: int) -> float:
        return (ns - origin) / 1e3

    sms = _threads(events)
    by_sm = all("sm" in e for e in events)
    name_of = {sm: f"SM {sm}" if by_sm else f"lane {sm}" for sm in sms}
    names = {0: words.marks} | {sm + 1: name for sm, name in name_of.items()}
    waits_tid = max(names) + 1  # of those after the tile
    for sm, tiles in sms.items():
        if any("wait_end_ns" in e for e in tiles):
            names[waits_tid + sm] = f"{name_of[sm]}, own tiles"
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for tid in sorted(names):
        place = {"pid": rank, "tid": tid}
        found.append({"ph": "M", "name": "thread_name", **place, "args": {"name": names[tid]}})
        found.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}})
    arrivals: dict[int, ChunkEvent] = {}
    for e in events:
        if e["arrived_ns"] >= arrivals.get(e["chunk"], e)["arrived_ns"]:
            arrivals[e["chunk"]] = e
    for chunk, e in sorted(arrivals.items(), key=lambda item: item[1]["arrived_ns"]):
        marked = words.own_marked if e["source"] == rank else words.marked
        found.append(
            {
                "ph": "i",
                "s": "t",
                "cat": "arrival",
                "name": f"{_chunk_name(chunk, e['source'], rank)} {marked}",
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
            begin, end = _wait(e)
            if begin < end:
                is_after = "wait_end_ns" in e
                what = "the others' sums" if is_after else f"chunk {e['chunk']}"
                found.append(
                    {
                        "ph": "X",
                        "cat": "wait",
                        "name": f"wait for {what}",
                        "pid": rank,
                        "tid": waits_tid + sm if is_after else sm + 1,
                        "ts": us(begin),
                        "dur": (end - begin) / 1e3,
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
    return max(max(e["end_ns"], e["arrived_ns"], e.get("wait_end_ns", 0)) for e in events)


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
        waits = [_wait(e) for e in mine if _waited(e)]
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
    axes.yaxis.set_major_formatter(
        FixedFormatter([_chunk_name(c, sources[c], rank) for c in lanes])
    )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    last = x(_last_ns(events))
    first = min(0.0, *(x(ns) for ns in arrived.values()))  # a peer may have called earlier
    axes.set_xlim(left=first - 0.01 * last, right=last * 1.02 or 1.0)
    figures.strip(axes, grid="x")


def _wait(e: ChunkEvent) -> tuple[int, int]:
    """Begin and end; the same where it did not wait."""
    end = e.get("wait_end_ns", e["start_ns"])
    return e.get("wait_begin_ns", end), end


def _waited(e: ChunkEvent) -> bool:
    begin, end = _wait(e)
    return begin < end


def _legend(
    figure: Figure, by_rank: Sequence[Sequence[ChunkEvent]], *, columns: int, op: str
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = _WORDS[op]
    handles: list[Any] = [Patch(color="#888888", label=words.bars)]
    if any(_waited(e) for events in by_rank for e in events):
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
