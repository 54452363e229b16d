"""`agmm.matmul_all_reduce` on CPU ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import all_reduce_work
import autograd_work
import pytest
import quick
import torch

from agmm.testing.ranks import RankPool

CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "1500"))
SHAPES = [  # M, ..., N, K
    (1, 1, 1),
    (1, 7, 65),
    (2, 40, 0),
    (7, 5, 33),
    (3, 2, 4, 17),
    (1, 2, 3, 8, 16),
    (64, 96, 128),
    (301, 24, 33),  # in pieces
]


def check(results: list[Any], world_size: int, wanted: Any) -> None:
    assert results == [None] * (len(results) - world_size) + [wanted] * world_size


@pytest.mark.parametrize("world_size", quick.first(3, [1, 2, 3, 4, 5]))
@pytest.mark.parametrize("bias", [False, True])
def test_all_ranks_get_the_bits_of_one_sum(pool: RankPool, world_size: int, bias: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = pool.run(all_reduce_work.products, world_size, SHAPES, dtype, bias)
        check(found, world_size, [])


@pytest.mark.slow
def test_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    pool = rank_pools(8)
    check(pool.run(all_reduce_work.products, 8, SHAPES, torch.bfloat16, True), 8, [])
    check(pool.run(all_reduce_work.repeated, 8, 100, 300), 8, [])


@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_bits_are_those_of_the_definition(
    pool: RankPool, world_size: int, dtype: torch.dtype, bias: bool
) -> None:
    for rows in (1, 4, 31, 403):
        found = pool.run(all_reduce_work.defined_bits, world_size, rows, dtype, bias)
        check(found, world_size, True)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_large_calls_go_in_bands_through_bounded_memory(pool: RankPool, world_size: int) -> None:
    rows = [8192, 8193, 20001]
    found = pool.run(all_reduce_work.in_bands, world_size, rows)
    check(found, world_size, [(True, True)] * 3)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_same_bits_in_every_call_with_each_rank_late_in_turn(
    pool: RankPool, world_size: int
) -> None:
    check(pool.run(all_reduce_work.repeated, world_size, 300, 3000), world_size, [])


@pytest.mark.slow
def test_many_calls(pool: RankPool) -> None:
    """AGMM_STRESS_CALLS asks for more by hand. They come in batches that a pool's time allows."""
    for done in range(0, CALLS, 5_000):
        check(pool.run(all_reduce_work.repeated, 4, min(5_000, CALLS - done), 200), 4, [])


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "leading": (2,), "column_major": True},
        {"frozen": ("A",)},
        {"frozen": ("B",), "bias": True},
        {"frozen": ("A", "B"), "bias": True},
        {"residual": True, "leading": (2,), "bias": True},
    ],
    ids=str,
)
def test_gradients(pool: RankPool, world_size: int, options: dict[str, Any]) -> None:
    found = pool.run(autograd_work.gradcheck_matmul_all_reduce, world_size, **options)
    check(found, world_size, True)


def test_gradients_of_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    found = rank_pools(8).run(autograd_work.gradcheck_matmul_all_reduce, 8, bias=True)
    check(found, 8, True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_compiled(pool: RankPool, world_size: int) -> None:
    check(pool.run(all_reduce_work.compiled, world_size), world_size, True)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_by_one_kernel_or_by_a_scatter_and_a_gather(
    pool: RankPool, world_size: int, bias: bool
) -> None:
    """What CUDA does, with the CPU's in place of the kernels."""
    check(pool.run(all_reduce_work.by_kernels, world_size, bias), world_size, [])


def test_what_agmm_does_not_sum_the_backend_does(pool: RankPool) -> None:
    check(pool.run(all_reduce_work.without_kernel, 3), 3, [6, 7])
