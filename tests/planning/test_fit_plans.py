"""`benchmarks/fit_plans.py` on times that are made up by other constants."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agmm.bench.candidates import candidates
from agmm.planning import cost_model, formats
from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.planner import Planner
from agmm.planning.predictions import predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, Problem
from benchmarks import fit_plans
from benchmarks.descent import FITTED
from benchmarks.fit_plans import give
from benchmarks.measured_plans import NAMES, Product, by_cell, judge, never_best, plan_of
from benchmarks.measured_plans import Cell as MeasuredCell
from benchmarks.measured_plans import uncertainty as uncertainty_of
from benchmarks.plans import HELD_SEEDS, Cell, drawn

GPU = "nvidia-h200"
COUNT = 24


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    before = cost_model.constants(GPU)
    gpu_constants.give(GPU, replace(before, of_ranks={}))
    yield
    gpu_constants.give(GPU, before)


def start_of(kind: str) -> Constants:
    return replace(gpu_constants.constants_of_kind(GPU, kind, 2), formats={}, of_ranks={})


def entries_of(cell: Cell, **truth: Any) -> list[dict[str, Any]]:
    """What a run measures where other constants are right."""
    planner = Planner(cost_model.default_kernels)
    entries = []
    for which, seed in (("fit", 0), ("held", HELD_SEEDS)):
        for shape in itertools.islice(drawn(cell, seed, 2), COUNT):
            problem = Problem(*shape, op=cell.op, format=NAMES[cell.format], world_size=2)
            start = start_of(formats.of(problem.format).kind)
            old = planner.choose(problem).plan
            plans = candidates(problem, cost_model.default_kernels(cell.op, problem.format), old)
            gpu_constants.give(
                FITTED, gpu_constants.with_changes(start, {**fit_plans.BEGIN, **truth})
            )
            us = {plan.name: predict_us(replace(problem, gpu=FITTED), plan) for plan in plans}
            least_us = min(each for each in us.values() if each)
            entries.append(
                {
                    **cell._asdict(),
                    **shape._asdict(),
                    "set": which,
                    "gpu": GPU,
                    "world_size": 2,
                    "plan": old.name,
                    "best_us": least_us,
                    "us": us,
                }
            )
    return entries


GATHER = Cell(ALL_GATHER_MATMUL, "bf16")
SCATTER = Cell(MATMUL_REDUCE_SCATTER, "bf16")


@pytest.mark.parametrize(
    ("cell", "truth"),
    [
        pytest.param(GATHER, {"sm_push_us": 18.0}, id="SM push", marks=pytest.mark.slow),
        pytest.param(
            GATHER,
            {"gathered_factor": {"128x192x64_2x1_cooperative": 0.7}},
            id="a kernel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SCATTER,
            {"scatter_tile_us": {"128x256x64_2x1_cooperative": (0.0125, 2.0)}},
            id="a kernel that scatters",
        ),
        pytest.param(
            Cell(MATMUL_REDUCE_SCATTER, "fp8"), {"scatter_us": 30.0}, id="fp8 that scatters"
        ),
    ],
)
def test_what_differs_is_found_out_and_holds_for_other_shapes(
    cell: Cell, truth: dict[str, Any]
) -> None:
    ((which, products),) = by_cell(entries_of(cell, **truth)).items()
    held = [product for product in products if product.is_held]
    before = judge(held, with_tables=False)
    start = start_of(which.kind)
    steps = 60 if cell.op == MATMUL_REDUCE_SCATTER else 25  # which take longer
    fitted_to = [product for product in products if not product.is_held]
    fitted = fit_plans.fit(fitted_to, replace(start, gpu=FITTED), steps)
    give(which, fit_plans.changes(start, fitted) | {"gpu": GPU})
    after = judge(held, with_tables=False)
    assert len(before.ratios) == COUNT
    lost_before, lost_after = (sum(each - 1 for each in j.ratios) for j in (before, after))
    assert lost_before > 0.05
    assert lost_after < 0.6 * lost_before


def test_plans_are_read_by_their_names() -> None:
    for entry in entries_of(GATHER)[:3]:
        assert all(plan_of(name).name == name for name in entry["us"])


def test_what_is_written_is_what_plans_are_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{GPU}.json"
    path.write_text(json.dumps({"gpu": GPU, "of_ranks": {"4": {}}}))
    tables = SimpleNamespace(__file__=str(tmp_path / "t.py"))
    monkeypatch.setattr(fit_plans, "tables", tables)
    found = {"sm_push_us": 3.0, "gathered_factor": {"128x192x64_2x1_cooperative": 1.5}}
    cell = MeasuredCell(GPU, 2, formats.BITS_16)
    fit_plans.write(cell, found)
    assert json.loads(path.read_text())["of_ranks"] == {"4": {}, "2": {formats.BITS_16: found}}
    usual = cost_model.constants(GPU)
    give(cell, found)
    for ranks, format_ in itertools.product((1, 2, 4), NAMES.values()):
        problem = Problem(64, 64, 64, world_size=ranks, format=format_, gpu=GPU)
        c = cost_model.constants_for(problem)
        is_of_it = ranks == 2 and format_ == "bfloat16"
        assert (c.sm_push_us == 3.0) == is_of_it
    between_two = cost_model.constants_for(Problem(64, 64, 64, world_size=2, gpu=GPU))
    factors = between_two.gathered_factor
    assert factors.pop("128x192x64_2x1_cooperative") == 1.5
    assert factors.items() <= usual.gathered_factor.items(), "the other kernels stay"


def test_the_uncertainty_is_that_of_nine_in_ten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_plans, "BEGIN", {})
    entries = entries_of(SCATTER)
    for entry in entries:
        entry["us"] = {name: 1.1 * us for name, us in entry["us"].items()}
        entry["best_us"] *= 1.1
    ((_, products),) = by_cell(entries).items()
    found = uncertainty_of(products)
    assert found[MATMUL_REDUCE_SCATTER]["push"] == pytest.approx(0.1, abs=0.002)


def test_what_is_never_the_best_is_named() -> None:
    slow, fast = "128x128x64_1x1_pingpong", "128x256x64_2x1_cooperative"
    times = {plan_of(f"push, {slow}"): 10.0, plan_of(f"sm8x128, {fast}"): 9.0}
    late = {**times, plan_of("gather"): 8.95}
    problem = Problem(64, 8, 8, world_size=2)
    products = [
        Product(problem, some, min(some.values()), min(some, key=some.__getitem__), False)
        for some in (times, late)
    ]
    assert list(never_best(products)) == [
        "all_gather_matmul: the best of 2 or within 1% of it: gather 1, sm push 2",
        f"all_gather_matmul: never, with how often they were tried: {slow} (2)",
    ]
