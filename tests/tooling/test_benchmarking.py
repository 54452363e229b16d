"""The harness: which ways run, what is checked before it is timed, and what the report says."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from agmm.bench import measure, reports
from agmm.bench.measure import WayResult
from agmm.bench.options import Options
from agmm.bench.way import Result, Way, Workload, as_graph
from agmm.bench.ways import WAYS, select_ways
from agmm.cli import report_tables
from agmm.errors import InvalidArgument
from agmm.planning.shapes import Shape
from agmm.testing.cases import BENCH_SHAPES

SHAPE = Shape(16, 8, 32)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _raises(p: Workload) -> Callable[[], Result]:
    raise RuntimeError("cannot do this shape\nsecond line")


def _leaves_a_hole(p: Workload) -> Callable[[], Result]:
    out = torch.empty(p.shape.M, p.shape.N)

    def call() -> Result:
        out[1:] = p.operands.A[1:] @ p.operands.B
        return None, out

    return call


def _off_by_a_little(p: Workload) -> Callable[[], Result]:
    return lambda: (None, p.operands.A @ p.operands.B * 1.001)


def _wrong_A(p: Workload) -> Callable[[], Result]:
    return lambda: (p.operands.A.flip(0), p.operands.A @ p.operands.B)


def _right(p: Workload) -> Callable[[], Result]:
    return lambda: (p.operands.A.clone(), p.operands.A @ p.operands.B)


def test_only_right_ways_are_timed(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for prepare in (_raises, _leaves_a_hole, _off_by_a_little, _wrong_A, _right):
        way = Way(prepare.__name__, prepare.__name__, prepare, on_cpu=True)
        monkeypatch.setitem(WAYS, way.name, way)
    names = ["_raises", "_leaves_a_hole", "_off_by_a_little", "_wrong_A", "_right"]
    options = Options("cpu", 1, (SHAPE,), names, samples=3).resolved()
    ways = measure.measure(SHAPE, options)["ways"]
    assert list(ways) == ["roof", *names]
    assert {n for n, w in ways.items() if w["median_us"] is not None} == {"roof", "_right"}
    assert {n for n, w in ways.items() if w["wrong"]} == set(names[1:4])
    assert ways["_raises"]["reason"] == "rank 0: RuntimeError: cannot do this shape"
    assert ways["_leaves_a_hole"]["reason"] == "a NaN or an infinity in the result"
    assert ways["_off_by_a_little"]["reason"].startswith("relative error 0.001, allowed")
    assert ways["_wrong_A"]["reason"] == "rank 0: the returned A is not the gathered A"
    assert len(ways["_right"]["samples_us"]) == 3
    assert ways["roof"]["ratio_to_roof"] == 1.0


@pytest.mark.parametrize("way", ["agmm", "agmm-A", "unfused"])
def test_ways_of_the_cpu_are_right(one_rank: None, way: str) -> None:
    options = Options("cpu", 1, (SHAPE,), [way], samples=2).resolved()
    result = measure.measure(SHAPE, options)["ways"][way]
    assert result["reason"] is None
    assert result["median_us"] > 0
    assert result["tflops"] == pytest.approx(SHAPE.flops(2) / result["median_us"] / 1e6)


@pytest.mark.parametrize(
    ("error", "wrong"), [(1e-3, False), (2e-3, True), (math.inf, True), (math.nan, True)]
)
def test_judge(error: float, wrong: bool) -> None:
    result = WayResult(relative_error=error)
    measure.judge(result, 1e-3)
    assert result.wrong is wrong
    assert (result.reason is not None) is wrong


def test_ways_are_chosen_by_name() -> None:
    assert select_ways(["agmm", "agmm"], "cpu") == ["roof", "agmm"]
    assert select_ways(None, "cuda") == list(WAYS)
    assert select_ways(None, "cpu") == ["roof", "unfused", "agmm", "agmm-A"]
    with pytest.raises(InvalidArgument, match=r"found 'torch-nativ'.*did you mean 'torch-native'"):
        select_ways(["torch-nativ"], "cuda")
    with pytest.raises(InvalidArgument, match="found 'torch-native', which needs GPUs"):
        select_ways(["torch-native"], "cpu")


def test_defaults_by_device() -> None:
    cuda = Options("cuda").resolved()
    assert (cuda.shapes, cuda.dtype) == (BENCH_SHAPES, torch.bfloat16)
    cpu = Options("cpu").resolved()
    assert cpu.dtype == torch.float32
    with pytest.raises(InvalidArgument, match="found 18x8x8, wanted an M that is a multiple of"):
        Options("cpu", 4, [Shape(18, 8, 8)]).resolved()


def _report(**times: float | None) -> dict[str, Any]:
    ways = {}
    for key, value in times.items():
        result = WayResult(median_us=value, samples_us=[] if value is None else [value])
        if value is None:
            result.reason = "rank 2: RuntimeError: [no] such thing"
        ways[key.replace("_", "-")] = vars(result)
    report = reports.new_report(Options("cpu", 2).resolved())
    report["shapes"].append({"M": 16, "N": 8, "K": 32, "sm_clock_mhz": None, "ways": ways})
    return report


def test_summary_compares_with_the_best_of_the_others() -> None:
    report = _report(roof=100.0, unfused=200.0, unfused_graph=150.0, agmm=110.0, agmm_A=90.0)
    summary = reports.summarize(report["shapes"][0])
    assert (summary.best_other, summary.best_other_us) == ("unfused-graph", 150.0)
    assert summary.agmm_ratio == pytest.approx(1.1)
    assert summary.speedup == pytest.approx(150 / 110)
    assert summary.agmm_graph is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alone", "epilogues", "few_rows", "gemm", "scatter"])
def test_benchmarks_of_a_gpu_say_that_there_is_none(name: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    process = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (1, "found no GPU, wanted one\n")


def test_summary_of_nothing() -> None:
    summary = reports.summarize(_report(roof=None, agmm=None)["shapes"][0])
    assert (summary.roof, summary.best_other, summary.speedup) == (None, None, None)


def test_report_reads_well_in_a_file_and_as_json(tmp_path: Path) -> None:
    report = _report(roof=100.0, unfused=None, agmm=123.4)
    report["shapes"][0]["ways"]["agmm"]["wrong"] = True
    report["commit"] = None
    out = io.StringIO()
    report_tables.render(report, Console(file=out, width=160))
    text = out.getvalue()
    assert "M x N x K = 16 x 8 x 32" in text
    assert "rank 2: RuntimeError: [no] such thing" in text
    assert "WRONG" in text
    assert "100.0" in text
    assert "None" not in text
    path = tmp_path / "results" / "r.json"
    reports.write_json(report, path)
    read = json.loads(path.read_text())
    assert read["shapes"][0]["ways"]["agmm"]["samples_us"] == [123.4]
    assert {"gpus", "driver", "cuda", "torch", "nccl", "agmm"} <= read["machine"].keys()
    assert read["settings"]["world_size"] == 2
    assert reports.wrong_ways(report) == ["agmm at 16x8x32"]


def test_commit_can_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGMM_COMMIT", "abc123")
    assert reports.commit() == "abc123"
    monkeypatch.delenv("AGMM_COMMIT")
    monkeypatch.chdir(tmp_path)
    assert reports.commit() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another project"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    assert reports.commit() is None


def test_a_graph_keeps_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what is in no result too, such as the product before a reduce-scatter: freed, its
    memory was others', or none at all."""
    for name in ("Stream", "stream", "current_stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())

    class Scratch:
        pass

    made: list[weakref.ref[Scratch]] = []

    def prepare(problem: Workload) -> Callable[[], Result]:
        scratch, out = Scratch(), torch.zeros(1)
        made.append(weakref.ref(scratch))

        def call() -> Result:
            assert scratch is not None
            return None, out

        return call

    problem: Any = None
    replay = as_graph(prepare)(problem)
    assert made[0]() is not None
    assert replay()[1].shape == (1,)
    del replay
    assert made[0]() is None
