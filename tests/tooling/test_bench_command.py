"""The options of `agmm bench` beside the timing: shapes by model, --from, --compare, --plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agmm.bench import reports, runner
from agmm.bench.options import Options
from agmm.cli.app import app
from agmm.planning.shapes import Shape

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WAYS = str(RESULTS / "nvidia-h100-x4.json")
cli_runner = CliRunner()


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _bench(*arguments: str) -> Any:
    return cli_runner.invoke(app, ["bench", *arguments], prog_name="agmm")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options of each run, which times nothing."""
    found: list[Options] = []

    def run(options: Options, progress: Any, begun: Any, lost: Any) -> dict[str, Any]:
        found.append(options)
        return reports.new_report(options.resolved())

    monkeypatch.setattr(runner, "run", run)
    return found


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["--from", "/no/file"], ["/no/file cannot be read"]),
        (["--compare", "/no/file", "--device", "cpu"], ["/no/file cannot be read"]),
        (["--from", WAYS, "--shapes", "1x1x1"], ["found 1x1x1", "wanted one of 512x3584x8192"]),
        (["--from", WAYS, "--ways", "agm"], ["found 'agm'", "wanted one of roof"]),
        (["--from", WAYS, "--json", "x"], ["--from: found it with --json"]),
        (["--from", WAYS, "--op", "all_gather_matmul"], ["--from: found it with --op"]),
        (["--from", WAYS, "--model", "llama-3-8b"], ["--from: found it with --file or --model"]),
        (["--timeline", "8x8x8", "--ways", "agmm"], ["--timeline: found it with --ways"]),
        (["--timeline", "8x8x8", "--shapes", "8x8x8"], ["--timeline: found it with --shapes"]),
        (["--timeline", "8x8x8", "--from", WAYS], ["--timeline: found it with --from"]),
        (["--timeline", ",", "--device", "cpu"], ["found none in --timeline"]),
        (["--timeline", "9x8x8", "--device", "cpu"], ["found 9x8x8", "multiple of the world size"]),
        (["--model", "llama", "--device", "cpu"], ["found 'llama'", "llama-3-8b"]),
        (["--shapes", "8x8x8", "--file", "x", "--device", "cpu"], ["found 2 ways to name them"]),
        (["--tokens", "8", "--shapes", "8x8x8", "--device", "cpu"], ["found '8' without --model"]),
        (["--from", WAYS, "--plot", "/proc/agmm"], ["/proc/agmm cannot be made"]),
    ],
)
def test_typos_are_answered(arguments: list[str], hints: list[str], tmp_path: Path) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    result = _bench(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert len(result.output.splitlines()) == 1
    for hint in hints:
        assert hint in result.output


def test_ways_are_listed_by_op() -> None:
    scattered = _bench("--list", "--op", "matmul_reduce_scatter").output
    assert "matmul, then reduce-scatter" in scattered and "all-gather" not in scattered
    assert "all-gather, then matmul" in _bench("--list").output


def test_timelines_on_gpus_need_the_timed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = _bench("--timeline", "8x8x8", "--device", "cuda", "--dtype", "fp16")
    assert "found torch.float16, wanted torch.bfloat16" in result.output
    monkeypatch.setattr("agmm._core.kernel_facts", list)
    result = _bench("--timeline", "8x8x8", "--device", "cuda")
    assert result.output == ("agmm: timeline: found a build without the timed kernel, wanted one\n")


def test_shapes_by_model_and_file(runs: list[Options], tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tp", "2"]
    assert _bench(*arguments, "--model", "llama-3-8b", "--tokens", "64,128").exit_code == 0
    (tmp_path / "shapes.txt").write_text("8x8x8  # one\n\n16x8x8\n")
    assert _bench(*arguments, "--file", str(tmp_path / "shapes.txt")).exit_code == 0
    assert _bench(*arguments).exit_code == 0
    assert [options.shapes for options in runs] == [
        [Shape(m, n, 4096) for n in (3072, 14336) for m in (64, 128)],
        [Shape(8, 8, 8), Shape(16, 8, 8)],
        None,
    ]
    assert {options.world_size for options in runs} == {2}
    assert {options.limit_s for options in runs} == {120.0}
    assert _bench(*arguments, "--limit", "7.5").exit_code == 0
    assert runs[-1].limit_s == 7.5


def test_a_report_is_shown_without_a_run(runs: list[Options]) -> None:
    result = _bench("--from", WAYS, "--shapes", "4096x3584x8192", "--ways", "agmm")
    assert result.exit_code == 0
    assert "M x N x K = 4096 x 3584 x 8192" in result.output
    assert "1024 x 3584" not in result.output
    assert "unfused" not in result.output
    assert runs == []


def test_a_report_of_unknown_ways_is_shown(tmp_path: Path) -> None:
    """benchmarks/gemm.py writes such reports."""
    report = json.loads(Path(WAYS).read_text())
    way = {"median_us": 93.9, "ratio_to_mm": 1.1, "tflops": 640.0, "reason": None}
    for entry in report["shapes"]:
        entry["ways"] = {"torch.mm": way, "128x256x64_2x1_cooperative along_m swizzle 4": way}
    (tmp_path / "gemm.json").write_text(json.dumps(report))
    result = _bench("--from", str(tmp_path / "gemm.json"))
    assert result.exit_code == 0, result.exception
    assert "128x256x64_2x1_cooperative along_m swizzle 4" in result.output


def test_a_report_is_compared_without_a_run(runs: list[Options], tmp_path: Path) -> None:
    report = json.loads(Path(WAYS).read_text())
    for entry in report["shapes"]:
        way = entry["ways"]["agmm"]
        way["median_us"] *= 0.5
        way["samples_us"] = [us * 0.5 for us in way["samples_us"]]
    (tmp_path / "new.json").write_text(json.dumps(report))
    new = str(tmp_path / "new.json")
    result = _bench("--from", new, "--compare", WAYS)
    assert result.exit_code == 0
    shapes = len(report["shapes"])
    times = sum(len(entry["ways"]) for entry in report["shapes"])
    words = f"{times} times in both: {shapes} faster, {times - shapes} within noise."
    assert words in result.output
    assert "summary" not in result.output
    narrow = _bench("--from", new, "--compare", WAYS, "--ways", "agmm,unfused")
    words = f"{3 * shapes} times in both: {shapes} faster, {2 * shapes} within noise."
    assert words in narrow.output
    assert "only old" not in narrow.output
    assert runs == []


def test_a_report_is_drawn_without_a_run(runs: list[Options], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new"
    result = _bench("--from", WAYS, "--plot", str(folder))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"wrote {folder / 'time_over_roof-all_gather_matmul-nvidia-h100-80gb-hbm3-x4.png'}",
        f"wrote {folder / 'speedup-all_gather_matmul-nvidia-h100-80gb-hbm3-x4.png'}",
    ]
    assert len(list(folder.iterdir())) == 2
    assert runs == []


def test_a_run_is_compared_and_drawn_after_its_tables(runs: list[Options], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = _bench("--device", "cpu", "--compare", WAYS, "--plot", str(tmp_path))
    assert result.exit_code == 0
    assert "summary (µs)" in result.output
    assert "not the same conditions: machine NVIDIA H100 80GB HBM3 then" in result.output
    assert "only old: 1024x3584x8192: all ways" in result.output
    assert (
        "no speedup-all_gather_matmul-cpu-x4-float32.png: report: found no shape" in result.output
    )


def test_missing_matplotlib_is_said_before_the_run(
    runs: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = _bench("--device", "cpu", "--plot", str(tmp_path))
    assert result.exit_code == 1
    assert result.output == (
        "agmm: matplotlib is not installed; pip install 'agmm[plot]' brings it\n"
    )
    assert runs == []
