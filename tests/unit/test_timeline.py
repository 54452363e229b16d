"""The picture of the overlap and the share of time waited."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agmm import demo
from agmm.errors import InvalidArgument
from agmm.timeline import ChunkEvent, PlotUnavailable, draw, waited_share


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
    assert demo.choose("auto", None) == ("cpu", 4)
    assert demo.choose("auto", 3) == ("cpu", 3)
    with pytest.raises(InvalidArgument, match="device: found cuda, wanted cpu"):
        demo.choose("cuda", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert demo.choose("auto", None) == ("cuda", 2)
    assert demo.choose("auto", 3) == ("cpu", 3)
    with pytest.raises(InvalidArgument, match="world size: found 3, wanted 1 to 2"):
        demo.choose("cuda", 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert demo.choose("auto", None) == ("cuda", 4)
    assert demo.choose("auto", 8) == ("cuda", 8)
