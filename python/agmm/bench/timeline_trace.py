"""Makes traces of timelines, to open in a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agmm.bench.timeline import WORDS, ChunkEvent, begin_ns, chunk_name, origins_of, wait_of
from agmm.planning.problems import ALL_GATHER_MATMUL


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
    origins = origins_of(by_rank, one_clock)
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
    words = WORDS[op]

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
                "name": f"{chunk_name(chunk, e['source'], rank)} {marked}",
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
            begin, end = wait_of(e)
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
    in_order = sorted(events, key=begin_ns)
    threads: dict[int, list[ChunkEvent]] = {}
    if all("sm" in e for e in events):
        for e in in_order:
            threads.setdefault(e["sm"], []).append(e)
        return threads
    for e in in_order:
        free = (i for i, tiles in threads.items() if tiles[-1]["end_ns"] <= begin_ns(e))
        threads.setdefault(next(free, len(threads)), []).append(e)
    return threads


def _tile_name(e: ChunkEvent) -> str:
    place = f" tile {e['row']}, {e['column']}" if "row" in e and "column" in e else ""
    return f"chunk {e['chunk']}{place}"
