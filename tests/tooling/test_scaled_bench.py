"""`agmm bench` on fp8 operands, with real ranks on the CPU."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from agmm.bench import reports, runner, scaled_ways, ways
from agmm.bench.options import Options
from agmm.cli import report_tables
from agmm.errors import InvalidArgument
from agmm.planning.problems import OPS
from agmm.planning.shapes import Shape

E4M3 = torch.float8_e4m3fn
GATHER, SCATTER = OPS


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "scaling"),
    [
        (GATHER, "rowwise"),
        (GATHER, "block"),
        (SCATTER, "tensorwise"),
        (SCATTER, "block 1x128"),
    ],
)
def test_every_kind_of_scales(op: str, scaling: str) -> None:
    names = {
        GATHER: ["roof", "unfused", "agmm", "agmm-A"],
        SCATTER: ["roof", "unfused", "agmm", "agmm-fused"],
    }[op]
    shapes = [Shape(192, 128, 272)]  # the error of so many numbers hardly varies
    report = runner.run(Options("cpu", 3, shapes, samples=2, dtype=E4M3, scaling=scaling, op=op))
    (shape,) = report["shapes"]
    assert list(shape["ways"]) == names
    assert [w["reason"] for w in shape["ways"].values()] == [None] * 4
    assert all(0 < w["relative_error"] < 0.01 for w in shape["ways"].values())
    assert reports.where(report).endswith(f"float8_e4m3fn {scaling}, torch {torch.__version__}")
    console = Console(file=io.StringIO(), width=200)
    report_tables.render(report, console)
    assert isinstance(console.file, io.StringIO)
    assert f"float8_e4m3fn {scaling}; torch" in console.file.getvalue()


def test_ways_have_the_names_of_those_without_scales() -> None:
    for op in OPS:
        known = scaled_ways.ways_of(op, "rowwise")
        plain = ways.ways_of(op)
        assert {"roof", "unfused", "unfused-graph", "agmm", "agmm-graph"} <= known.keys()
        for name, way in known.items():
            assert (way.title, way.on_cpu) == (plain[name].title, plain[name].on_cpu)
            assert way.prepare is not plain[name].prepare
    assert scaled_ways.ways_of(GATHER, None) is ways.WAYS
    assert "torch-decomposed-A" in scaled_ways.ways_of(GATHER, "rowwise")
    assert "torch-fused" in scaled_ways.ways_of(SCATTER, "rowwise")


def test_options() -> None:
    assert Options("cpu", 2, dtype=E4M3).resolved().scaling == "rowwise"
    assert Options("cpu", 2).resolved().scaling is None
    for options, message in (
        (Options("cpu", 2, scaling="rowwise"), "scaling: found 'rowwise' with torch.float32"),
        (Options("cpu", 2, dtype=E4M3, scaling="row"), "scaling: found 'row', wanted one of"),
        (Options("cpu", 2, [Shape(4, 8, 24)], dtype=E4M3), "shape: found 4x8x24 with"),
        (
            Options("cpu", 2, dtype=E4M3, ways=["torch-native"]),
            "way: found 'torch-native', wanted one of roof",
        ),
    ):
        with pytest.raises(InvalidArgument, match=message):
            options.resolved()
