"""The tuner's decisions, with samples that are made up."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import agmm
from agmm.bench import candidates, tuner, tuning_session
from agmm.bench.way import ROOF
from agmm.cli import report_tables
from agmm.errors import InvalidArgument
from agmm.planning import cost_model, tables
from agmm.planning.cost_model import default_kernels
from agmm.planning.heuristics import usual_plans, usual_scatter_order
from agmm.planning.legality import why_illegal
from agmm.planning.plans import BY_TORCH, GATHERED, UNFUSED, Plan, Row
from agmm.planning.predictions import predict_us
from agmm.planning.problems import (
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    KernelConfig,
    Problem,
)
from agmm.planning.shapes import Shape
from agmm.planning.tables import TableError

KERNELS = default_kernels()
SENDERS = default_kernels(MATMUL_REDUCE_SCATTER)
SCATTER = Problem(4096, 8192, 2048, world_size=4, op="matmul_reduce_scatter")
GPU_PROBLEM = Problem(4096, 3584, 8192, world_size=4)
CPU_PROBLEM = Problem(64, 8, 8, format="float32", world_size=2, gpu=CPU)


def outcome(problem: Problem = CPU_PROBLEM, us: float = 8.0) -> tuner.Outcome:
    shape = Shape(problem.m, problem.n, problem.k)
    row = Row(problem.m, UNFUSED, us, 4.0, us, "0.1.0")
    return tuner.Outcome(shape, problem, Plan("push"), row, 10.0)


# --- candidates ---


@pytest.mark.parametrize("return_A", [False, True])
def test_candidates_on_a_gpu(return_A: bool) -> None:
    problem = replace(GPU_PROBLEM, return_A=return_A)
    old = Plan("push", KernelConfig.parse("256x128x64_2x1_cooperative/swizzle8/along_m"))
    plans = candidates.candidates(problem, KERNELS, old)
    assert plans[0] == old
    assert plans[-1] == UNFUSED
    assert len(set(plans)) == len(plans)
    assert all(why_illegal(problem, plan, KERNELS) is None for plan in plans)
    assert any(plan.transport.name == "pull" for plan in plans) == return_A


def test_slow_kernels_are_pruned() -> None:
    few = Problem(64, 2048, 8192, world_size=4)
    fused = [plan for kernel in KERNELS for plan in usual_plans(few, kernel)]
    times = {plan: predict_us(few, plan) or 0.0 for plan in fused}
    limit = candidates.PRUNE_FACTOR * min(times.values())
    found = candidates.candidates(few, KERNELS, UNFUSED)
    assert {UNFUSED, GATHERED} <= set(found)
    kept = [plan for plan in found if plan.kernel is not None and not plan.gathers_first]
    assert set(kept) == {plan for plan, us in times.items() if us <= limit}
    assert 0 < len(kept) < len(fused)


@pytest.mark.parametrize(("n", "world_size"), [(28672, 4), (28672, 1), (2048, 4)])
def test_a_weight_that_no_cache_holds_is_tried_across_the_chunks(n: int, world_size: int) -> None:
    problem = Problem(624, n, 8192, world_size=world_size)
    plans = candidates.candidates(problem, KERNELS, UNFUSED)
    across = [plan for plan in plans if plan.kernel is not None and plan.kernel.across]
    assert bool(across) == (n == 28672 and world_size == 4)
    assert all(why_illegal(problem, plan, KERNELS) is None for plan in plans)


@pytest.mark.parametrize(("rows", "chunks"), [(1, [1]), (3, [1, 2]), (8, [1, 2, 4, 8])])
def test_candidates_on_the_cpu(rows: int, chunks: list[int]) -> None:
    problem = replace(CPU_PROBLEM, m=2 * rows)
    plans = candidates.candidates(problem, (), Plan("push"))
    assert plans == [*(Plan("push", chunks_per_shard=c) for c in chunks), UNFUSED]


@pytest.mark.parametrize("m", [512, 16384])
def test_candidates_of_a_scatter(m: int) -> None:
    problem = replace(SCATTER, m=m)
    plans = candidates.candidates(problem, SENDERS, UNFUSED)
    times = {kernel: cost_model.tile_push_scatter_us(problem, kernel) for kernel in SENDERS}
    near = [k for k in SENDERS if times[k] <= candidates.PRUNE_FACTOR * min(times.values())]
    own = [plan.kernel for plan in plans if plan.kernel is not None]
    assert own == [usual_scatter_order(kernel) for kernel in near] and len(own) > 0
    assert {plan for plan in plans if plan.kernel is None} == {BY_TORCH, UNFUSED}
    assert all(why_illegal(problem, plan, SENDERS) is None for plan in plans)
    more = candidates.other_orders({plan: 1.0 + i for i, plan in enumerate(plans)})
    assert len(more) == 7 * min(2, len(own))
    assert all(why_illegal(problem, plan, SENDERS) is None for plan in more)
    on_cpu = candidates.candidates(replace(problem, gpu=CPU), (), Plan("push"))
    assert on_cpu == [Plan("push"), UNFUSED]


@pytest.mark.parametrize("m", [1024, 8192])
def test_candidates_of_an_all_reduce(m: int) -> None:
    """Lagged plans and plans that scatter, each by its own kernels, in all orders later."""
    problem = replace(SCATTER, m=m, op=MATMUL_ALL_REDUCE)
    finishers = default_kernels(MATMUL_ALL_REDUCE)
    old = Plan("scatter", usual_scatter_order(SENDERS[0]))
    plans = candidates.candidates(problem, finishers, old, SENDERS)
    ways = {plan.transport.name for plan in plans}
    assert ways == {"lagged", "scatter", "unfused"} and len(set(plans)) == len(plans)
    assert plans[0] == old
    more = candidates.other_orders({plan: 1.0 + i for i, plan in enumerate(plans)})
    for plan in (*plans, *more):
        kernels = SENDERS if plan.transport.name == "scatter" else finishers
        assert why_illegal(problem, plan, kernels) is None
    assert len(more) == 2 * 7
    on_cpu = candidates.candidates(replace(problem, gpu=CPU), (), UNFUSED)
    assert on_cpu == [UNFUSED, Plan("push")]


def test_options_of_an_all_reduce_are_those_of_its_calls() -> None:
    """Rows are filled up to what the ranks share, as in the calls; each shape stands once."""

    def of(device: str = "cuda", dtype: torch.dtype | None = None, returns: bool = False) -> Any:
        shapes = [Shape(17, 8, 8), Shape(20, 8, 8)]
        return tuning_session.TuningOptions.of(
            device, 4, shapes, dtype, op=MATMUL_ALL_REDUCE, return_A=returns
        )

    assert of().shapes == (Shape(20, 8, 8),)
    with pytest.raises(InvalidArgument, match="device: found cpu with matmul_all_reduce"):
        of("cpu")
    with pytest.raises(InvalidArgument, match=r"dtype: found .*e4m3fn with matmul_all_reduce"):
        of(dtype=torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match="return_A: found True with matmul_all_reduce"):
        of(returns=True)


def test_candidates_of_a_scatter_with_few_tiles_split_k() -> None:
    problem = replace(SCATTER, m=128, n=1024, k=28672)
    plans = candidates.candidates(problem, SENDERS, UNFUSED)
    splits = {plan.kernel.splits for plan in plans if plan.kernel is not None}
    assert splits - {1}
    assert all(why_illegal(problem, plan, SENDERS) is None for plan in plans)


def test_torchs_op_has_to_be_faster_by_what_it_costs_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's op takes 100 µs where another plan takes 130 and torch's host time is 60."""
    own = Plan("push", SENDERS[0])
    taken = {own.name: 130.0, BY_TORCH.name: 100.0, UNFUSED.name: 150.0, ROOF: 50.0}

    def ranks(fn: Any, *arguments: Any) -> Any:
        if fn is tuning_session.check:
            return tuning_session.Verdict(None)
        if fn is tuning_session.measure:
            return {name: [taken[name]] * arguments[1] for name in (*arguments[0], ROOF)}
        return None

    monkeypatch.setattr(tuner, "candidates", lambda *_: [own, BY_TORCH, UNFUSED])
    monkeypatch.setattr(tuner, "other_orders", lambda _: [])
    options = tuning_session.TuningOptions("cuda", 4, (), torch.bfloat16, op=SCATTER.op)
    for us, winner in ((100.0, own), (60.0, BY_TORCH)):
        taken[BY_TORCH.name] = us
        found = tuner.Outcome(Shape(4096, 8192, 2048), SCATTER, UNFUSED)
        span = tuner.Span(tuner.Silent(), 0.0, 1.0, "a shape")
        ranks_: Any = ranks
        tuner.tune_shape(found, SENDERS, options, ranks_, span)
        assert found.row == Row(4096, winner, taken[winner.name], 50.0, 150.0, agmm.__version__)


def test_a_scatter_returns_no_A() -> None:
    with pytest.raises(InvalidArgument, match="return_A: found True with matmul_reduce_scatter"):
        tuning_session.TuningOptions.of("cpu", 2, [Shape(4, 8, 8)], op=SCATTER.op, return_A=True)


def test_the_best_kernels_are_tried_in_all_orders() -> None:
    medians = {Plan("push", kernel): float(i) for i, kernel in enumerate(KERNELS)}
    medians[UNFUSED] = -1.0
    more = candidates.other_orders(medians)
    assert len(more) == len(set(more)) == 2 * 7
    assert {p.kernel.kernel for p in more if p.kernel} == {k.kernel for k in KERNELS[:2]}
    assert not set(more) & set(medians)
    assert candidates.other_orders({Plan("push"): 1.0, UNFUSED: 2.0}) == []


# --- settling ---


class Clock:
    """Samples around given times, with noise that is common to a round and noise of each sample."""

    def __init__(self, noise: float, **times: float) -> None:
        self._draw = random.Random(1)
        self._noise = noise
        self._times = {**times, ROOF: 1.0}
        self.asked: list[list[str]] = []

    def __call__(self, names: Sequence[str], number: int) -> dict[str, list[float]]:
        assert number == len(self.asked)
        self.asked.append(list(names))
        drift = [1.0 + 0.2 * self._draw.random() for _ in range(tuning_session.ROUND_SAMPLES)]
        return {
            name: [self._times[name] * d + self._draw.gauss(0, self._noise) for d in drift]
            for name in (*names, ROOF)
        }


def test_a_clear_winner_takes_one_round() -> None:
    clock = Clock(0.5, a=100, b=120, c=110)
    winner, samples = tuner.settle(clock, ["b", "a", "c"], old="b")
    assert winner == "a"
    assert clock.asked == [["b", "a", "c"]]
    assert {len(taken) for taken in samples.values()} == {tuning_session.ROUND_SAMPLES}
    assert ROOF in samples


def test_other_chunks_are_tried_where_sm_push_is_the_fastest() -> None:
    problem = Problem(1024, 3584, 8192, world_size=4)
    kernel = KernelConfig.parse("128x224x64_2x1_cooperative/swizzle8/along_n")
    push, copies = Plan("sm32x128", kernel), Plan("push", kernel)
    more = candidates.other_pushes(problem, {push: 1.0, copies: 2.0})
    assert len(more) == len(set(more)) > 6
    assert push not in more
    assert {p.kernel for p in more} == {kernel}
    assert all(why_illegal(problem, p, KERNELS) is None for p in more)
    assert candidates.other_pushes(problem, {push: 2.0, copies: 1.0}) == []
    assert candidates.other_pushes(problem, {}) == []


def test_the_clearly_slower_are_timed_no_more_but_the_old_one_is() -> None:
    clock = Clock(3.0, a=100, b=100.01, slow=130, old=125)
    tuner.settle(clock, ["a", "b", "slow", "old"], old="old")
    assert clock.asked == [["a", "b", "slow", "old"]] + (tuning_session.MAX_ROUNDS - 1) * [
        ["a", "b", "old"]
    ]


def test_within_the_noise_the_old_plan_stays() -> None:
    for old in ("a", "b"):
        winner, _ = tuner.settle(Clock(5.0, a=100, b=100.1), ["a", "b"], old=old)
        assert winner == old


def test_a_single_candidate_wins() -> None:
    assert tuner.settle(Clock(1.0, a=5), ["a"], old="gone")[0] == "a"


def test_more_rounds_tell_what_one_cannot() -> None:
    rounds = [
        [-3.0, 5.0] * (tuning_session.ROUND_SAMPLES // 2),
        *4 * [[1.0] * tuning_session.ROUND_SAMPLES],
    ]

    def time_round(names: Sequence[str], number: int) -> dict[str, list[float]]:
        flat = [100.0] * tuning_session.ROUND_SAMPLES
        slower = [100.0 + d for d in rounds[number]]
        return {"a": flat, "b": slower, ROOF: flat}

    winner, samples = tuner.settle(time_round, ["a", "b"], old="b")
    assert winner == "a"
    assert len(samples["b"]) == 3 * tuning_session.ROUND_SAMPLES


def test_ahead_is_about_pairs() -> None:
    first = [10.0, 50.0, 12.0, 30.0]  # clocks drift, the difference does not
    assert tuner.is_ahead(first, [s + 1 for s in first])
    assert not tuner.is_ahead([s + 1 for s in first], first)
    assert not tuner.is_ahead(first, first)
    assert tuner.is_ahead(first, [s + d for s, d in zip(first, [1, 1.1, 400, 0.9], strict=True)])


# --- options ---


def test_options_of_fp8_are_checked() -> None:
    def of(device: str = "cuda", n: int = 8, **others: Any) -> Any:
        shapes = [Shape(4, n, 32)]
        return tuning_session.TuningOptions.of(device, 2, shapes, torch.float8_e4m3fn, **others)

    assert of().scaling == "rowwise"
    for given, message in (
        ({"row_major": True}, "b_layout: found row with torch.float8_e4m3fn, wanted column"),
        ({"device": "cpu", "op": SCATTER.op}, "dtype: found torch.float8_e4m3fn with matmul_red"),
        ({"n": 12}, "shape: found .* N=12 is no multiple of 8"),
        ({"scaling": "columns"}, "scaling: found 'columns', wanted one of"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            of(**given)


def test_options_are_checked() -> None:
    assert tuning_session.TuningOptions.of("cpu", 2, [Shape(4, 3, 5)]).dtype == torch.float32
    with pytest.raises(InvalidArgument, match="found 5x8x8, wanted an M that is a multiple"):
        tuning_session.TuningOptions.of("cpu", 2, [Shape(5, 8, 8)])
    with pytest.raises(InvalidArgument, match="found 4x3x8, which cannot be fused: B: found N=3"):
        tuning_session.TuningOptions.of("cuda", 2, [Shape(4, 3, 8)])


# --- keeping ---


def test_rows_that_could_not_be_written_are_written_with_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    keeper = tuner.Keeper(2)
    save = tables.save

    def full(*arguments: Any) -> Path:
        raise TableError("cpu-x2.json: cannot be written (No space left on device)")

    monkeypatch.setattr(tables, "save", full)
    keeper.add(outcome())
    keeper.add(outcome(replace(CPU_PROBLEM, m=128)))
    assert keeper.error == "cpu-x2.json: cannot be written (No space left on device)"
    assert keeper.path is None
    text = json.loads(keeper.unsaved_text())
    assert [row["m"] for row in text["rows"]] == [64, 128]
    monkeypatch.setattr(tables, "save", save)
    keeper.add(outcome(replace(CPU_PROBLEM, m=256)))
    assert not keeper.unsaved
    table = tables.user(CPU, 2)
    assert table is not None
    assert [row.m for row in table.rows(CPU_PROBLEM)] == [64, 128, 256]


def test_what_could_not_be_measured_is_not_kept() -> None:
    keeper = tuner.Keeper(2)
    keeper.add(tuner.Outcome(Shape(64, 8, 8), CPU_PROBLEM, UNFUSED))
    assert keeper.unsaved == []


def test_summary() -> None:
    nothing = tuner.Outcome(Shape(8, 8, 8), CPU_PROBLEM, UNFUSED)
    console = Console(file=io.StringIO(), width=160)
    console.print(report_tables.tuning_table([outcome(), nothing]))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["64x8x8", "push", "unfused", "10.0", "8.0", "20.0%", "2.000", "8.0"] in lines
    assert any("none could be measured" in " ".join(line) for line in lines)
