"""Calls without elements take their turn: ranks that differ are told so, and where none has any the
results are right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import empty_work
import pytest
import quick

from agmm.testing.ranks import RankError, RankPool

LIMIT_S = "60"
"""The limit of a wait; ranks that differ are told long before."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, env={"AGMM_TIMEOUT_S": LIMIT_S}) as pool:
        yield pool


def _names_both(told: str, sizes: tuple[str, str], rank: int) -> bool:
    """Whether both ranks and their sizes are named, rank 0's being the first of ``sizes``."""
    own, _, theirs = told.rpartition(f"rank {1 - rank}")
    return f"rank {rank}" in own and sizes[rank] in own and sizes[1 - rank] in theirs


def _sizes(name: str) -> tuple[str, str]:
    """Parts of the shapes in which the ranks differ."""
    if name == "scatter, last dimension":
        return "[64, 8]", "[64, 0]"
    if "columns" in name:
        return "[64, 4]", "[64, 0]"
    if name == "scatter, several":
        return "[8, 8]", "[0, 8]"
    if name in ("scatter, dimension 0", "scatter, dimension 1"):
        return ("[8, 8, 64]", "[0, 8, 64]") if name[-1] == "0" else ("[3, 8, 64]", "[3, 0, 64]")
    if name == "gather, dimension":
        return "[3, 4, 64]", "[3, 0, 64]"
    if name == "all_gather, dimension":
        return "[3, 4]", "[3, 0]"
    is_scattered = name.startswith(("scatter", "reduce_scatter"))
    return ("[8, 64]" if is_scattered else "[4, 64]"), "[0, 64]"


@pytest.mark.parametrize("name", empty_work.OPS)
def test_a_groups_first_call_names_both(two_ranks: RankPool, name: str) -> None:
    started = time.monotonic()
    for rank, told in enumerate(two_ranks.run(empty_work.first_calls, name)):
        assert told.startswith("group: found different calls on its ranks, wanted the same ones")
        assert _names_both(told, _sizes(name), rank), told
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("before", "name", "rows"),
    [
        *((name, name, 4) for name in ("gather", "gather, unfused", "gather, fp8")),
        *quick.first(1, ((name, name, 4) for name in ("scatter", "all-reduce", "all_gather"))),
        *(
            pytest.param(name, name, 4, marks=pytest.mark.slow)
            for name in ("gather, 4 bits", "scatter, columns", "scatter, fp8", "all_gather, later")
        ),
        pytest.param("all_reduce_rms_norm", "all_reduce_rms_norm", 4, marks=pytest.mark.slow),
        *quick.first(
            2, (("all_gather", name, 4) for name in ("layers", "gather", "scatter", "all-reduce"))
        ),
        ("gather", "all_reduce, integers", 4),
        # Their slots have to grow.
        ("gather", "gather", 3000),
        ("all_gather", "all_gather", 3000),
    ],
)
def test_a_later_call_names_both(before: str, name: str, rows: int) -> None:
    sizes = tuple(size.replace("[4,", f"[{rows},") for size in _sizes(name))
    with RankPool(2, env={"AGMM_TIMEOUT_S": LIMIT_S}) as pool:
        pool.submit(empty_work.later_calls, before, name, rows)
        started = time.monotonic()
        try:
            told = pool.collect()
        except RankError:
            assert pool.join(20) == [124, 124]
            lines = [pool.stderr(rank).splitlines() for rank in (0, 1)]
            told = [next(x for x in own if x.startswith("agmm: rank")) for own in lines]
        assert time.monotonic() - started < 30
    for rank, words in enumerate(told):
        assert _names_both(words, (sizes[0], sizes[1]), rank), words
        assert re.search(r"different calls", words)


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_calls_without_elements_on_all_ranks(
    two_ranks: RankPool, pool: RankPool, world_size: int
) -> None:
    ranks = two_ranks if world_size == 2 else pool
    for faults in ranks.run(empty_work.all_empty, list(empty_work.OPS), 3):
        assert faults == []


def test_sums_over_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(empty_work.no_columns_of_a) == [[], []]


def test_scales_of_shards_without_rows(two_ranks: RankPool) -> None:
    assert two_ranks.run(empty_work.scales_of_nothing) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        (".1", 2),
        (".0.1", 4),
        ("0000", None),
        ("....", None),
        (".00|0", None),  # to which rank 0 has not come yet
        (".1|" + 200 * "0", 2),  # rank 1's host is far ahead
        (20 * ".1" + "|" + 80 * "1.", 2),
        ("0001|00", 4),
        ("1." + 100 * "0.", 1),
        ("..0|" + 4000 * "0.", None),  # what one remembers and the other has forgotten
        (1500 * "0." + "|1", None),
        (1500 * "0." + "1", 3001),
    ],
)
def test_ranks_on_gpus_that_wait_long_find_the_call(
    two_ranks: RankPool, calls: str, number: int | None
) -> None:
    """The numbers of the calls are all that counts here."""
    for rank, (first, *rest) in enumerate(two_ranks.run(empty_work.look_for_one, calls)):
        assert first == ""  # once may be a moment at which a call ends
        for found in rest[-1:]:
            if number is None:
                assert found == ""
                continue
            assert found.startswith(f"rank {rank}: the ranks made different calls; rank 1: call ")
            words = f"the call of {(number - 1) // 2}"
            assert f"rank 1: call {number} of the group, {words}, which has no" in found
            assert "rank 0: one that has some" in found


def test_what_was_told_long_ago_does_not_count(two_ranks: RankPool) -> None:
    assert two_ranks.run(empty_work.look_for_one, ".1", late=False)[0] == ["", "", ""]


def test_threads_whose_calls_have_rows_in_turn(two_ranks: RankPool) -> None:
    assert two_ranks.run(empty_work.in_threads, 3, 30) == [[], []]
