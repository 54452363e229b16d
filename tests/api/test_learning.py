"""`agmm.learn_plans` on CPU ranks: they end with the plan that is the fastest on the slowest rank,
in step whatever happens in between."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import learning_work as work
import pytest

import agmm
from agmm.testing.ranks import RankPool

CHUNKED = ["push", "push, 2 chunks per shard", "push, 4 chunks per shard"]
PLANS = (*CHUNKED, "push, 8 chunks per shard", "unfused")
rows = itertools.count(301)
"""Numbers of rows that no other test has."""


@pytest.fixture(params=[2, 3])
def pool(rank_pools: Callable[..., RankPool], request: pytest.FixtureRequest) -> RankPool:
    return rank_pools(request.param)


@pytest.fixture
def pair(rank_pools: Callable[..., RankPool]) -> RankPool:
    return rank_pools(2)


@pytest.mark.parametrize("best", PLANS)
def test_the_fastest_on_the_slowest_rank_is_kept(pool: RankPool, best: str) -> None:
    times = [dict.fromkeys(PLANS, 30.0) | {best: 20.0} for _ in range(pool.world_size)]
    # The first rank alone would have another one, which is the slowest for the last.
    other = next(plan for plan in PLANS if plan != best)
    times[0][other] = 1.0
    times[-1][other] = 90.0
    m = next(rows)
    found = pool.run(work.ends_with, times, "gather", m)
    model_us = 90.0 if other == "push" else 20.0 if best == "push" else 30.0
    for learnt, tried in found:
        ((op, plans, calls, kept, us, found_model_us),) = learnt
        assert (op, plans, kept, us) == ("all_gather_matmul", PLANS, best, 20.0)
        assert found_model_us == model_us
        assert 10 <= calls <= 30
        assert tried[: len(PLANS)] == list(PLANS)
        assert tried == found[0][1]


@pytest.mark.parametrize(
    ("op", "plans"), [("scatter", ("push", "unfused")), ("scaled", PLANS)], ids=["scatter", "fp8"]
)
def test_other_ops_learn_too(pair: RankPool, op: str, plans: tuple[str, ...]) -> None:
    times = [{"unfused": 20.0}] * 2
    for learnt, _ in pair.run(work.ends_with, times, op, next(rows)):
        assert learnt[0][1] == plans
        assert learnt[0][3:] == ("unfused", 20.0, 100.0)


def test_calls_of_a_kind_are_kept_once_it_is_learnt(pair: RankPool) -> None:
    for counts in pair.run(work.kept_when, next(rows)):
        assert counts[:6] == [0] * 6
        assert counts[-1] == 1


def test_late_ranks(pool: RankPool) -> None:
    found = pool.run(work.late, next(rows), CHUNKED[1])
    assert {one[0][3] for one in found} == {CHUNKED[1]}


def test_a_refused_call_in_between_counts_for_nothing(pool: RankPool) -> None:
    found = pool.run(work.raising, next(rows), CHUNKED[2])
    assert found[0][2] > 3
    for learnt, tried, _ in found:
        assert learnt[0][3] == CHUNKED[2]
        assert tried == found[0][1]


def test_a_call_that_raises_before_it_begins_is_made_again_by_its_plan(pool: RankPool) -> None:
    found = pool.run(work.raising_within, next(rows))
    for learnt, tried in found:
        assert learnt[0][3] == "push"
        assert tried == found[0][1]


def test_groups_learn_apart(pair: RankPool) -> None:
    plans = CHUNKED[1], "unfused"
    assert pair.run(work.two_groups, next(rows), plans) == [list(plans)] * 2


def test_what_a_group_had_begun_ends_with_it(pair: RankPool) -> None:
    for before, after in pair.run(work.ends_early, next(rows)):
        assert before[0][2:4] == (3, None)
        assert after[0][3] is not None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_try_nothing(pair: RankPool, backend: str) -> None:
    for in_graphs, learnt, tried in pair.run(work.compiled, next(rows), backend):
        assert in_graphs == 0
        assert learnt[0][2] == len(tried)
        assert learnt[0][3] == "unfused"


def test_a_rank_that_learns_alone_is_refused_by_name(pool: RankPool) -> None:
    settings = ["'on' on rank 0", *(f"'off' on rank {r}" for r in range(1, pool.world_size))]
    words = (
        f"AGMM_LEARN: found {', '.join(settings)} of a group, wanted the same on all its ranks "
        "(agmm.learn_plans sets it, too)"
    )
    assert pool.run(work.differing, next(rows)) == [words] * pool.world_size


def test_ranks_of_which_each_has_a_k_of_its_own_stay_in_step(pair: RankPool) -> None:
    reason = "its ranks differ in K or in the layout of B"
    assert pair.run(work.with_own_k, next(rows)) == [("push", reason)] * 2


def test_what_has_one_plan_or_names_it_is_not_learnt(pair: RankPool) -> None:
    assert pair.run(work.not_learnt, next(rows)) == [[], []]


def test_what_was_learnt_is_in_the_table_and_new_processes_take_it(
    pair: RankPool, tmp_path: Path
) -> None:
    m = next(rows)
    times = [{CHUNKED[2]: 20.0, "unfused": 40.0}] * 2
    pair.run(work.ends_with, times, "gather", m, str(tmp_path))
    (row,) = json.loads((tmp_path / "cpu-x2.json").read_text())["rows"]
    assert row["plan"] == {"transport": "push", "chunks_per_shard": 4}
    assert (row["m"], row["us"], row["unfused_us"]) == (2 * m, 20.0, 40.0)
    assert row["agmm"] == f"{agmm.__version__}, learnt"  # `agmm tune` measures it anew
    with RankPool(2) as new:
        assert new.run(work.takes, m, str(tmp_path)) == [([4] * 6, [])] * 2


def test_without_learning_there_is_no_trace(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(work.off, next(rows), str(tmp_path)) == [([], [], [], 1)] * 2


def test_another_value_is_refused() -> None:
    with pytest.raises(agmm.InvalidArgument, match="on: found 'yes', wanted True or False"):
        agmm.learn_plans("yes")  # type: ignore[arg-type]
