"""The command: help, friendly errors, exit codes, and what Ctrl-C leaves behind."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agmm import _installation
from agmm.bench import launcher, measure, reports, runner, tuner
from agmm.bench.options import Options
from agmm.bench.reports import narrow
from agmm.bench.units import duration, size
from agmm.bench.ways import WAYS
from agmm.cli import demo, report_tables
from agmm.cli.app import app
from agmm.cli.tuning import TuningBar
from agmm.errors import AgmmError
from agmm.planning.plans import UNFUSED, Row
from agmm.planning.problems import Problem
from agmm.planning.shapes import Shape
from agmm.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.usefixtures("default_kernels_assumed")
AGMM = [sys.executable, "-m", "agmm"]
cli_runner = CliRunner()


def _invoke(*arguments: str) -> Any:
    return cli_runner.invoke(app, arguments, prog_name="agmm")


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_help_lists_the_commands() -> None:
    result = _invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "bench", "tune", "explain", "doctor"):
        assert command in result.output


@pytest.mark.parametrize("command", ["demo", "bench", "tune", "explain", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = _invoke(command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"agmm {command}" in result.output


def test_paragraphs_of_help_fill_the_lines() -> None:
    lines = [line.strip() for line in _invoke("tune", "--help").output.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("Every candidate"))
    assert all(len(line) > 60 for line in lines[begin : begin + 2])


def test_version() -> None:
    assert _invoke("--version").output.strip() == f"agmm {_installation.version()}"


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (["demoo"], ["demoo", "demo"]),
        (["demo", "--ouput", "x.png"], ["--ouput", "--output"]),
        (["demo", "--device", "tpu"], ["tpu", "cuda"]),
        (["tune", "--op", "all_gather"], ["matmul_all_reduce", "agmm explain"]),
        (
            ["tune", "--op", "matmul_all_reduce", "--device", "cpu", "--shapes", "8x8x8"],
            ["device: found cpu", "one plan on CPU ranks"],
        ),
        (["explain", "--op", "allredcue"], ["did you mean", "all_reduce"]),
        (["bench", "--ways", "agm"], ["found 'agm'", "did you mean 'agmm'?"]),
        (["bench", "--shapes", "12x", "--device", "cpu"], ["found '12x'", "wanted MxNxK"]),
        (
            ["bench", "--shapes", "13x8x8", "--device", "cpu"],
            ["found 13x8x8", "multiple of the world size, 4"],
        ),
        (["bench", "--samples", "0"], ["--samples"]),
        (
            ["demo", "--device", "cpu", "--tp", "1000"],
            ["world size: found 1000", "at most 64 processes on the CPU"],
        ),
        (["tune", "--device", "cpu"], ["found 0 ways to name them", "--m --n --k, --shapes"]),
        (["tune", "--device", "cpu", "--m", "8"], ["found --m 8 alone", "wanted --m, --n and --k"]),
        (["tune", "--device", "cpu", "--shapes", ","], ["found none in --shapes"]),
        (["tune", "--device", "cpu", "--file", "/no/file"], ["/no/file cannot be read"]),
        (["tune", "--device", "cpu", "--model", "llama"], ["found 'llama'", "llama-3-8b"]),
        (
            ["tune", "--device", "cpu", "--model", "llama-3-8b", "--tokens", "9"],
            ["found 9x", "multiple of the world size, 4"],
        ),
        (["tune", "--device", "cpu", "--shapes", "8x8x8", "--model", "llama-3-8b"], ["found 2"]),
        (["explain", "--m", "8", "--n", "8", "--k", "8"], ["--tp"]),
        (["explain", "--m", "8", "--k", "8", "--tp", "2"], ["n: found none", "columns of B"]),
        (
            ["explain", "--op", "all_reduce", "--m", "8", "--n", "8", "--k", "8", "--tp", "2"],
            ["n: found 8", "wanted none for all_reduce"],
        ),
        (
            ["explain", "--m", "9", "--n", "8", "--k", "8", "--tp", "2"],
            ["m: found 9", "multiple of tp, 2"],
        ),
        (
            ["explain", "--m", "8", "--n", "8", "--k", "8", "--tp", "2", "--gpu", "v100"],
            ["gpu: found 'v100'", "nvidia-h200"],
        ),
    ],
)
def test_typos_are_answered(arguments: list[str], hints: list[str]) -> None:
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    said = " ".join(result.output.replace("│", " ").split())
    for hint in hints:
        assert hint in said


SHAPE = ["--m", "4096", "--n", "3584", "--k", "8192", "--gpu", "h200"]


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        (["--return-a"], True),
        (["--return-a", "true"], True),
        (["--return-a=True"], True),
        (["--return-a", "false"], False),
        (["--return-a=false"], False),
        ([], False),
    ],
)
def test_a_flag_may_have_a_value(flag: list[str], wanted: bool) -> None:
    result = _invoke("explain", *flag, *SHAPE, "--tp", "4")
    assert (result.exit_code, ", A returned" in result.output) == (0, wanted), result.output


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--dtype", "bfloat16"], "bfloat16, B by"),
        (["--dtype=FP32"], "float32, B by"),
        (["--dtype", "fp8", "--scaling", "1x128"], "float8_e4m3fn with block 1x128 scales"),
        (["--op", "matmul-reduce-scatter"], "reduce_scatter(A"),
        (["--op=MatmulAllReduce", "--b-layout", "Row"], "B by row"),
    ],
    ids=str,
)
def test_values_have_other_names(given: list[str], wanted: str) -> None:
    result = _invoke("explain", *SHAPE, "--tp", "4", *given)
    assert (result.exit_code, wanted in result.output) == (0, True), result.output


@pytest.mark.parametrize(
    ("command", "given", "meant"),
    [
        ("explain", ["--op", "allredcue"], "all_reduce"),
        ("tune", ["--op=matmul_reduce_scater"], "matmul_reduce_scatter"),
        ("bench", ["--dtype", "bf61"], "bf16"),
        ("demo", ["--device", "cudaa"], "cuda"),
    ],
)
def test_a_value_with_a_typo_is_guessed(command: str, given: list[str], meant: str) -> None:
    result = _invoke(command, *given)
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in " ".join(result.output.replace("│", " ").split())


def test_a_flag_of_one_name_may_have_a_value() -> None:
    assert "matmul alone (roof)" in _invoke("bench", "--list", "true").output
    result = _invoke("bench", "--list=false", "--from", "/no/file")
    assert "/no/file cannot be read" in result.output
    assert "maybe" in _invoke("bench", "--list", "maybe").output


@pytest.mark.parametrize("command", ["demo", "bench", "tune", "explain"])
def test_the_number_of_ranks_has_both_names(command: str) -> None:
    output = _invoke(command, "--help").output
    assert "--tp,--world-size" in output


def test_both_names_of_the_number_of_ranks_mean_the_same() -> None:
    outputs = {_invoke("explain", *SHAPE, name, "4").output for name in ("--tp", "--world-size")}
    assert len(outputs) == 1
    assert "4 ranks on nvidia-h200" in outputs.pop()
    for name in ("--tp", "--world-size"):
        for command in ("bench", "tune"):
            result = _invoke(command, "--device", "cpu", "--shapes", "9x8x8", name, "2")
            assert "multiple of the world size, 2" in result.output
        result = _invoke("demo", "--device", "cpu", name, "0")
        assert "'--tp'" in result.output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--shapes", "1000000x1000000x100000"], "of which 2 ranks need 8.73 TiB, wanted at most "),
        (["--shapes", "99999999999999999998x8x8"], "wanted extents up to 2147483647"),
        (["--shapes", f"{'9' * 5000}x8x8"], "wanted extents up to 2147483647"),
        (["--shapes", "²x8x8"], "wanted MxNxK"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_huge_shapes_are_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], hint: str
) -> None:
    monkeypatch.setattr(RankPool, "__init__", _never)
    monkeypatch.setattr(launcher, "ranks", _never)
    result = _invoke(command, "--device", "cpu", "--tp", "2", *arguments)
    assert (result.exit_code, hint in result.output) == (2, True), result.output[-500:]
    assert len(result.output.splitlines()) == 1


def test_cpu_processes_in_place_of_too_few_gpus_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = _invoke("bench", "--tp", "4", "--shapes", "9x8x8")
    assert result.output.splitlines()[0] == (
        "agmm: 4 ranks are more than the 2 GPUs here: on CPU processes"
    )


@pytest.mark.parametrize("value", ["abc", "-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--output", "x.png"],
        ["bench", "--shapes", "8x8x8"],
        ["bench", "--timeline", "8x8x8"],
        ["tune", "--shapes", "8x8x8"],
    ],
)
def test_a_limit_that_is_no_number_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGMM_TIMEOUT_S", value)
    result = _invoke(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"agmm: AGMM_TIMEOUT_S: found '{value}', wanted ")


def test_any_error_of_agmm_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **keywords: Any) -> None:
        raise AgmmError("workspace: found none, wanted one")

    monkeypatch.setattr(demo, "run", failing)
    result = _invoke("demo", "--device", "cpu")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "agmm: workspace: found none, wanted one"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_narrow_terminal_takes_no_number_away(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    ways = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200-x4.json"
    report = narrow(reports.read(ways), [Shape(4096, 3584, 8192)], None)
    report_tables.render(report, terminal)
    assert isinstance(terminal.file, io.StringIO)
    text = terminal.file.getvalue()
    assert "…" not in text
    for way in report["shapes"][0]["ways"].values():
        assert f"{way['median_us']:.1f}" in text
    assert terminal.width == width


def test_list_of_ways() -> None:
    output = _invoke("bench", "--list").output
    assert all(name in output for name in WAYS)


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    result = _invoke("bench", "--device", "cpu")
    assert result.exit_code == 130
    assert result.output == "agmm: interrupted\n"


def test_failing_rank_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **keywords: Any) -> None:
        raise RankError("rank 1: ended with exit code -9", [1], {1: -9})

    monkeypatch.setattr(demo, "run", failing)
    result = _invoke("demo", "--device", "cpu")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "agmm: rank 1: ended with exit code -9"


def test_wrong_result_fails_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = reports.new_report(Options("cpu").resolved())
    bad = vars(measure.WayResult(wrong=True, reason="relative error 0.5, allowed 0.001"))
    report["shapes"] = [{"M": 8, "N": 8, "K": 8, "sm_clock_mhz": None, "ways": {"agmm": bad}}]
    monkeypatch.setattr(runner, "run", lambda options, progress, begun, lost: report)
    result = _invoke("bench", "--device", "cpu", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert "wrong results: agmm at 8x8x8" in result.output
    assert "did not run" not in result.output
    assert json.loads((tmp_path / "r.json").read_text())["shapes"]
    bad |= {"wrong": False, "reason": "RuntimeError: no"}
    result = _invoke("bench", "--device", "cpu")
    assert result.exit_code == 1
    assert "did not run: agmm at 8x8x8" in result.output


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RankError("rank 1: gone", [1], {}), 1)]
)
def test_what_is_there_is_kept_when_the_bench_ends_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, code: int
) -> None:
    good = vars(measure.WayResult(median_us=3.0, relative_error=0.0))

    def run(options: Any, progress: Any, begun: Any, lost: Any) -> None:
        report = reports.new_report(options.resolved())
        begun(report)
        ways = {"agmm": good}
        report["shapes"].append({"M": 8, "N": 8, "K": 8, "sm_clock_mhz": None, "ways": ways})
        raise error

    monkeypatch.setattr(runner, "run", run)
    result = _invoke("bench", "--device", "cpu", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == code
    (shape,) = json.loads((tmp_path / "r.json").read_text())["shapes"]
    assert shape["ways"]["agmm"]["median_us"] == 3.0
    assert "8 x 8 x 8" in result.output


def _never(*arguments: Any, **keywords: Any) -> None:
    pytest.fail("it ran")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["bench", "--json", "FILE/r.json"], "--json: found "),
        (["demo", "-o", "FILE/x.png"], "--output: found "),
        (["demo", "-o", "x.xyz"], "--output: found the suffix '.xyz', wanted one of "),
    ],
)
def test_what_cannot_be_written_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(runner, "run", _never)
    monkeypatch.setattr(demo, "run", _never)
    given = [argument.replace("FILE", str(tmp_path / "file")) for argument in arguments]
    result = _invoke(*given, "--device", "cpu")
    assert (result.exit_code, hint in result.output) == (2, True), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("demo", "demo: found torchrun around it"),
        ("bench", "world size: found 4, wanted 2, the ranks that torchrun has started"),
        ("tune", "world size: found 4, wanted 2, the ranks that torchrun has started"),
    ],
)
def test_ranks_that_torchrun_has_started(
    monkeypatch: pytest.MonkeyPatch, command: str, hint: str
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    more = {"tune": ["--tp", "4", "--shapes", "8x8x8"], "bench": ["--world-size", "4"]}
    result = _invoke(command, "--device", "cpu", *more.get(command, []))
    assert (result.exit_code, hint in result.output) == (2, True), result.output


@pytest.mark.parametrize("command", ["demo", "bench", "tune"])
def test_a_nonsense_environment_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGMM_TIMEOUT_S", "soon")
    monkeypatch.setattr(demo, "run", _never)
    monkeypatch.setattr(runner, "run", _never)
    more = ["--shapes", "8x8x8"] if command == "tune" else []
    result = _invoke(command, "--device", "cpu", *more)
    assert result.exit_code == 2
    assert result.output.startswith("agmm: AGMM_TIMEOUT_S: found 'soon', wanted ")


def test_doctor_says_what_is_broken_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _invoke("doctor").exit_code == 0
    monkeypatch.setenv("AGMM_TIMEOUT_S", "soon")
    result = _invoke("doctor", "--json")
    assert result.exit_code == 1
    findings = {f["name"]: f for f in json.loads(result.output)["findings"]}
    assert findings["environment"]["status"] == "broken"


@pytest.mark.parametrize(
    ("us", "wanted"),
    [
        (0.4, "0.4 µs"),
        (323.84, "323.8 µs"),
        (9999.0, "9999.0 µs"),
        (17100.0, "17.1 ms"),
        (12.3e6, "12.3 s"),
        (7.2e9, "2.0 h"),
        (10 * 86400e6, "10.0 days"),
        (1e18, "3.17e+04 years"),
    ],
)
def test_durations_can_be_read(us: float, wanted: str) -> None:
    assert duration(us) == wanted


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (2048, "2 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (400e9, "373 GiB"),
        (1e15, "909 TiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_sizes_can_be_read(count: float, wanted: str) -> None:
    assert size(count) == wanted


def test_tuning_says_in_a_log_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shape = Shape(16, 8, 24)
    with TuningBar(visible=True) as bar:
        for i in range(20):
            bar.at(i / 40, "16x8x24: checking push")
            now += 1.0
        bar.at(0.5, "32x8x24: checking push")
        bar.ended(tuner.Outcome(shape, Problem(*shape), UNFUSED, Row(16, UNFUSED, 43.0)))
    with TuningBar(visible=False) as bar:
        bar.at(0.0, "16x8x24: checking push")
    assert capsys.readouterr().err.splitlines() == [
        "starting the ranks",
        "  0% 16x8x24: checking push",
        " 25% 16x8x24: checking push",
        " 50% 32x8x24: checking push",
        "     16x8x24: 43.0 µs, unfused",
    ]


def test_explain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AGMM_CACHE", "on")
    shape = ["--m", "4096", "--n", "3584", "--k", "8192", "--tp", "4", "--gpu", "h200"]
    result = _invoke("explain", *shape, "--return-a", "--b-layout", "row", "--dtype", "fp16")
    assert result.exit_code == 0
    assert "float16, B by row, 4 ranks on nvidia-h200, A returned" in result.output
    assert "plan: pull, 128x224x64_2x1_cooperative/" in result.output
    assert "from: cost model" in result.output


def test_explain_of_an_activation() -> None:
    """Its plans are those of the kernels that compute it; a gate has the columns of two weights."""
    shape = ["--m", "4096", "--n", "3584", "--k", "8192", "--tp", "4", "--gpu", "h200"]
    result = _invoke("explain", *shape, "--activation", "silu_mul", "--json", "--all")
    assert result.exit_code == 0
    (found,) = json.loads(result.output)
    assert (found["n"], found["epilogue"]) == (7168, "gate")
    kernels = {
        one["plan"].split(", ")[1].split("/")[0]
        for one in found["alternatives"]
        if "_" in one["plan"]
    }
    of_waves = {"128x256x64_2x1", "128x224x64_2x1"}
    of_waves = {f"{tile}_cooperative" for tile in of_waves} | {"128x128x64_1x1_pingpong"}
    assert kernels == of_waves | {"32x128x128_1x1_streaming", "64x128x128_1x1_streaming"}
    assert "gate in the kernel" in _invoke("explain", *shape, "--activation", "silu_mul").output
    wrong = _invoke("explain", *shape, "--activation", "swish")
    assert wrong.exit_code == 2 and "activation: found 'swish', wanted one of" in wrong.output


def test_explain_of_several_shapes() -> None:
    where = ["--tp", "4", "--gpu", "h200"]
    result = _invoke("explain", "--shapes", "4096x3584x8192,65x8x8,64x3584x8192", *where)
    assert result.exit_code == 0
    assert "agmm: left out 65x8x8: m: found 65, wanted a multiple of tp, 4" in result.output
    for text in ("4096 x 3584 x 8192", "64 x 3584 x 8192", "÷ alone"):
        assert text in result.output
    assert "alternatives" not in result.output
    every = _invoke("explain", "--model", "llama-3-8b", "--tokens", "512,1024", "--all", *where)
    assert every.exit_code == 0 and every.output.count("alternatives (predicted)") == 4
    as_json = _invoke("explain", "--shapes", "8x8x8,16x8x8", "--json", *where)
    assert [one["m"] for one in json.loads(as_json.stdout)] == [8, 16]
    none = _invoke("explain", "--shapes", "65x8x8,66x8x8", *where)
    assert none.exit_code == 2
    assert "shapes: found none that can be explained, wanted at least one" in none.output
    two = _invoke("explain", "--shapes", "8x8x8", "--model", "llama-3-8b", *where)
    assert two.exit_code == 2 and "shapes: found 2 ways to name them" in two.output
    for options in (["--scaling", "rowwise"], ["--return-a"]):
        collective = _invoke("explain", *options, "--op", "all_reduce", *where)
        assert collective.exit_code == 2
        assert f"{options[0]}: found it with all_reduce" in collective.output


def test_warnings_are_lines(tmp_path: Path) -> None:
    (tmp_path / "nvidia-h200-x4.json").write_text("{")
    shape = ["--m", "4096", "--n", "3584", "--k", "8192", "--tp", "4", "--gpu", "h200"]
    environment = {**os.environ, "AGMM_CACHE_DIR": str(tmp_path), "AGMM_CACHE": "on"}
    done = subprocess.run(
        [*AGMM, "explain", *shape], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0
    assert "plan: " in done.stdout
    # Another one names rows whose kernels are not in this build.
    (line,) = [x for x in done.stderr.splitlines() if " passes over rows of " not in x]
    assert line.startswith("agmm: agmm ignores a table of plans: ")


@pytest.mark.slow
def test_demo_end_to_end(tmp_path: Path) -> None:
    picture = tmp_path / "overlap.png"
    command = [*AGMM, "demo", "--device", "cpu", "--world-size", "2", "--output", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for words in ("matmul alone (roof)", "all-gather, then matmul", "agmm"):
        assert words in done.stdout
    assert "WRONG" not in done.stdout
    assert "All results agree with the plain product" in done.stdout
    assert "\x1b" not in done.stdout
    if "No picture" not in done.stdout:
        assert picture.read_bytes().startswith(b"\x89PNG")


def _members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def _interrupt_another_thread(pid: int) -> None:
    """SIGINT to a thread of the process that is not its first and takes the signal."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        blocked = re.search(r"SigBlk:\t(\w+)", (task / "status").read_text())
        assert blocked is not None
        if int(task.name) != pid and not int(blocked[1], 16) & 1 << signal.SIGINT - 1:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.tgkill(pid, int(task.name), signal.SIGINT) != 0:
                raise OSError(ctypes.get_errno(), "tgkill")
            return
    pytest.fail("the process has one thread")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "measuring", "measuring, to another thread"])
def test_ctrl_c_leaves_nothing_behind(when: str) -> None:
    command = [*AGMM, "bench", "--device", "cpu", "--world-size", "2", "--samples", "1000000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        deadline = time.monotonic() + 60
        if when.startswith("measuring"):
            assert "256x256x512" in process.stderr.readline()
            time.sleep(0.5)
        else:
            while len(_members(process.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
        if when.endswith("thread"):
            _interrupt_another_thread(process.pid)
        else:
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
        assert stderr.strip().splitlines() == ["agmm: interrupted"]
        deadline = time.monotonic() + 60
        while _members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _members(process.pid) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
