"""The plan of agmm's gather before one of agmm's kernels: its name, what is legal, where it is
chosen and tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from test_plan import KERNELS, planner, planner_of

from agmm.bench import candidates
from agmm.planning import cost_model, legality, plans, studies, tables
from agmm.planning.cost_model import At, gpu_constants
from agmm.planning.plans import GATHERED, GATHERED_TO_KERNEL, UNFUSED, Plan, Row
from agmm.planning.predictions import predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, CPU, DEFAULT_GPU, KernelConfig, Problem
from agmm.planning.transports import GATHER, PUSH
from agmm.planning.tuned_rows import GatherRow

KERNEL = KernelConfig.parse("128x256x64_1x1_cooperative/swizzle8/along_n")
PLAN = Plan(GATHER, KERNEL)
FEW = Problem(448, 9472, 3584, world_size=2)
FP8 = replace(FEW, format="float8_e4m3fn_float8_e4m3fn fast")
WIDE_FP8 = KernelConfig.parse("128x256x128_2x1_cooperative")


def test_its_name_says_gather_and_kernel() -> None:
    assert PLAN.name == f"gather, {KERNEL.name}"
    assert plans.parse_config(f"{KERNEL.name}/gather") == (KERNEL, GATHER)
    assert tables.plan_from_json(tables.plan_to_json(PLAN)) == PLAN
    assert PLAN.gathers_first and GATHERED.gathers_first and not Plan(PUSH, KERNEL).gathers_first
    assert {PLAN.family, GATHERED.family} == {GATHERED_TO_KERNEL, "gather"}


@pytest.mark.parametrize(
    ("problem", "kernel", "reason"),
    [
        pytest.param(FEW, KERNEL, None, id="few rows"),
        pytest.param(replace(FEW, return_A=True), KERNEL, None, id="A returned"),
        pytest.param(FP8, WIDE_FP8, None, id="fp8"),
        pytest.param(replace(FEW, m=8192), KERNEL, "found gather of 58720256 bytes", id="many"),
        pytest.param(replace(FEW, world_size=1), KERNEL, "by 1 ranks", id="one rank"),
        pytest.param(replace(FEW, epilogue="gate"), KERNEL, "with an activation", id="activation"),
        pytest.param(replace(FEW, gpu=CPU), KERNEL, "found transport gather", id="CPU"),
        pytest.param(FEW, replace(KERNEL, splits=8), "found 8 splits of K", id="splits"),
        pytest.param(FEW, WIDE_FP8, "which is not in this build", id="no such kernel"),
    ],
)
def test_it_is_legal_where_the_gather_is(
    problem: Problem, kernel: KernelConfig, reason: str | None
) -> None:
    built = cost_model.default_kernels(name=problem.format)
    found = legality.why_illegal(problem, Plan(GATHER, kernel), built)
    assert (found is None) == (reason is None), found
    assert reason is None or (found is not None and reason in found)


def test_it_takes_the_gather_and_the_kernel_alone() -> None:
    alone = predict_us(replace(FEW, world_size=1), Plan(PUSH, KERNEL))
    by_library, by_kernel = predict_us(FEW, GATHERED), predict_us(FEW, PLAN)
    assert alone is not None and by_library is not None and by_kernel is not None
    gather_us = by_library - cost_model.matmul_us(FEW)
    assert by_kernel == pytest.approx(
        gather_us + alone + cost_model.constants_for(FEW).call_us, rel=1e-9
    )


@pytest.fixture
def is_compared() -> Iterator[None]:
    """Constants by which such plans are the best of those that gather first."""
    real = cost_model.constants(DEFAULT_GPU)
    margins = {"gather": 1.0, "large gather": 1.0, "unfused": 1.5}
    margins |= {GATHERED_TO_KERNEL: 0.5, f"large {GATHERED_TO_KERNEL}": 0.5}
    given = {"16 bits": {"choice_margins": {ALL_GATHER_MATMUL: margins}}}
    gpu_constants.give(DEFAULT_GPU, replace(real, of_ranks={"2": given}))
    yield
    gpu_constants.give(DEFAULT_GPU, real)


def test_the_model_takes_it_where_it_was_compared(is_compared: None) -> None:
    choice = planner_of(KERNELS).choose(FEW)
    assert choice.plan.family == GATHERED_TO_KERNEL
    assert legality.why_illegal(FEW, choice.plan, KERNELS) is None
    times = dict(planner_of(KERNELS).alternatives(FEW))
    assert times[choice.plan] == choice.predicted_us
    assert not planner_of(KERNELS).fused_plan(FEW).gathers_first
    assert studies.candidates(planner_of(KERNELS), FEW)[0] == choice.plan
    # Calls with an activation, of many rows or between other numbers of ranks have no such plan.
    for other in (replace(FEW, m=8192), replace(FEW, world_size=4)):
        families = {plan.family for plan, _ in planner_of(KERNELS).alternatives(other)}
        assert GATHERED_TO_KERNEL not in families


def test_a_row_of_it_serves_others_of_few_rows() -> None:
    row = Row(448, PLAN, 1.0, agmm="0.3.0")
    assert planner(row).choose(FEW).row == row
    assert not planner(row).fused_plan(FEW).gathers_first
    tuned = GatherRow(FEW, row, "", KERNELS)
    for rows, is_legal in ((384, True), (1792, True), (4096, False)):  # whose bytes are too many
        at = At(replace(FEW, m=rows))
        assert tuned.is_legal(at) == is_legal
        plan, us = tuned.here(at)
        assert plan.transport == GATHER and plan.kernel is not None
        assert plan.kernel.kernel == KERNEL.kernel and us == predict_us(at.problem, plan)


@pytest.mark.parametrize("problem", [FEW, FP8], ids=["bf16", "fp8"])
def test_tuning_tries_the_best_few_kernels(problem: Problem) -> None:
    built = cost_model.default_kernels(name=problem.format)
    found = candidates.candidates(problem, built, UNFUSED)
    own = [plan for plan in found if plan.family == GATHERED_TO_KERNEL]
    assert GATHERED in found and len(own) == candidates.KERNELS_BEHIND_A_GATHER
    assert all(legality.why_illegal(problem, plan, built) is None for plan in own)
    times = [predict_us(problem, plan) for plan in own]
    assert times == sorted(times, key=lambda us: us or 0.0)
