"""The benchmark of a transformer block, on CPU ranks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    "--device cpu --world-size 2 --hidden 64 --ffn 48 --heads 4 --kv-heads 2 "
    "--samples 2 --tokens 8,16"
)


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package; its modules are attributes of it."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for name in ("__main__", "model", "problem", "ways"):
        importlib.import_module(f"benchmarks.block.{name}")
    return importlib.import_module("benchmarks.block")


def test_report(block: Any, tmp_path: Path) -> None:
    path = tmp_path / "block.json"
    program = Typer()
    program.command()(block.__main__.main)
    done = CliRunner().invoke(program, [*SMALL.split(), "--json", str(path)])
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text())
    assert {"date", "commit", "machine", "settings"} <= report.keys()
    assert report["settings"]["block"] == {"hidden": 64, "ffn": 48, "heads": 4, "kv_heads": 2}
    passes = ("forward", "forward + backward")
    found = [(entry["tokens"], entry["pass"]) for entry in report["shapes"]]
    assert found == [(tokens, which) for tokens in (8, 16) for which in passes]
    for entry in report["shapes"]:
        assert list(entry["ways"]) == ["nccl", "agmm"]
        for result in entry["ways"].values():
            assert result["median_us"] > 0 and len(result["samples_us"]) == 2
            assert result["reason"] is None and result["relative_error"] < 1e-5
    assert "8 tokens" in done.stdout and "summary" in done.stdout
    assert done.stderr.startswith("[1/2] 16 tokens: 2 ways\n")


def test_what_cannot_run_is_refused(block: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^way: found 'agmm-graph', wanted one of nccl, agmm"
    ):
        block.ways.select_ways(["agmm-graph"], "cpu", False)
    with pytest.raises(InvalidArgument, match=r"^kv_heads: found 3, wanted a multiple of 2 ranks"):
        block.model.Sizes(64, 48, 6, 3).check(2)
    settings = block.problem.Settings(
        "cpu", block.model.Sizes(64, 48, 4, 2), ("nccl",), 1, True, False, 0.0
    )
    with pytest.raises(InvalidArgument, match=r"^tokens: found 7, wanted a multiple of 2 ranks"):
        block.__main__.run(settings, 2, [7], print)


def test_quick_leaves_out_what_is_compiled(block: Any) -> None:
    found = block.ways.select_ways(None, "cuda", True)
    assert found == ("nccl", "nccl-graph", "agmm", "agmm-graph")
    assert len(block.ways.select_ways(None, "cuda", False)) == 8


def test_ways_that_fail_are_left_out_on_all_ranks(
    rank_pools: Callable[..., RankPool], block: Any
) -> None:
    import block_work

    for found in rank_pools(2).run(block_work.checks):
        assert found["right"]["reason"] is None and found["right"]["has_call"]
        assert found["broken"]["reason"] == "rank 1: RuntimeError: no such kernel"
        assert found["wrong"]["wrong"] and "ffn_norm.weight" in found["wrong"]["reason"]
        assert found["stale"]["wrong"] and found["stale"]["relative_error"] is None
        assert not any(found[name]["has_call"] for name in ("broken", "wrong", "stale"))
