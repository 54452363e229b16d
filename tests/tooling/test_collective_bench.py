"""`agmm bench` and `agmm explain` of collectives: shapes, ways and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agmm.bench import measure, reports, runner
from agmm.bench.collective_ways import COLLECTIVE_WAYS
from agmm.bench.options import Options
from agmm.bench.presets import ShapeOptions
from agmm.bench.way import Result, Workload
from agmm.cli.app import app
from agmm.errors import InvalidArgument
from agmm.planning.problems import COLLECTIVES, UNDIVIDED
from agmm.planning.shapes import Shape, TensorShape, shape_from


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _lacks_a_row(p: Workload) -> Callable[[], Result]:
    call = COLLECTIVE_WAYS[p.op]["agmm"].prepare(p)

    def wrong() -> Result:
        _, out = call()
        out[0] = 0
        return None, out

    return wrong


def _measured(*given: Any) -> dict[str, Any]:
    """Measures in a rank, where the backend's way is wrong with one shape."""
    _, shape, options = given
    if shape.K == 40:
        ways = COLLECTIVE_WAYS[options.op]
        ways["backend"] = replace(ways["backend"], prepare=_lacks_a_row)
    return measure.measure_watched(*given)


@pytest.mark.parametrize(
    "op",
    [COLLECTIVES[0], *(pytest.param(op, marks=pytest.mark.slow) for op in COLLECTIVES[1:])],
)
def test_right_ways_are_timed_and_wrong_ones_found(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(runner, "measure_watched", _measured)
    shapes = [TensorShape(5 if op in UNDIVIDED else 6, 24), TensorShape(8, 40)]
    report = runner.run(Options("cpu", 2, shapes, samples=2, op=op))
    assert [reports.shape_of(entry) for entry in report["shapes"]] == shapes
    for way in report["shapes"][0]["ways"].values():
        assert (way["reason"], way["wrong"], way["tflops"]) == (None, False, None)
        assert way["median_us"] > 0 and way["relative_error"] < 4e-7
    assert reports.wrong_ways(report) == [f"backend at {shapes[1]}"]


def test_tensors_are_named_by_shapes_model_or_extents(tmp_path: Path) -> None:
    wanted = [TensorShape(16, 8192), TensorShape(32, 8192)]
    (tmp_path / "shapes.txt").write_text("16x8192 # decoding\n32x8192\n")
    for given in (
        ShapeOptions("16x8192, 32x8192,16x8192"),
        ShapeOptions(file=tmp_path / "shapes.txt"),
        ShapeOptions(model="llama-3-70b", tokens="16..32"),
    ):
        assert given.read_tensors("all_reduce") == wanted
    assert ShapeOptions(extents=(16, None, 8192)).read_tensors("all_reduce") == wanted[:1]
    assert shape_from({"M": 16, "K": 8192, "ways": {}}) == wanted[0]
    assert shape_from({"M": 1, "N": 2, "K": 3, "ways": {}}) == Shape(1, 2, 3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("tune --op all_reduce --shapes 4x4", "op: found all_reduce, wanted one whose plans are"),
        ("bench --op all_reduce --plot pictures", "--op all_reduce: found it with --plot"),
        ("bench --op all_gather --timeline 4x4x4", "--op all_gather: found it with --timeline"),
        ("bench --op all_gather --dtype fp8 --device cpu", "found torch.float8_e4m3fn with all_g"),
        ("bench --op all_gather --shapes 5x4 --device cpu --tp 2", "shape: found 5x4, wanted an M"),
        ("bench --op all_gather --shapes 4x4x4 --device cpu --tp 2", "wanted MxK, e.g. 64x8192"),
        ("explain --op all_reduce --m 4 --n 4 --k 4 --tp 2", "n: found 4, wanted none for all_red"),
        ("explain --op all_reduce --m 4 --tp 2", "shape: found no --m or --k, wanted both for"),
        (
            "explain --op all_reduce --shapes 4x4 --routing even --tp 2",
            "routing: found 'even' with",
        ),
    ],
)
def test_what_collectives_have_not_is_refused_by_name(args: str, message: str) -> None:
    result = CliRunner().invoke(app, args.split(), prog_name="agmm")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_explanations_of_several_tensors() -> None:
    args = "explain --op all_reduce_rms_norm --shapes 64x8192,4096x8192 --tp 4 --gpu h200"
    result = CliRunner().invoke(app, args.split(), prog_name="agmm")
    said = " ".join(result.stdout.split())
    assert "64 x 8192 two_shot, with residual and norm in the same kernel" in said
    assert "4096 x 8192 NCCL, then an addition and torch's rms_norm" in said
    found = json.loads(CliRunner().invoke(app, [*args.split(), "--json"]).stdout)
    assert [one["m"] for one in found] == [64, 4096]
    assert all(one["predicted_us"] > 0 for one in found)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ("--shapes 16x8192x2048 --gpu h200", "one_shot, with residual and norm in the same kernel"),
        ("--m 16 --n 8192 --k 2048 --gpu h200", "µs, the product and the kernel of the sum"),
        ("--shapes 4096x8192x7168 --gpu h200", ", then an addition and torch's rms_norm"),
        ("--shapes 16x64x32 --gpu cpu", "shared memory, then an addition and torch's rms_norm"),
        ("--m 16 --n 8192 --k 64 --gpu h200 --dtype fp8", "dtype: found float8_e4m3fn with"),
    ],
)
def test_a_product_that_is_summed_and_normed_is_explained(args: str, wanted: str) -> None:
    named = f"explain --op matmul_all_reduce_rms_norm --tp 2 {args}"
    result = CliRunner().invoke(app, named.split(), prog_name="agmm")
    assert wanted in " ".join((result.stdout + result.stderr).split())


def test_one_shape_kind_has_no_unknown_fields() -> None:
    with pytest.raises(ValueError, match="wanted those of a shape"):
        shape_from({"M": 1})
    with pytest.raises(InvalidArgument, match="found none in --shapes, wanted MxK"):
        ShapeOptions(" , ").read_tensors("all_reduce")
