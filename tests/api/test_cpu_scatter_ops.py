"""`agmm.matmul_reduce_scatter` on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scatter_op_work
import torch

from agmm.testing.ranks import RankPool

SHAPES = [(1, 1, 1), (1, 7, 65), (3, 7, 33), (17, 1, 64), (17, 40, 1), (3, 5, 0)]
CASES: list[dict[str, Any]] = [
    {},
    {"bias": True, "reduce_op": "avg", "pairs": 3},
    {"leading": (3,), "pairs": 1},
    {"leading": (2, 3), "scatter_dim": 1, "bias": True, "pairs": 2},
    {"leading": (4,), "scatter_dim": 1, "reduce_op": "avg"},
    {"leading": (1,), "scatter_dim": 1},
]


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sum(pool: RankPool, world_size: int, case: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        results = pool.run(scatter_op_work.products, world_size, SHAPES, dtype, **case)
        check(results, world_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(pool: RankPool, dtype: torch.dtype) -> None:
    check(pool.run(scatter_op_work.products, 3, SHAPES, dtype, bias=True), 3)


def test_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    pool = rank_pools(8)
    for case in CASES[1:4]:
        check(pool.run(scatter_op_work.products, 8, SHAPES, torch.bfloat16, **case), 8)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_native_and_compiled_calls_have_the_same_bits(
    pool: RankPool, world_size: int, dtype: torch.dtype, reduce_op: str
) -> None:
    check(pool.run(scatter_op_work.as_native, world_size, dtype, reduce_op), world_size)


def test_backward_of_several_products_gathers_once(pool: RankPool) -> None:
    for gathers, weights, error in pool.run(scatter_op_work.gathered_once, 4)[1:]:
        assert (gathers, weights) == (1, 3)
        assert error < 1e-12


@pytest.mark.parametrize("world_size", [1, 3])
def test_layers_scatter_by_agmm(pool: RankPool, world_size: int) -> None:
    check(pool.run(scatter_op_work.of_a_layer, world_size), world_size)


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("native", [True, False])
def test_gradient_of_the_weight_is_made_while_parts_are_on_their_way(
    pool: RankPool, native: bool, world_size: int
) -> None:
    parts = world_size - 1 if native else 1
    for done, error in pool.run(scatter_op_work.beside_the_scatter, world_size, native)[
        5 - world_size :
    ]:
        # Each part in as many pieces as the group's workspace has room for.
        pieces, left = divmod(done.count("s"), parts)
        assert pieces > 0 and left == 0
        assert done == "s" * parts * pieces + "m" + "w" * parts * pieces
        assert error < 1e-12


@pytest.mark.parametrize("native", [True, False])
def test_failed_gradient_of_the_weight_leaves_the_ranks_in_step(
    pool: RankPool, native: bool
) -> None:
    found = pool.run(scatter_op_work.failing_beside_the_scatter, native)
    assert found == [["no room for dB", "[15.0]"]] * 5
