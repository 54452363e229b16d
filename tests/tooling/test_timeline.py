"""The picture of the overlap and the share of time waited."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agmm import _core
from agmm.bench import figures, launcher, record
from agmm.bench.figures import PlotUnavailable
from agmm.bench.timeline import ChunkEvent, waited_share
from agmm.bench.timeline_picture import draw, draw_ranks
from agmm.bench.timeline_trace import trace
from agmm.cli import demo
from agmm.errors import InvalidArgument
from agmm.planning.problems import KernelConfig

SCATTER = "matmul_reduce_scatter"


def _event(chunk: int, arrived: int, start: int, end: int) -> ChunkEvent:
    return {
        "chunk": chunk,
        "source": chunk,
        "arrived_ns": arrived,
        "start_ns": start,
        "end_ns": end,
    }


BUSY = [_event(0, 1_000, 1_000, 3_000), _event(1, 2_000, 3_000, 5_000)]
IDLE = [_event(0, 1_000, 1_000, 2_000), _event(1, 4_000, 4_000, 5_000)]
TILES: list[ChunkEvent] = [
    {**_event(0, 0, 1_000, 3_000), "wait_begin_ns": 1_000, "sm": 7, "row": 0, "column": 0},
    {**_event(0, 0, 1_000, 4_500), "wait_begin_ns": 1_000, "sm": 9, "row": 0, "column": 1},
    {**_event(1, 3_800, 4_000, 6_500), "wait_begin_ns": 3_000, "sm": 7, "row": 1, "column": 0},
]
OVERLAPPING = [
    _event(0, 0, 0, 60),
    _event(0, 0, 10, 50),
    _event(1, 0, 40, 80),
    _event(1, 0, 90, 100),
]


@pytest.mark.parametrize(("events", "share"), [(BUSY, 0.0), (IDLE, 0.5), (OVERLAPPING, 0.1)])
def test_waited_share(events: list[ChunkEvent], share: float) -> None:
    assert waited_share(events) == pytest.approx(share)
    assert waited_share(events[::-1]) == pytest.approx(share)


def _called(events: list[ChunkEvent], called_ns: int) -> list[ChunkEvent]:
    return [{**e, "called_ns": called_ns} for e in events]


@pytest.mark.parametrize(
    ("events", "called_ns", "share"), [(BUSY, 1_000, 0.0), (BUSY, 0, 0.2), (IDLE, 0, 0.6)]
)
def test_waiting_counts_from_the_call(
    events: list[ChunkEvent], called_ns: int, share: float
) -> None:
    assert waited_share(_called(events, called_ns)) == pytest.approx(share)


@pytest.mark.parametrize(("one_clock", "first"), [(True, 3.0), (False, 1.0)])
def test_times_count_from_the_call(one_clock: bool, first: float) -> None:
    later = [{**e, **{k: e[k] + 2_000 for k in e if k.endswith("_ns")}} for e in _called(BUSY, 0)]
    found = trace([_called(BUSY, 0), later], title="t", one_clock=one_clock)
    assert min(e["ts"] for e in _of_rank(found, 0, "X")) == 1.0
    assert min(e["ts"] for e in _of_rank(found, 1, "X")) == first


@pytest.mark.parametrize(("events", "name"), [(_called(IDLE, 0), "call"), (IDLE, "first event")])
def test_pictures_begin_with_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, events: list[ChunkEvent], name: str
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    draw(events, tmp_path / "x.png", title="t")
    draw_ranks([events, events], tmp_path / "x.png", title="t", one_clock=False)
    draw_ranks([events, events], tmp_path / "x.png", title="t", one_clock=True)
    labels = [figure.axes[-1].get_xlabel() for figure in drawn]
    first = name if name.startswith("first") else f"first {name}"
    assert labels == [
        f"time on rank 0 since the {name} (µs)",
        f"time since the rank's {name} (µs)",
        f"time since the {first} of all ranks (µs)",
    ]
    begin = 1.0 if name == "call" else 0.0
    for figure in drawn:
        # The first bar of the first lane begins where its event does, in µs after the origin.
        bars = [c for c in figure.axes[0].collections if c.get_paths()]
        assert min(c.get_paths()[0].vertices[:, 0].min() for c in bars) == pytest.approx(begin)


def test_what_arrived_before_the_call_is_in_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    early = [_event(0, 1_000, 1_000, 3_000), _event(1, 400, 3_000, 5_000)]
    draw(_called(early, 1_000), tmp_path / "x.png", title="t")
    assert drawn[0].axes[0].get_xlim()[0] < -0.6


def test_no_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="events: found none"):
        waited_share([])
    with pytest.raises(ValueError, match="events: found none"):
        draw([], tmp_path / "x.png", title="t")


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "overlap.png"
    draw(OVERLAPPING, path, title="t", rank=1)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ranks", "one_clock"), [(1, True), (2, False), (5, True)])
def test_picture_of_all_ranks_is_written(tmp_path: Path, ranks: int, one_clock: bool) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "overlap.png"
    draw_ranks([TILES] * ranks, path, title="t", one_clock=one_clock)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="found none of some rank"):
        draw_ranks([TILES, []], path, title="t", one_clock=one_clock)


def _of_rank(found: dict[str, Any], rank: int, phase: str) -> list[dict[str, Any]]:
    return [e for e in found["traceEvents"] if e["pid"] == rank and e["ph"] == phase]


def _thread_names(found: dict[str, Any], rank: int) -> dict[int, str]:
    named = (e for e in _of_rank(found, rank, "M") if e["name"] == "thread_name")
    return {e["tid"]: e["args"]["name"] for e in named}


def test_trace_has_a_process_per_rank_and_a_thread_per_sm() -> None:
    found = json.loads(json.dumps(trace([TILES, TILES], title="t", one_clock=False)))
    assert found["otherData"]["title"] == "t"
    for rank in (0, 1):
        names = _thread_names(found, rank)
        assert names == {0: "chunk arrivals", 8: "SM 7", 10: "SM 9"}
        spans = [
            (names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in _of_rank(found, rank, "X")
        ]
        assert spans == [
            ("SM 7", "chunk 0 tile 0, 0", 1.0, 2.0),
            ("SM 7", "wait for chunk 1", 3.0, 1.0),
            ("SM 7", "chunk 1 tile 1, 0", 4.0, 2.5),
            ("SM 9", "chunk 0 tile 0, 1", 1.0, 3.5),
        ]
    arrivals = [(e["name"], e["ts"], e["tid"]) for e in _of_rank(found, 1, "i")]
    assert arrivals == [("chunk 0, rank 0 arrived", 0.0, 0), ("chunk 1 (own) arrived", 3.8, 0)]


def _scattered(chunk: int, start: int, done: int, *, rank: int = 1, sm: int = 7) -> ChunkEvent:
    """A tile of 1 µs of loads that is computed 0.5 µs later."""
    found = {**_event(chunk, done, start, start + 1_000), "called_ns": 0, "sm": sm}
    found["computed_ns"] = start + 1_500
    if chunk == rank:
        found |= {"wait_begin_ns": start + 1_500, "wait_end_ns": done}
    return found


SCATTERED = [
    _scattered(2, 1_000, 3_000),
    _scattered(0, 2_000, 4_000),
    _scattered(2, 1_000, 3_500, sm=8),
    _scattered(1, 3_000, 9_500),
    _scattered(1, 4_000, 9_000, sm=8),
]


def test_trace_of_a_scatter_has_waits_beside_the_tiles() -> None:
    both = trace([SCATTERED, SCATTERED], title="t", one_clock=True, op=SCATTER)
    names = _thread_names(both, 1)
    assert [names[tid] for tid in sorted(names)] == [
        "chunks sent",
        "SM 7",
        "SM 8",
        "SM 7, own tiles",
        "SM 8, own tiles",
    ]
    waits = [
        (names[e["tid"]], e["name"], e["ts"], e["dur"])
        for e in _of_rank(both, 1, "X")
        if e["cat"] == "wait"
    ]
    assert waits == [
        ("SM 7, own tiles", "wait for the others' sums", 4.5, 5.0),
        ("SM 8, own tiles", "wait for the others' sums", 5.5, 3.5),
    ]
    marks = [(e["name"], e["ts"]) for e in _of_rank(both, 1, "i")]
    assert marks == [
        ("chunk 2, rank 2 sent", 3.5),
        ("chunk 0, rank 0 sent", 4.0),
        ("chunk 1 (own) has all sums", 9.5),
    ]


def test_picture_of_a_scatter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    path = tmp_path / "x.png"
    draw_ranks([SCATTERED] * 2, path, title="t", one_clock=True, op=SCATTER)
    (figure,) = drawn
    lanes = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert lanes == ["chunk 2, rank 2", "chunk 0, rank 0", "chunk 1 (own)"]
    dashed = [line for line in figure.axes[1].get_lines() if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [5.5]  # the last tile is computed
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "chunk sent; own: all sums here" in words
    # 1 to 5 µs of the 9.5 until the last sum was there.
    assert waited_share(SCATTERED) == pytest.approx(5.5 / 9.5)
    assert "58% of the time waiting" in figure.axes[1].get_title(loc="left")


@pytest.mark.parametrize("rows", [70, 9000])
def test_records_of_a_scatters_tiles(rows: int) -> None:
    """Each tile's own record, also where a call is made in several launches."""
    config = KernelConfig.parse("128x128x64_1x1_pingpong_timed")
    world_size, rank, n = 3, 1, 200
    launches = _core.scatter_steps(rank, world_size, world_size * rows, n, config.core)
    assert len(launches) == (1 if rows == 70 else 4)
    tiles = [step for steps in launches for step in steps if step[4] >= 0]
    size = _core.SCATTER_TIMES_BYTES // 8
    times = (10 * torch.arange(len(tiles)).view(-1, 1) + torch.arange(size)).view(torch.uint8)
    found = record.decode_scatter_times(times, launches, world_size, config, 77)
    places = {(e["chunk"], e["row"], e["column"]) for e in found}
    assert len(places) == len(found) == len(tiles) == world_size * 2 * -(-rows // 128)
    assert sorted(e["start_ns"] for e in found) == [10 * i for i in range(len(tiles))]
    for e in found:
        keys = ("end_ns", "computed_ns", "done_ns", "sm")
        assert [e[key] - e["start_ns"] for key in keys] == [1, 2, 3, 4]
        assert e["called_ns"] == 77


@pytest.mark.parametrize(("one_clock", "first"), [(True, 0.01), (False, 0.0)])
def test_ranks_have_their_own_origin_unless_they_share_a_clock(
    one_clock: bool, first: float
) -> None:
    later = [{**e, **{k: e[k] + 10 for k in e if k.endswith("_ns")}} for e in OVERLAPPING]
    found = trace([OVERLAPPING, later], title="t", one_clock=one_clock)
    assert min(e["ts"] for e in _of_rank(found, 0, "X")) == 0.0
    assert min(e["ts"] for e in _of_rank(found, 1, "X")) == pytest.approx(first)


def test_tiles_of_unknown_sms_do_not_overlap_in_a_lane() -> None:
    found = trace([OVERLAPPING], title="t", one_clock=True)
    assert _thread_names(found, 0) == {0: "chunk arrivals", 1: "lane 0", 2: "lane 1", 3: "lane 2"}
    for lane in (1, 2, 3):
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in _of_rank(found, 0, "X") if e["tid"] == lane
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"pip install 'agmm\[plot\]'"):
        draw(BUSY, tmp_path / "x.png", title="t")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_projection_suits_the_ranks(device: str, world_size: int) -> None:
    shape = demo.projection_shape(device, world_size)
    assert shape.M % world_size == 0
    assert shape.N % 8 == 0
    assert shape.K % 8 == 0
    if device == "cuda":
        assert (shape.M // world_size) % 128 == 0
        assert abs(shape.M - demo.TOKENS) <= 128 * world_size
        assert shape.N * world_size >= demo.QKV_WIDTH


def test_demo_needs_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert launcher.choose("auto", None) == ("cpu", 4)
    assert launcher.choose("auto", 3) == ("cpu", 3)
    with pytest.raises(InvalidArgument, match="device: found cuda, wanted cpu"):
        launcher.choose("cuda", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launcher.choose("auto", None) == ("cuda", 2)
    assert launcher.choose("auto", 3) == ("cpu", 3)
    with pytest.raises(InvalidArgument, match="world size: found 3, wanted 1 to 2"):
        launcher.choose("cuda", 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert launcher.choose("auto", None) == ("cuda", 4)
    assert launcher.choose("auto", 8) == ("cuda", 8)
