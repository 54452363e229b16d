"""Ranks that are late, that call differently, whose threads call at once, that have no room left,
or whose group has ended: on CPU ranks."""

from __future__ import annotations

import re
import time

import pytest
import quick
import step_work

import agmm
from agmm.testing.ranks import RankPool


@pytest.mark.parametrize(
    ("kind", "words"),
    quick.first(
        7,
        [
            ("rows", ["A_shard [4, 6] float32 row-major", "A_shard [5, 6] float32 row-major"]),
            ("K", ["A_shard [4, 6] float32", "A_shard [4, 7] float32"]),
            ("dtype", ["A_shard [4, 6] float32", "A_shard [4, 6] float64"]),
            ("return_A", ["return_A = False", "return_A = True"]),
            ("op", ["all_gather_matmul(A_shard [4, 6]", "matmul_reduce_scatter(A [4, 6]"]),
            ("scatter", ["matmul_reduce_scatter(A [4, 6]", "matmul_reduce_scatter(A [6, 6]"]),
            ("scatter_dim", ["scatter_dim = 0", "scatter_dim = 1"]),
            (
                "pairs",
                ["B [[6, 2] float32 row-major, [6, 2]", "B [[6, 3] float32 row-major, [6, 3]"],
            ),
            ("reduce_op", ["reduce_op = 'sum'", "reduce_op = 'avg'"]),
            ("all_reduce", ["matmul_all_reduce(A [3, 6]", "matmul_all_reduce(A [4, 6]"]),
            ("sum", ["matmul_reduce_scatter(A [4, 6]", "matmul_all_reduce(A [4, 6]"]),
            ("path", ["return_A = False", "gather_dim = 0"]),
        ],
    ),
)
def test_calls_that_differ_are_both_named(kind: str, words: list[str]) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        started = time.monotonic()
        pool.submit(step_work.differ, kind)
        assert pool.join(25) == [124, 124]
        assert time.monotonic() - started < 15
        for rank in (0, 1):
            (line,) = [x for x in pool.stderr(rank).splitlines() if x.startswith("agmm:")]
            assert line.startswith(f"agmm: rank {rank}: chunk {1 - rank} from rank {1 - rank} ")
            own, theirs = line.split("; this rank: ")[1].split(f"; rank {1 - rank}: ")
            assert own.startswith("call 2 of the group, ")
            assert theirs.startswith("call 2 of the group, ")
            assert words[rank] in own
            assert words[1 - rank] in theirs


KINDS = list(step_work.OPS)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(kinds, marks=pytest.mark.slow if i % 3 else ())
        for i, kinds in enumerate(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True))
    ],
    ids=" ".join,
)
def test_a_difference_names_the_op_that_each_rank_called(kinds: tuple[str, str]) -> None:
    own, theirs = (step_work.OPS[kind][0] for kind in kinds)
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(step_work.differ_in_ops, kinds)
        assert pool.join(25) == [124, 124]
        (line,) = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm: rank")]
        assert f"; this rank: call 2 of the group, {own}(" in line
        assert f"; rank 1: call 2 of the group, {theirs}(" in line


def test_each_public_function_that_ranks_call_together_is_tried() -> None:
    functions = {
        name
        for module in (agmm, agmm.collectives, agmm.moe)
        for name in module.__all__
        if "group" in getattr(getattr(module, name), "__annotations__", {})
    }
    assert functions == {name for name, _ in step_work.OPS.values()}


@pytest.mark.parametrize(
    "kind",
    [
        "unfused",
        pytest.param("scatter", marks=pytest.mark.slow),
        pytest.param("all_reduce", marks=pytest.mark.slow),
        pytest.param("backward", marks=pytest.mark.slow),
    ],
)
def test_late_rank_ends_a_wait_of_any_path(kind: str) -> None:
    environment = {"AGMM_TIMEOUT_S": "2", "AGMM_WARN_S": "0.5"}
    with RankPool(2, env=environment) as pool:
        pool.submit(step_work.one_is_late, kind, 60.0)
        started = time.monotonic()
        pool.processes[0].join(20)
        assert time.monotonic() - started < 15
        assert pool.processes[0].exitcode == 124
        warning, end = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm:")]
        assert re.match(r"agmm: rank 0 has waited \d\.\d s, since .* from rank 1: ", warning)
        assert re.match(r"agmm: rank 0 waited 2\.\d s for chunk 1 from rank 1: ", end)
        pool.kill()


@pytest.mark.parametrize("kind", quick.first(2, ["unfused", "first", "scatter", "backward"]))
def test_late_rank_is_waited_for_within_the_limit(kind: str) -> None:
    environment = {"AGMM_TIMEOUT_S": "30", "AGMM_WARN_S": "0.5"}
    with RankPool(2, env=environment) as pool:
        pool.run(step_work.one_is_late, kind, 1.5)
        lines = [x for x in pool.stderr(0).splitlines() if x.startswith("agmm:")]
        assert len(lines) == 1
        assert re.search(r" has waited [01]\.\d s, since ", lines[0])
        if kind == "first":
            assert "for ranks [1] to make their first call in this group" in lines[0]


@pytest.mark.slow
def test_first_call_of_a_group_has_a_limit() -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "1"}) as pool:
        pool.submit(step_work.one_is_late, "first", 4.0)
        with pytest.raises(Exception, match=r"rank 0: waited 1 s for ranks \[1\] to make their "):
            pool.collect()


@pytest.mark.parametrize("kind", quick.first(1, ["gather", "scatter", "reduce"]))
def test_threads_of_a_rank_take_turns(pool: RankPool, kind: str) -> None:
    for _ in range(3):
        assert pool.run(step_work.threads_on_one_group, 4, 20, kind) == [[]] * 5


def test_large_call_goes_unfused_where_there_is_no_room_for_it() -> None:
    with RankPool(2) as pool:
        for found in pool.run(step_work.with_little_room, 20_000, 500_000):
            assert found["before"]
            assert found["large"] == [True] * 3
            assert found["after"]
            assert found["kept"]
            (warning,) = found["warnings"]
            assert re.match(
                r"agmm takes the unfused path: workspace: no room for gather buffers of 1280000 "
                r"bytes: rank 1: shared memory: reserving \d+ bytes in /dev/shm: File too large",
                warning,
            )
            assert found["strict"].startswith("workspace: no room for gather buffers of 1280000 ")


def test_group_without_any_room_goes_unfused() -> None:
    with RankPool(2) as pool:
        for good, caught in pool.run(step_work.without_any_room):
            assert good
            assert len(caught) == 1
            assert "rank 1: shared memory: reserving " in caught[0]


def test_destroyed_group_is_refused(pool: RankPool) -> None:
    for errors in pool.run(step_work.calls_after_the_groups_end):
        assert len(errors) == 6
        assert all(error.startswith("group: found ") for error in errors)


@pytest.mark.slow
def test_words_of_an_earlier_group_are_not_read(pool: RankPool) -> None:
    tokens = pool.run(step_work.same_name_again, 4)
    assert all(of_rank == tokens[0] for of_rank in tokens)
    assert len(set(tokens[0])) == 4
    for late in range(5):
        found = pool.run(step_work.first_call_after_words_of_the_past, late)
        assert found == [[str(rank) for rank in range(5)]] * 5


def test_exchanges_that_differ_are_named(pool: RankPool) -> None:
    for rank, error in enumerate(pool.run(step_work.exchange_of_different_things)):
        other = 1 - rank % 2
        fruit = ("apples", "pears")
        assert error == (
            "group: found different calls on its ranks, wanted the same ones: rank "
            f"{rank} is about to exchange {fruit[rank % 2]}; rank {other} is about to exchange "
            f"{fruit[other]}"
        )


def test_a_strided_shard_in_a_first_call_is_named() -> None:
    with RankPool(2) as pool:
        for error in pool.run(step_work.first_call_of_a_strided_shard):
            assert error is not None
            for layout in ("row-major", "column-major"):
                assert f"all_gather_matmul(A_shard [4, 6] float32 {layout}" in error
