"""`agmm bench` with real ranks on the CPU: a report that is compared and drawn, and timelines."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = [sys.executable, "-m", "agmm", "bench"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def test_run_compare_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, folder = str(tmp_path / "old.json"), tmp_path / "pictures"
    shapes = ["--device", "cpu", "--tp", "2", "--shapes", "16x8x24,32x8x24", "--samples", "5"]
    _run(*BENCH, *shapes, "--json", report)
    again = _run(*BENCH, *shapes, "--compare", report, "--plot", str(folder))
    assert "8 times in both" in again.stdout
    assert "not the same conditions" not in again.stdout
    for name in ("time_over_roof.png", "speedup.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"wrote {folder / name}" in again.stderr


def _is_sound(found: dict[str, Any], ranks: int) -> None:
    """A process per rank, an arrival and a multiplication per chunk, no two of them at once."""
    events = found["traceEvents"]
    assert {e["pid"] for e in events} == set(range(ranks))
    for rank in range(ranks):
        mine = [e for e in events if e["pid"] == rank]
        arrived = {e["args"]["chunk"]: e["ts"] for e in mine if e["ph"] == "i"}
        tiles = [e for e in mine if e["ph"] == "X" and e["cat"] == "tile"]
        spans = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: e["ts"])
        order = [e["args"]["chunk"] for e in sorted(tiles, key=lambda e: e["ts"])]
        assert order == [(rank + step) % ranks for step in range(ranks)]
        assert all(arrived[e["args"]["chunk"]] <= e["ts"] for e in tiles)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(spans))


def test_timelines_under_torchrun(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--timeline", "48x8x24,96x16x24", "--plot", str(tmp_path)]
    done = _run(*TORCHRUN, *BENCH[1:], *arguments)
    for shape in ("48x8x24", "96x16x24"):
        path = tmp_path / f"timeline-{shape}.json"
        assert done.stderr.count(f"wrote {path}") == 1
        _is_sound(json.loads(path.read_text()), 3)
        if "no picture" not in done.stderr:
            assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
