"""`agmm bench` with real ranks on the CPU: a report that is compared and drawn, and timelines."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import bench_work
import pytest
import torchrun
from command import agmm

from agmm.bench import reports, runner
from agmm.bench.options import Options
from agmm.bench.ways import SCATTER_WAYS, WAYS
from agmm.planning.shapes import Shape

SCATTER = "matmul_reduce_scatter"
BENCH = [sys.executable, "-m", "agmm", "bench"]


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


LIMIT_S = 4.0


@pytest.fixture
def sick_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ways of `bench_work`, here and in the ranks."""
    monkeypatch.setattr(runner, "measure_watched", bench_work.measure_watched)
    with mock.patch.dict(WAYS), mock.patch.dict(SCATTER_WAYS):
        bench_work.add_sick_ways()
        yield


def _measured(report: dict[str, Any]) -> list[dict[str, str | None]]:
    """For each shape the reason why a way has no time, None where it has one, by way."""
    for shape in report["shapes"]:
        assert all(
            (way["median_us"] is None) == (way["reason"] is not None)
            for way in shape["ways"].values()
        )
    return [{name: w["reason"] for name, w in s["ways"].items()} for s in report["shapes"]]


_HUNG = "ranks 0, 1 did not come back from it within 4 s"
_ENDED = "rank 1 ended in it with exit code -9"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sick",
    [
        {"hangs-at-once": _HUNG, "ends-when-timed": _ENDED},
        {"ends-at-once": _ENDED, "hangs-when-timed": _HUNG},
    ],
    ids=",".join,
)
@pytest.mark.usefixtures("sick_ways")
def test_ways_that_break_the_ranks_are_left_out(sick: dict[str, str]) -> None:
    shapes = [Shape(8, 8, 8), bench_work.SICK_SHAPE, Shape(32, 8, 24)]
    first, second = sick
    ways = ["unfused", first, "agmm", second]
    options = Options("cpu", 2, shapes, ways, samples=3, limit_s=LIMIT_S)
    lines: list[str] = []
    report = runner.run(options, lines.append)
    sound: dict[str, str | None] = dict.fromkeys(["roof", *ways])
    assert _measured(report) == [sound, sound | sick, sound]
    assert list(report["shapes"][1]["ways"]) == ["roof", *ways]
    others = ["roof", "unfused", "agmm"]
    assert all(len(s["ways"][w]["samples_us"]) == 3 for s in report["shapes"] for w in others)
    assert [line for line in lines if "left out" in line] == [
        f"{bench_work.SICK_SHAPE}: left out {way}: {reason}" for way, reason in sick.items()
    ]


def test_a_shape_that_cannot_be_made_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agmm.bench.options.check_memory", lambda *arguments: None)
    too_large = Shape(2**40, 8, 2**10)
    options = Options("cpu", 2, [too_large, Shape(16, 8, 8)], ["agmm"], samples=3)
    large, small = _measured(runner.run(options))
    assert all(reason and "RuntimeError" in reason for reason in large.values())
    assert small == {"roof": None, "agmm": None}


@pytest.mark.slow
def test_a_way_that_hangs_under_torchrun_ends_the_job(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    arguments = ["bench", "--device", "cpu", "--samples", "3", "--limit", "4"]
    shapes = f"8x8x8,{bench_work.SICK_SHAPE}"
    sick = ["--ways", "agmm,hangs-when-timed", "--shapes", shapes]
    program = [bench_work.__file__, *arguments, *sick, "--json", str(report)]
    done = torchrun.run(tmp_path, ["--nproc-per-node=2"], program)
    assert done.returncode != 0
    assert "hangs-when-timed did not come back within 4 s" in done.stderr
    (shape,) = json.loads(report.read_text())["shapes"]
    assert shape["M"] == 8
    assert shape["ways"]["agmm"]["median_us"] > 0


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_run_compare_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, folder = str(tmp_path / "old.json"), tmp_path / "pictures"
    shapes = ["--device", "cpu", "--tp", "2", "--shapes", "16x8x24,32x8x24", "--samples", "5"]
    first = agmm("bench", *shapes, "--json", report)
    again = agmm("bench", *shapes, "--compare", report, "--plot", str(folder))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "8 times in both" in again.stdout
    assert "not the same conditions" not in again.stdout
    for what in ("time_over_roof", "speedup"):
        name = f"{what}-all_gather_matmul-cpu-x2-float32.png"
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"wrote {folder / name}" in again.stderr


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("matmul_all_reduce", ["roof", "unfused", "agmm", "agmm-fused"]),
        ("matmul_all_reduce_rms_norm", ["roof", "unfused", "agmm"]),
    ],
)
def test_ways_of_an_all_reduce(op: str, names: list[str]) -> None:
    """Its rows need not be a multiple of the ranks."""
    shapes = [Shape(1, 5, 7), Shape(31, 24, 16)]
    report = runner.run(Options("cpu", 2, shapes, samples=3, op=op))
    assert _measured(report) == [dict.fromkeys(names)] * 2


@pytest.mark.slow
def test_ways_of_a_scatter(tmp_path: Path) -> None:
    shapes = [Shape(6, 5, 7), Shape(96, 24, 16)]
    report = runner.run(Options("cpu", 3, shapes, samples=3, op=SCATTER))
    names = ["roof", "unfused", "agmm", "agmm-fused"]
    assert _measured(report) == [dict.fromkeys(names)] * 2
    for found, shape in zip(report["shapes"], shapes, strict=True):
        assert all(len(way["samples_us"]) == 3 for way in found["ways"].values())
        roof = found["ways"]["roof"]
        assert roof["tflops"] == pytest.approx(shape.flops(2) / roof["median_us"] / 1e6)
    reports.write_json(report, tmp_path / "r.json")
    assert reports.op_of(reports.read(tmp_path / "r.json")) == SCATTER


@pytest.mark.usefixtures("sick_ways")
def test_a_wrong_scatter_is_not_timed() -> None:
    names = ["lacks-a-rank", "sums-in-bf16", "agmm"]
    options = Options("cpu", 2, [Shape(64, 24, 16)], names, samples=3, op=SCATTER)
    (found,) = runner.run(options)["shapes"]
    ways = found["ways"]
    assert [name for name in names if ways[name]["wrong"]] == names[:2]
    assert all("relative error" in ways[name]["reason"] for name in names[:2])
    assert ways["agmm"]["median_us"] > 0 and ways["agmm"]["reason"] is None


def _is_sound(found: dict[str, Any], ranks: int) -> None:
    """A process per rank, an arrival and a multiplication per chunk, no two of them at once."""
    events = found["traceEvents"]
    assert {e["pid"] for e in events} == set(range(ranks))
    for rank in range(ranks):
        mine = [e for e in events if e["pid"] == rank]
        arrived = {e["args"]["chunk"]: e["ts"] for e in mine if e["ph"] == "i"}
        tiles = [e for e in mine if e["ph"] == "X" and e["cat"] == "tile"]
        spans = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: e["ts"])
        assert min(e["ts"] for e in mine if "ts" in e) >= 0.0  # nothing came before the first call
        assert arrived[rank] < min(e["ts"] for e in tiles)  # its own rows are there at its call
        order = [e["args"]["chunk"] for e in sorted(tiles, key=lambda e: e["ts"])]
        assert order == [(rank + step) % ranks for step in range(ranks)]
        assert all(arrived[e["args"]["chunk"]] <= e["ts"] for e in tiles)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(spans))


@pytest.mark.slow
def test_a_timeline_of_a_scatter(tmp_path: Path) -> None:
    ranks = 3
    arguments = ["--op", SCATTER, "--timeline", "48x8x24", "--plot", str(tmp_path), "--tp", "3"]
    done = _run(*BENCH, "--device", "cpu", *arguments)
    path = tmp_path / f"timeline-{SCATTER}-cpu-x3-48x8x24.json"
    assert f"wrote {path}" in done.stderr
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(ranks):
        mine = [e for e in events if e["pid"] == rank]
        assert min(e["ts"] for e in mine if "ts" in e) >= 0.0
        marks = {e["args"]["chunk"]: e for e in mine if e["ph"] == "i"}
        tiles = [e for e in mine if e["ph"] == "X" and e["cat"] == "tile"]
        order = [e["args"]["chunk"] for e in sorted(tiles, key=lambda e: e["ts"])]
        assert order == [(rank + step) % ranks for step in (1, 2, 0)]  # the own one last
        assert all(marks[e["args"]["chunk"]]["ts"] >= e["ts"] + e["dur"] - 1e-6 for e in tiles)
        assert marks[rank]["name"] == f"chunk {rank} (own) has all sums"
        (wait,) = (e for e in mine if e["ph"] == "X" and e["cat"] == "wait")
        own = next(e for e in tiles if e["args"]["chunk"] == rank)
        assert wait["name"] == "wait for the others' sums"
        assert own["ts"] + own["dur"] <= wait["ts"] + 1e-6
        assert wait["ts"] + wait["dur"] == pytest.approx(marks[rank]["ts"])
    if "no picture" not in done.stderr:
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_timelines_under_torchrun(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--timeline", "48x8x24,96x16x24", "--plot", str(tmp_path)]
    done = torchrun.run(tmp_path, ["--nproc-per-node=3"], ["-m", "agmm", "bench", *arguments])
    assert done.returncode == 0, done.stderr
    for shape in ("48x8x24", "96x16x24"):
        path = tmp_path / f"timeline-all_gather_matmul-cpu-x3-{shape}.json"
        assert done.stderr.count(f"wrote {path}") == 1
        _is_sound(json.loads(path.read_text()), 3)
        if "no picture" not in done.stderr:
            assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
