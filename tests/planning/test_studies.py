"""Which plans a group that learns tries, and when: by numbers of calls and reports alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from test_plan import KERNELS, planner_of

from agmm.planning import studies
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan, Row
from agmm.planning.problems import CPU, MATMUL_REDUCE_SCATTER, Problem
from agmm.planning.studies import Report, Study
from agmm.planning.transports import PUSH

PROBLEM = Problem(640, 3584, 8192, world_size=2)
ON_CPU = replace(PROBLEM, gpu=CPU)
PLANS = [Plan(PUSH), Plan(PUSH, chunks_per_shard=2), UNFUSED]


class Took(NamedTuple):
    time: float | None

    def us(self) -> float | None:
        return self.time


def run(study: Study, times: Sequence[float | None]) -> list[int | None]:
    """The plans that calls take until the agreement is due."""
    taken = []
    while not study.is_due:
        index = study.tried
        taken.append(index)
        study.note(None if index is None else Took(times[index]), ON_CPU)
    return taken


@pytest.mark.parametrize("rows", [64, 640, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_plans_on_a_gpu_are_the_best_few_within_bounds(rows: int, ranks: int) -> None:
    planner, problem = planner_of(KERNELS), replace(PROBLEM, m=rows, world_size=ranks)
    plans = studies.candidates(planner, problem)
    predicted = dict(planner.alternatives(problem))
    times = [predicted[plan] for plan in plans]
    assert plans[0] == planner.plan(problem)
    assert 2 <= len(plans) == len(set(plans)) <= studies.MOST_PLANS
    best = min(us for us in predicted.values() if us is not None)
    assert all(us is not None and us <= 1.5 * best for us in times)
    over = [max(1.0, us / times[0]) for us in times if us is not None and times[0] is not None]
    assert sum(over) / len(over) <= 1.10


def test_other_ways_come_before_other_kernels() -> None:
    planner = planner_of(KERNELS)
    plans = studies.candidates(planner, replace(PROBLEM, m=1024))
    assert len({type(plan.transport) for plan in plans}) > 1


def test_several_weights_learn_only_whether_they_are_fused() -> None:
    plans = studies.candidates(planner_of(KERNELS), PROBLEM, one_kernel=False)
    assert len([plan for plan in plans if plan.kernel is not None]) <= 1


def test_torchs_op_is_tried_only_where_it_is_the_models() -> None:
    problem = replace(PROBLEM, op=MATMUL_REDUCE_SCATTER, m=4096)
    planner = planner_of([kernel for kernel in KERNELS if not kernel.is_streaming])
    plans = studies.candidates(planner, problem)
    assert planner.plan(problem) == BY_TORCH or BY_TORCH not in plans


def test_plans_go_in_turn_and_the_first_of_each_is_no_sample() -> None:
    study, times = Study(ON_CPU, PLANS), [30.0, 29.0, 31.0]
    assert run(study, times) == [0, 1, 2] * 2 + [None] * studies.PASSED
    assert study.report().us == times
    study.agree([study.report()])
    assert run(study, times) == [0, 1, 2] * 6 + [None] * studies.PASSED
    assert {index: len(found) for index, found in study.readings.items()} == {0: 7, 1: 7, 2: 7}


def test_plans_that_are_far_behind_are_tried_no_more() -> None:
    """The model's own goes on, to be compared with the best."""
    study, times = Study(ON_CPU, PLANS), [30.0, 40.0, 20.0]
    run(study, times)
    study.agree([study.report()])
    assert study.is_open
    assert run(study, times) == [0, 2] * 6 + [None] * studies.PASSED
    study.agree([study.report()])
    assert (study.kept, study.us, study.times) == (UNFUSED, 20.0, times)
    study = Study(ON_CPU, PLANS)
    run(study, [20.0, 30.0, 40.0])
    study.agree([study.report()])
    assert (study.kept, study.us, study.calls) == (PLANS[0], 20.0, 8)


@pytest.mark.parametrize("count", range(2, studies.MOST_PLANS + 1))
def test_a_kind_takes_6_to_30_calls(count: int) -> None:
    plans = [Plan(PUSH, chunks_per_shard=c) for c in range(1, count + 1)]
    for slow in (0, 1, count - 1):
        times = [1.0] * (count - slow) + [2.0] * slow
        study = Study(ON_CPU, plans)
        while study.is_open:
            run(study, times)
            study.agree([study.report()])
        assert 6 <= study.calls <= 30


def settle(study: Study, *of_ranks: Sequence[float | None] | None) -> None:
    """What ranks agree on that tell the same in both exchanges."""
    study.agree(reports(*of_ranks))
    if study.is_open:
        run(study, [1.0] * len(study.plans))
        study.agree(reports(*of_ranks))


def reports(*of_ranks: Sequence[float | None] | None) -> list[Report]:
    return [Report(["k=1"], None if us is None else [*us]) for us in of_ranks]


def test_the_largest_over_the_ranks_counts() -> None:
    study = Study(ON_CPU, PLANS)
    settle(study, [30.0, 1.0, 29.0], [30.0, 31.0, 28.0])
    assert (study.kept, study.us, study.times) == (UNFUSED, 29.0, [30.0, 31.0, 29.0])


def test_a_plan_that_is_hardly_ahead_does_not_take_the_place_of_the_models() -> None:
    study = Study(ON_CPU, PLANS)
    settle(study, [30.0, 29.9, 40.0])
    assert (study.kept, study.us) == (PLANS[0], 30.0)


def test_a_plan_that_one_rank_could_not_time_is_left_out() -> None:
    study = Study(ON_CPU, PLANS)
    settle(study, [30.0, 1.0, 20.0], [30.0, None, 20.0])
    assert study.kept == UNFUSED
    study = Study(ON_CPU, PLANS)
    settle(study, [None, None, None])
    assert (study.kept, study.reason) == (PLANS[0], "no plan has served its calls")


def test_missing_times_are_asked_for_later_and_not_for_ever() -> None:
    study, waited = Study(ON_CPU, PLANS), []
    run(study, [None, 1.0, 1.0])
    assert study.report().us is None
    while study.is_open:
        study.agree([study.report(), study.report()._replace(us=[1.0, 1.0, 1.0])])
        if study.is_open:
            waited.append(len(run(study, [])))
    assert waited == [8, 16, 32, 64, 128, 256]
    assert (study.kept, study.reason) == (PLANS[0], "the times of its calls did not come")


def test_times_that_come_late_count() -> None:
    study = Study(ON_CPU, PLANS)
    calls = len(run(study, [1.0, 1.0, 1.0]))
    study.agree(reports([30.0, 20.0, 40.0], None))
    assert study.is_open
    assert study.tried is None
    assert run(study, []) == [None] * studies.POSTPONED_BY
    assert study.calls == calls + studies.POSTPONED_BY
    settle(study, [30.0, 20.0, 40.0], [30.0, 20.0, 40.0])
    assert study.kept == PLANS[1]


def test_ranks_that_ask_for_different_problems_keep_the_models_plan() -> None:
    study = Study(ON_CPU, PLANS)
    study.agree([Report(["k=1"], [30.0, 1.0, 1.0]), Report(["k=2"], [30.0, 1.0, 1.0])])
    assert (study.kept, study.us) == (PLANS[0], None)


def test_one_plan_is_no_study() -> None:
    assert not Study(ON_CPU, PLANS[:1]).is_open


def test_what_was_learnt_decides_for_its_problem_alone() -> None:
    planner = planner_of(KERNELS)
    before, fused = planner.plan(PROBLEM), planner.fused_plan(PROBLEM)
    other = next(
        plan for plan, _ in planner.alternatives(PROBLEM) if plan.kernel and plan != before
    )
    of_next = planner.plan(replace(PROBLEM, m=PROBLEM.m + 2))
    planner.learn(PROBLEM, Row(PROBLEM.m, other, 1.0))
    assert planner.plan(PROBLEM) == planner.fused_plan(PROBLEM) == other
    assert planner.choose(PROBLEM).source == "learnt while running"
    assert planner.plan(replace(PROBLEM, m=PROBLEM.m + 2)) == of_next
    planner.learn(PROBLEM, Row(PROBLEM.m, UNFUSED, 1.0))
    assert (planner.plan(PROBLEM), planner.fused_plan(PROBLEM)) == (UNFUSED, fused)
