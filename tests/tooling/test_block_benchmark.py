"""The benchmark of a transformer block, on CPU ranks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchrun
from typer import Typer
from typer.testing import CliRunner

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.testing.ranks import RankPool

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    "--device cpu --world-size 2 --hidden 64 --ffn 48 --heads 4 --kv-heads 2 "
    "--samples 2 --tokens 8,16"
)
SIZES = {
    None: "--ffn 48 --heads 4 --kv-heads 2",
    "rowwise": "--ffn 64 --heads 4 --kv-heads 2",  # of a rank multiples of 16
}


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package; its modules are attributes of it."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for name in ("__main__", "model", "problem", "ways"):
        importlib.import_module(f"benchmarks.block.{name}")
    return importlib.import_module("benchmarks.block")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "most"), [(None, 1e-5), ("rowwise", 0.2)], ids=str)
def test_report(block: Any, tmp_path: Path, recipe: str | None, most: float) -> None:
    path = tmp_path / "block.json"
    program = Typer()
    program.command()(block.__main__.main)
    sizes = SMALL.replace("--ffn 48 --heads 4 --kv-heads 2", SIZES[recipe])
    options = [] if recipe is None else ["--fp8", recipe]
    done = CliRunner().invoke(program, [*sizes.split(), *options, "--json", str(path)])
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text())
    assert {"date", "commit", "machine", "settings"} <= report.keys()
    assert report["settings"]["block"]["hidden"] == 64
    assert report["settings"]["fp8"] == recipe
    assert ("in fp8" in done.stdout) == (recipe is not None)
    passes = ("forward", "forward + backward")
    found = [(entry["tokens"], entry["pass"]) for entry in report["shapes"]]
    assert found == [(tokens, which) for tokens in (8, 16) for which in passes]
    for entry in report["shapes"]:
        assert list(entry["ways"]) == ["nccl", "agmm"]
        for result in entry["ways"].values():
            assert result["median_us"] > 0 and len(result["samples_us"]) == 2
            assert result["reason"] is None and result["relative_error"] < most
            assert (result["relative_error"] > 1e-3) == (recipe is not None)
    assert "8 tokens" in done.stdout and "summary" in done.stdout
    assert done.stderr.startswith("[1/2] 16 tokens: 2 ways\n")


def test_recipes_are_those_of_the_layers(block: Any) -> None:
    found = {recipe.value for recipe in block.__main__.Recipe}
    assert found == fp8_recipe.RECIPES.keys() - {"tensorwise"}


@pytest.mark.slow
def test_step_of_fsdp(tmp_path: Path) -> None:
    """Beside the backend's, with its gradients."""
    path = tmp_path / "fsdp.json"
    program = [str(REPOSITORY / "benchmarks" / "fsdp.py"), "--samples", "1", "--json", str(path)]
    done = torchrun.run(tmp_path, ["--nproc-per-node=2"], program)
    assert done.returncode == 0, done.stderr
    assert "backend ÷ agmm" in done.stdout
    (entry,) = json.loads(path.read_text())["shapes"]
    assert all(way["median_us"] > 0 for way in entry["ways"].values())
    assert entry["ways"]["agmm"]["relative_error"] <= 1e-6


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


@pytest.mark.slow
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
