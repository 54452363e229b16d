"""The times of a call: when each chunk arrived, or was sent, and when its tiles were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER

ChunkEvent = Mapping[str, int]
"""One chunk, or one tile of a chunk: 'chunk', 'source' (its rank) and, in ns of one clock,
'arrived_ns', 'start_ns' and 'end_ns'. Where known it also has 'wait_begin_ns', from which it was
awaited until 'start_ns'; 'sm', the multiprocessor; the tile's place, 'row' and 'column'; and
'called_ns', when the rank made the call: the origin of its times. Without it the origin is the
rank's first event.

In a matmul + reduce-scatter 'source' is the rank whose rows these are, and 'arrived_ns' when the
chunk's last tile had been sent; of the own chunk, when the last of the others' sums was there. An
own tile waited for them from 'wait_begin_ns' to 'wait_end_ns', after 'end_ns'. Where the
sum was computed at another time than 'end_ns', that is 'computed_ns'."""


class Words(NamedTuple):
    """The words for an op in legends and traces."""

    bars: str
    wait: str
    mark: str
    marked: str
    """What the mark means at a chunk of another rank."""
    own_marked: str
    marks: str
    line: str


WORDS = {
    ALL_GATHER_MATMUL: Words(
        bars="computing its tiles (colour: source rank)",
        wait="a tile waiting for it",
        mark="chunk arrived",
        marked="arrived",
        own_marked="arrived",
        marks="chunk arrivals",
        line="all of A first found complete",
    ),
    MATMUL_REDUCE_SCATTER: Words(
        bars="computing its tiles (colour: owner)",
        wait="an own tile waiting for the others' sums",
        mark="chunk sent; own: all sums here",
        marked="sent",
        own_marked="has all sums",
        marks="chunks sent",
        line="the last tile computed",
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


def begin_ns(e: ChunkEvent) -> int:
    return min(e["start_ns"], e.get("wait_begin_ns", e["start_ns"]))


def first_ns(events: Sequence[ChunkEvent]) -> int:
    if all("called_ns" in e for e in events):
        return min(e["called_ns"] for e in events)
    return min(min(begin_ns(e), e["arrived_ns"]) for e in events)


def last_ns(events: Sequence[ChunkEvent]) -> int:
    return max(max(e["end_ns"], e["arrived_ns"], e.get("wait_end_ns", 0)) for e in events)


def origins_of(by_rank: Sequence[Sequence[ChunkEvent]], one_clock: bool) -> list[int]:
    origins = [first_ns(events) for events in by_rank]
    return [min(origins)] * len(origins) if one_clock else origins


def wait_of(e: ChunkEvent) -> tuple[int, int]:
    """Begin and end; the same where it did not wait."""
    end = e.get("wait_end_ns", e["start_ns"])
    return e.get("wait_begin_ns", end), end


def waited(e: ChunkEvent) -> bool:
    begin, end = wait_of(e)
    return begin < end


def chunk_name(chunk: int, source: int, rank: int) -> str:
    return f"chunk {chunk} (own)" if source == rank else f"chunk {chunk}, rank {source}"
