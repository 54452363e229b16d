"""The tuner on GPUs, and ops that follow plans: the chosen one, and the unfused one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tune_gpu_work
from at_hand import needs_nccl, needs_two

from agmm.bench import tuner, tuning_session
from agmm.planning import tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.legality import why_illegal
from agmm.planning.planner import Planner
from agmm.planning.plans import UNFUSED, Row
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE, Problem
from agmm.planning.shapes import Shape
from agmm.planning.tables import Key
from agmm.testing.ranks import RankPool

pytestmark = [needs_two, needs_nccl]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    return tmp_path


@pytest.mark.parametrize("return_A", [False, True])
def test_tune(return_A: bool) -> None:
    shapes = [Shape(2048, 1024, 2048), Shape(16, 512, 1024)]
    options = tuning_session.TuningOptions.of("cuda", 2, shapes, return_A=return_A)
    keeper = tuner.Keeper(2)
    for outcome in tuner.tune(options):
        keeper.add(outcome)
        assert outcome.failures == []
        assert outcome.row is not None
        assert outcome.row.unfused_us is not None
        assert outcome.row.us <= 1.05 * outcome.row.unfused_us
    assert keeper.error is None
    problem = outcome.problem
    table = tables.user(problem.gpu, 2)
    assert table is not None
    for shape in shapes:
        (row,) = table.rows(replace(problem, n=shape.N, k=shape.K))
        assert row.m == shape.M
        assert why_illegal(problem, row.plan, kernels_of(ALL_GATHER_MATMUL, "bfloat16")) is None
    assert list(tuner.tune(options)) == []


def test_tune_an_all_reduce() -> None:
    """The row of a call is found again, whatever its plan."""
    options = tuning_session.TuningOptions.of(
        "cuda", 2, [Shape(2047, 1024, 2048)], op=MATMUL_ALL_REDUCE
    )
    (outcome,) = tuner.tune(options)
    assert outcome.failures == [] and outcome.row is not None
    assert {plan.transport.name for plan in outcome.medians} >= {"scatter", "unfused"}
    assert outcome.row.unfused_us is not None
    assert outcome.row.us <= 1.05 * outcome.row.unfused_us
    problem = outcome.problem
    tables.save(problem.gpu, 2, [(Key.of(problem), outcome.row)])
    table = tables.user(problem.gpu, 2)
    assert table is not None
    found = Planner(kernels_of, [table]).choose(problem)
    assert (problem.m, found.plan) == (2048, outcome.row.plan)


def test_the_op_is_unfused_where_the_table_says_so() -> None:
    gpu = tables.gpu_name(torch.cuda.get_device_name(0))
    shape = Shape(512, 256, 512)
    problem = Problem(shape.M, shape.N, shape.K, world_size=2, gpu=gpu)
    tables.save(gpu, 2, [(Key.of(problem), Row(shape.M, UNFUSED, 1.0))])
    with RankPool(2, "cuda") as pool:
        assert pool.run(tune_gpu_work.fused_calls_made, shape, False) == [0, 0]
        assert pool.run(tune_gpu_work.fused_calls_made, shape, True) == [1, 1]
