"""`agmm bench --op moe` and `agmm explain --op moe`: shapes, presets, ways and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import agmm

from agmm.bench import moe_presets, moe_ways, reports, runner
from agmm.bench.moe_ways import MOE_WAYS
from agmm.bench.options import Options
from agmm.bench.presets import ShapeOptions
from agmm.bench.way import Result, Workload
from agmm.errors import InvalidArgument
from agmm.planning.shapes import MoEShape, shape_from

SHAPE = MoEShape(24, 8, 16, 4, 2)


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
def test_every_way_is_right_on_cpu_ranks(dtype: torch.dtype) -> None:
    shapes = [SHAPE, SHAPE._replace(routing="zipf", k=4), MoEShape(2, 8, 16, 8, 1)]
    shapes.append(MoEShape(128, 32, 48, 8, 8))  # of many choices many sums are rounded
    report = runner.run(Options("cpu", 2, shapes, dtype=dtype, samples=2, op="moe"))
    on_cpu = [name for name, way in MOE_WAYS.items() if way.on_cpu]
    assert [reports.shape_of(entry) for entry in report["shapes"]] == shapes
    for entry in report["shapes"]:
        assert list(entry["ways"]) == on_cpu
        for way in entry["ways"].values():
            assert (way["reason"], way["wrong"]) == (None, False)
            assert way["median_us"] > 0 and way["relative_error"] < 3 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["rowwise", "block"])
def test_every_way_is_right_in_fp8(scaling: str) -> None:
    given: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "scaling": scaling, "op": "moe"}
    shapes = [MoEShape(24, 160, 144, 4, 2, "zipf"), MoEShape(2, 16, 16, 8, 1)]
    report = runner.run(Options("cpu", 2, shapes, samples=2, **given))
    for entry in report["shapes"]:
        assert list(entry["ways"]) == [name for name, way in MOE_WAYS.items() if way.on_cpu]
        for way in entry["ways"].values():
            assert (way["reason"], way["wrong"]) == (None, False)
            assert way["median_us"] > 0 and way["relative_error"] < 0.1


def test_the_roof_counts_the_flops_of_a_rank() -> None:
    assert SHAPE.flops(2) == 2 * 3 * (24 * 2 // 2) * 8 * 16


def _forgets_a_choice(p: Workload) -> Callable[[], Result]:
    call = MOE_WAYS["unfused"].prepare(p)

    def wrong() -> Result:
        _, out = call()
        out[0] = 0
        return None, out

    return wrong


def _measured(*given: Any) -> dict[str, Any]:
    """Measures in a rank, where a way is wrong."""
    from dataclasses import replace

    from agmm.bench import measure

    MOE_WAYS["unfused-sorted"] = replace(MOE_WAYS["unfused-sorted"], prepare=_forgets_a_choice)
    return measure.measure_watched(*given)


def test_a_wrong_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure_watched", _measured)
    ways = ["unfused-sorted", "agmm"]
    report = runner.run(Options("cpu", 2, [SHAPE], ways, samples=2, op="moe"))
    assert reports.wrong_ways(report) == [f"unfused-sorted at {SHAPE}"]


@pytest.mark.parametrize("routing", ["even", "zipf"])
def test_choices_are_different_experts_and_the_same_on_all_ranks(routing: str) -> None:
    shape = MoEShape(2000, 1, 1, 16, 4, routing)
    ids = moe_ways.drawn_ids(shape, 3)
    assert torch.equal(ids, moe_ways.drawn_ids(shape, 3))
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=16).sort(descending=True).values
    skew = counts[0] / counts[-1]
    assert skew < 1.3 if routing == "even" else skew > 4


def test_shapes_are_named_with_each_routing() -> None:
    given = ShapeOptions("24x8x16x4x2", routing="zipf,even")
    assert given.read_moe() == [SHAPE._replace(routing="zipf"), SHAPE]
    for model, sizes in moe_presets.MOE_MODELS.items():
        found = ShapeOptions(model=model, tokens="16..32").read_moe()
        assert found == [MoEShape(m, *sizes, r) for m in (16, 32) for r in ("even", "zipf")]
        assert all(shape.experts % ranks == 0 for shape in found for ranks in (2, 4, 8))
    assert shape_from({**SHAPE._asdict(), "ways": {}}) == SHAPE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24x8x16", "wanted TOKENSxHIDDENxINNERxEXPERTSxK, e.g. 8192x4096x14336x8x2"),
        ("24x8x16x2x4", "wanted no more choices than experts"),
    ],
)
def test_other_shapes_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ShapeOptions(text).read_moe()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("tune --op moe --shapes 4x4x4x4x2", "op: found moe, wanted one whose plans"),
        ("bench --op moe --plot pictures", "--op moe: found it with --plot"),
        ("bench --op moe --timeline 4x4x4", "--op moe: found it with --timeline"),
        (
            "bench --op moe --dtype fp8 --scaling tensorwise --device cpu --tp 2",
            "scaling: found 'tensorwise' with moe, wanted one of 'rowwise', 'block'",
        ),
        (
            "bench --op moe --dtype fp8 --shapes 4x16x8x4x2 --device cpu --tp 2",
            "wanted hidden and inner features that are multiples of 16",
        ),
        (
            "explain --op moe --shapes 4x16x16x4x2 --scaling block --tp 2",
            "scaling: found 'block' with bfloat16, wanted none, or float8_e4m3fn",
        ),
        ("bench --op moe --model llama-3-8b --device cpu --tp 2", "model: found 'llama-3-8b'"),
        (
            "bench --op moe --shapes 4x4x4x3x2 --device cpu --tp 2",
            "wanted experts that 2 ranks",
        ),
        ("bench --shapes 4x4x4 --routing even --device cpu --tp 2", "routing: found 'even' with"),
        ("bench --op moe --routing odd --device cpu --tp 2", "routing: found 'odd', wanted one of"),
        ("explain --op moe --m 4 --n 4 --k 4 --tp 2", "--m: found it with moe, wanted --shapes or"),
        (
            "explain --op moe --shapes 5x4x4x4x2 --tp 2",
            "tokens: found 5, wanted a multiple of",
        ),
    ],
)
def test_what_mixtures_have_not_is_refused_by_name(args: str, message: str) -> None:
    result = agmm(*args.split())
    assert result.returncode == 2, result.stderr
    assert message in " ".join(result.stderr.split())


def test_a_report_is_read_compared_and_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    common = ["bench", "--op", "moe", "--device", "cpu", "--tp", "2", "--samples", "5"]
    shapes = ["--shapes", "24x8x16x4x2", "--routing", "zipf", "--ways", "agmm"]
    result = agmm(*common, *shapes, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "24 x 8 x 16 x 4 x 2, zipf routing" in result.stdout
    assert shape_from(json.loads(path.read_text())["shapes"][0]) == SHAPE._replace(routing="zipf")
    again = agmm("bench", "--from", str(path), "--compare", str(path))
    assert again.returncode == 0 and "within noise" in again.stdout
    drawn = agmm("bench", "--from", str(path), "--plot", str(tmp_path))
    assert drawn.returncode == 2 and "wanted no report of moe" in " ".join(drawn.stderr.split())


def test_explain_says_who_serves_and_what_moves() -> None:
    given = ["explain", "--op", "moe", "--model", "mixtral-8x7b", "--tokens", "2048", "--tp", "4"]
    result = agmm(*given, "--gpu", "h200")
    assert result.returncode == 0, result.stderr
    for said in ("agmm brings the rows", "8 experts of 14336", "2 experts on a rank", "44%"):
        assert said in result.stdout
    (found,) = json.loads(agmm(*given, "--gpu", "cpu", "--json").stdout)
    assert found["plan"] == "agmm, through shared memory"


@pytest.mark.parametrize(
    ("scaling", "moved"),
    [
        ([], "fp8 rows with their scales"),  # of rows
        (["--scaling", "rowwise"], "a rank gets 8.03 MiB of tokens"),
        (["--scaling", "block"], "a rank gets 8.25 MiB of tokens"),
    ],
)
def test_explain_says_what_fp8_moves(scaling: list[str], moved: str) -> None:
    given = ["--shapes", "4096x4096x14336x8x2", "--tp", "2", "--dtype", "fp8", *scaling]
    said = " ".join(agmm("explain", "--op", "moe", *given).stdout.split())
    assert moved in said and "sums in bfloat16" in said
