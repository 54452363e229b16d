"""`agmm tune` with real ranks on the CPU, and ops that follow its tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun
import tune_work
from command import agmm
from typer.testing import CliRunner

from agmm.bench import presets, tuner, tuning_session
from agmm.cli.app import app
from agmm.planning import tables
from agmm.planning.plans import UNFUSED, Plan, Row
from agmm.planning.problems import CPU, Problem
from agmm.planning.shapes import Shape
from agmm.planning.tables import Key
from agmm.testing.ranks import RankPool

SHAPES = (Shape(16, 8, 24), Shape(6, 5, 7), Shape(34, 40, 16))
ARGUMENTS = ["tune", "--device", "cpu", "--tp", "2"]
TUNE = [sys.executable, "-m", "agmm", *ARGUMENTS]
PROBLEM = Problem(16, 8, 24, format="float32", world_size=2, gpu=CPU)
SCATTER = replace(PROBLEM, op="matmul_reduce_scatter")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


class Notes(tuner.Silent):
    """What a run says, and that its progress only grows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done = 0.0

    def at(self, done: float, text: str) -> None:
        assert self.done <= done <= 1.0
        self.done = done

    def say(self, line: str) -> None:
        self.lines.append(line)


def tuned_shapes(folder: Path) -> list[Shape]:
    path = folder / tables.file_name(CPU, 2)
    if not path.exists():
        return []
    found = tables.read(path).by_key
    return [Shape(m, key.n, key.k) for key, rows in found.items() for m in rows]


def test_tune_and_again(folder: Path) -> None:
    options = tuning_session.TuningOptions.of("cpu", 2, SHAPES[:2], return_A=True, row_major=True)
    notes, keeper = Notes(), tuner.Keeper(2)
    outcomes = list(tuner.tune(options, notes))
    for outcome in outcomes:
        keeper.add(outcome)
        row = outcome.row
        assert row is not None
        assert outcome.failures == []
        m, n, k = outcome.problem.m, outcome.problem.n, outcome.problem.k
        wanted = replace(PROBLEM, m=m, n=n, k=k, return_A=True, b_layout="row")
        assert outcome.problem == wanted
        assert row.roof_us is not None and row.unfused_us is not None and outcome.old_us is not None
        assert row.roof_us > 0 and row.us > 0
    assert sorted(tuned_shapes(folder)) == sorted(SHAPES[:2])
    assert notes.lines == []

    more = tuning_session.TuningOptions.of("cpu", 2, SHAPES, return_A=True, row_major=True)
    notes = Notes()
    assert [o.shape for o in tuner.tune(more, notes)] == [SHAPES[2]]
    assert notes.lines == ["2 of 3 shapes were tuned before (--again repeats)"]
    once_more = tuning_session.TuningOptions.of(
        "cpu", 2, SHAPES[:1], return_A=True, row_major=True, again=True
    )
    assert [o.shape for o in tuner.tune(once_more)] == [SHAPES[0]]


@pytest.mark.slow
def test_tune_a_scatter(folder: Path) -> None:
    options = tuning_session.TuningOptions.of("cpu", 2, SHAPES, row_major=True, op=SCATTER.op)
    notes, keeper = Notes(), tuner.Keeper(2)
    for outcome in tuner.tune(options, notes):
        keeper.add(outcome)
        row = outcome.row
        assert outcome.failures == []
        assert (outcome.problem.op, outcome.problem.b_layout) == (SCATTER.op, "row")
        assert row is not None and row.plan in (Plan("push"), UNFUSED)
        assert row.roof_us is not None and row.unfused_us is not None and outcome.old_us is not None
    assert sorted(tuned_shapes(folder)) == sorted(SHAPES)
    assert notes.lines == []
    assert [o.shape for o in tuner.tune(options, notes)] == []
    assert notes.lines == ["3 of 3 shapes were tuned before (--again repeats)"]
    # The rows of one op say nothing of the other.
    gathers = tuning_session.TuningOptions.of("cpu", 2, SHAPES[:1], row_major=True)
    assert [o.shape for o in tuner.tune(gathers)] == [SHAPES[0]]


@pytest.mark.slow
def test_plans_of_an_all_reduce_are_checked_and_timed() -> None:
    """The session of CPU ranks, which the command refuses since their calls ask no table."""
    shape = Shape(16, 8, 24)
    options = tuning_session.TuningOptions(
        "cpu", 2, (shape,), torch.float32, op="matmul_all_reduce"
    )
    outcome = tuner.Outcome(shape, replace(PROBLEM, op="matmul_all_reduce"), Plan("push"))
    with tuner.Ranks(options) as ranks:
        span = tuner.Span(tuner.Silent(), 0.0, 1.0, str(shape))
        tuner.tune_shape(outcome, (), options, ranks, span)
    assert outcome.failures == [] and outcome.row is not None
    assert set(outcome.medians) == {Plan("push"), UNFUSED}


def test_tune_fp8(folder: Path) -> None:
    shapes = [Shape(16, 8, 32)]
    options = tuning_session.TuningOptions.of(
        "cpu", 2, shapes, torch.float8_e4m3fn, return_A=True, scaling="block"
    )
    keeper = tuner.Keeper(2)
    for outcome in tuner.tune(options):
        assert outcome.failures == [] and outcome.row is not None
        keeper.add(outcome)
    (key,) = tables.read(folder / tables.file_name(CPU, 2)).by_key
    assert key == Key("all_gather_matmul", "float8_e4m3fn", "column", 8, 32, True)
    assert list(tuner.tune(options)) == [], "done before"


@pytest.mark.slow
def test_wrong_scatters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "check", tune_work.check_with_wrong_scatter)
    options = tuning_session.TuningOptions.of("cpu", 2, SHAPES[:1], op=SCATTER.op)
    (outcome,) = tuner.tune(options)
    assert [failure.plan for failure in outcome.failures] == [Plan("push")]
    assert "relative error" in outcome.failures[0].reason
    assert outcome.row is None


@pytest.mark.slow
def test_rows_of_another_version_are_tuned_again() -> None:
    tables.save(CPU, 2, [(Key.of(PROBLEM), Row(16, UNFUSED, 1.0, 1.0, 1.0, "0.0.1"))])
    outcomes = list(tuner.tune(tuning_session.TuningOptions.of("cpu", 2, SHAPES[:1])))
    assert [(o.shape, o.old) for o in outcomes] == [(SHAPES[0], UNFUSED)]


def test_wrong_failing_and_dying_plans_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "check", tune_work.check_with_faults)
    notes = Notes()
    (outcome,) = tuner.tune(tuning_session.TuningOptions.of("cpu", 2, SHAPES[:1]), notes)
    reasons = {failure.plan.chunks_per_shard: failure.reason for failure in outcome.failures}
    assert set(reasons) == {2, 4, 8}
    assert "relative error" in reasons[2]
    assert reasons[4] == "rank 1: RuntimeError: the kernel did not start"
    assert "rank 1: ended with exit code 7" in reasons[8]
    assert len(notes.lines) == 3
    assert all(line.startswith("16x8x24: left out push, ") for line in notes.lines)
    assert outcome.row is not None
    assert outcome.row.plan in (Plan("push"), UNFUSED)


def test_no_row_where_no_fused_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "check", tune_work.check_with_none_fused)
    notes = Notes()
    (outcome,) = tuner.tune(tuning_session.TuningOptions.of("cpu", 2, SHAPES[:1]), notes)
    assert outcome.row is None
    assert outcome.failures
    assert notes.lines[-1] == "16x8x24: no row, since no fused plan could be measured"


@pytest.mark.slow
def test_interrupted_and_resumed(folder: Path, tmp_path: Path) -> None:
    shapes = [Shape(2 * m, 8, 8) for m in range(1, 40)]
    file = tmp_path / "shapes.txt"
    file.write_text("# shapes\n" + "\n".join(f"{shape}  # one" for shape in shapes) + "\n\n")
    command = [*TUNE, "--file", str(file)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while len(tuned_shapes(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, stderr
    last = ["agmm: the same command goes on with the rest", "agmm: interrupted"]
    assert stderr.splitlines()[-2:] == last
    done = len(tuned_shapes(folder))
    assert 2 <= done < len(shapes)
    assert all(str(shape) in stdout for shape in tuned_shapes(folder))

    file.write_text("\n".join(map(str, [*tuned_shapes(folder), Shape(200, 8, 8)])))
    again = agmm(*ARGUMENTS, "--file", str(file))
    assert again.returncode == 0, again.stderr
    assert f"{done} of {done + 1} shapes were tuned before" in again.stderr
    assert len(tuned_shapes(folder)) == done + 1


@pytest.mark.slow
def test_two_at_once(folder: Path) -> None:
    processes = [
        subprocess.Popen(
            [*TUNE, "--m", str(m), "--n", "8", "--k", "8"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for m in (10, 12)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
    assert sorted(tuned_shapes(folder)) == [Shape(10, 8, 8), Shape(12, 8, 8)]


def test_rows_that_cannot_be_saved_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMM_CACHE", "off")
    done = agmm(*ARGUMENTS, "--m", "10", "--n", "8", "--k", "8")
    assert done.returncode == 1
    assert "AGMM_CACHE: found 'off', wanted 'on' to keep what was tuned" in done.stderr
    assert "these rows were not saved:" in done.stderr
    table = json.loads(done.stdout[done.stdout.index("{") :])
    assert [row["m"] for row in table["rows"]] == [10]


def test_rows_that_the_ranks_cannot_share_are_left_out(folder: Path) -> None:
    done = agmm(*ARGUMENTS, "--shapes", "10x8x8,11x8x8")
    assert done.returncode == 0, done.stderr
    assert (
        "agmm: left out 11x8x8: M: found 11, wanted a multiple of the world size, 2" in done.stderr
    )
    assert tuned_shapes(folder) == [Shape(10, 8, 8)]


def test_nothing_is_measured_for_a_table_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGMM_CACHE_DIR", "/proc/agmm")
    done = agmm(*ARGUMENTS, "--m", "10", "--n", "8", "--k", "8")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("agmm: /proc/agmm: cannot be written to (")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_under_torchrun(folder: Path, tmp_path: Path) -> None:
    program = [*TUNE[1:], "--shapes", "10x8x8"]
    done = torchrun.run(tmp_path, ["--nproc-per-node=2"], program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("10x8x8") == 1
    assert tuned_shapes(folder) == [Shape(10, 8, 8)]


# --- ops follow the tables ---


def call(plan: Plan | None, strict: bool = False, elsewhere: str | None = None) -> list[Any]:
    """What `tune_work.call_with_table` finds where the table has this plan."""
    if plan is not None:
        tables.save(CPU, 2, [(Key.of(PROBLEM), Row(16, plan, 1.0))])
    folder = os.environ["AGMM_CACHE_DIR"]
    with RankPool(2) as pool:
        pool.run(tune_work.use_folder_of_rank, [folder, elsewhere or folder])
        return pool.run(tune_work.call_with_table, 16, 8, 24, strict)


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_op_takes_the_tables_chunks(chunks: int) -> None:
    assert call(Plan("push", chunks_per_shard=chunks)) == 2 * [(True, chunks, [])]


@pytest.mark.parametrize(("strict", "chunks"), [(False, 0), (True, 1)])
def test_the_op_is_unfused_where_that_is_faster(strict: bool, chunks: int) -> None:
    assert call(UNFUSED, strict) == 2 * [(True, chunks, [])]


def test_the_op_on_fp8_follows_the_table() -> None:
    key = Key("all_gather_matmul", "float8_e4m3fn", "column", 8, 32, False)
    tables.save(CPU, 2, [(key, Row(16, UNFUSED, 1.0))])
    with RankPool(2) as pool:
        assert pool.run(tune_work.fp8_call_with_table, False) == 2 * [(True, 0)]
        assert pool.run(tune_work.fp8_call_with_table, True) == 2 * [(True, 1)]


def test_ranks_with_different_tables_ignore_them(tmp_path: Path) -> None:
    found = call(Plan("push", chunks_per_shard=4), elsewhere=str(tmp_path / "none"))
    words = "agmm ignores cpu-x2.json of the user: its ranks found 2 versions of it, wanted one"
    assert found == 2 * [(True, 1, [words])]


@pytest.mark.parametrize(
    ("plan", "strict", "native"),
    [
        (None, False, True),
        (Plan("push"), False, True),
        (UNFUSED, False, False),
        (UNFUSED, True, True),
    ],
)
def test_a_scatter_takes_the_tables_plan(plan: Plan | None, strict: bool, native: bool) -> None:
    if plan is not None:
        tables.save(CPU, 2, [(Key.of(SCATTER), Row(16, plan, 1.0))])
    with RankPool(2) as pool:
        assert pool.run(tune_work.scatter_with_table, 16, 8, 24, strict) == 2 * [(True, native, [])]


@pytest.mark.slow
def test_a_layer_is_tuned_forward_and_backward_and_goes_on_after_ctrl_c(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(presets.MODELS, "tiny", presets.Attention(16, 2, 2, 8, 32))
    arguments = [*ARGUMENTS, "--model", "tiny", "--tokens", "8,9"]
    tune_shape, begun = tuner.tune_shape, 0

    def interrupted(*given: Any) -> None:
        nonlocal begun
        begun += 1
        if begun == 4:
            raise KeyboardInterrupt
        tune_shape(*given)

    monkeypatch.setattr(tuner, "tune_shape", interrupted)
    first = CliRunner().invoke(app, arguments, prog_name="agmm")
    assert first.exit_code == 130
    assert "agmm: left out 9 rows: found no multiple of the world size, 2" in first.stderr
    assert "the same command goes on with the rest" in first.stderr
    second = CliRunner().invoke(app, arguments, prog_name="agmm")
    assert second.exit_code == 0, second.output
    assert "2 of 2 shapes were tuned before" in second.stderr
    assert "1 of 2 shapes were tuned before" in second.stderr
    assert "tuned: all_gather_matmul, float32, B by row, A returned (µs)" in second.stdout
    assert "5 shapes: " in second.stderr and second.stderr.endswith(f"CACHE_DIR={folder}\n")
    assert begun == 9
    by_key = tables.read(folder / tables.file_name(CPU, 2)).by_key
    found = [(key.op, key.n, key.k, key.return_A, key.b_layout) for key in by_key]
    assert sorted(found) == [
        ("all_gather_matmul", 8, 16, True, "row"),
        ("all_gather_matmul", 16, 16, True, "row"),
        ("all_gather_matmul", 24, 16, False, "column"),
        ("all_gather_matmul", 32, 16, False, "column"),
        ("matmul_reduce_scatter", 16, 8, False, "column"),
        ("matmul_reduce_scatter", 16, 16, False, "column"),
        ("matmul_reduce_scatter", 16, 24, False, "row"),
        ("matmul_reduce_scatter", 16, 32, False, "row"),
    ]
