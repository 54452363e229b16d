"""`agmm.check_nan` on CPU ranks: what a rank is about to send is looked through."""

from __future__ import annotations

import nan_work
import pytest

from agmm.testing.ranks import RankPool

FOUND = {  # op, tensor and index
    "gather": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "gather kept": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "gather unfused": ("all_gather_matmul", "A_shard", "[2, 1] of [4, 3] float32"),
    "scatter": ("matmul_reduce_scatter", "A @ B", "[4, 0] of [6, 2] float32"),
    "scatter unfused": ("matmul_reduce_scatter", "A @ B", "[4, 0] of [6, 4] float32"),
    "matmul_all_reduce": ("matmul_all_reduce", "A @ B", "[4, 0] of [6, 2] float32"),
    "all_gather": ("all_gather", "x", "[1, 0] of [3, 4] float32"),
    "reduce_scatter": ("reduce_scatter", "x", "[0, 1] of [4, 3] float32"),
    "all_reduce": ("all_reduce", "x", "[2] of [4] bfloat16"),
    "background": ("all_reduce", "x", "[2] of [4] float32"),
    "torch": ("all_reduce", "x", "[2] of [4] complex64"),
    "backward of sum": ("matmul_reduce_scatter", "A @ B", "[3, 0] of [4, 3] float32"),
    "backward of gather": ("all_gather_matmul", "A_shard", "[1, 2] of [2, 4] float32"),
}


def _lines(pool: RankPool, rank: int) -> list[str]:
    return [x for x in pool.stderr(rank).splitlines() if x.startswith("agmm:")]


@pytest.mark.parametrize("name", nan_work.CALLS)
def test_the_rank_that_sends_a_nan_says_so_once(name: str) -> None:
    op, tensor, where = FOUND[name]
    with RankPool(2) as pool:
        pool.run(nan_work.warned, name, 0)
        assert _lines(pool, 1) == []
        (line,) = _lines(pool, 0)
        assert line.startswith(f"agmm: rank 0 sends a NaN in {op}: {tensor} at {where}; further")


def test_own_rows_of_a_sum_are_not_sent() -> None:
    with RankPool(2) as pool:
        pool.run(nan_work.warned, "scatter", 1)  # the NaN is in the rows that rank 1 keeps
        assert _lines(pool, 0) == _lines(pool, 1) == []


@pytest.mark.parametrize("name", ["gather", "all_gather", "reduce_scatter", "background", "torch"])
def test_nothing_is_sent_where_it_raises(name: str) -> None:
    op, tensor, where = FOUND[name]
    with RankPool(2) as pool:
        for rank, (message, next_call) in enumerate(pool.run(nan_work.raised, name)):
            assert message == (
                f"{tensor}: found a NaN at {where}, which rank {rank} was about to send in {op}; "
                "wanted none (agmm.check_nan)"
            )
            assert next_call == "[2.0, 2.0]"
