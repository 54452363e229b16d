"""`agmm.matmul_reduce_scatter` on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import scatter_gpu_work
import torch
from at_hand import world_sizes

from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import MATMUL_ALL_REDUCE
from agmm.testing.ranks import RankPool

SHAPES = [
    (1, 8, (8,)),
    (17, 40, (72,)),
    (130, 520, (136,)),
    (257, 1160, (264,)),
    (2300, 136, (72,)),  # two bands with four ranks
]
CASES: list[dict[str, Any]] = [
    {},
    {"column_major": False, "dtype": torch.float16},
    {"bias": True, "reduce_op": "avg"},
    {"leading": (3,), "bias": True},
    {"leading": (2,), "scatter_dim": 1},
]


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sum(gpu_pool: RankPool, world_size: int, case: dict[str, Any]) -> None:
    check(gpu_pool.run(scatter_gpu_work.products, world_size, SHAPES, **case), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_several_products(gpu_pool: RankPool, world_size: int) -> None:
    shapes = [(130, 264, (64, 136)), (65, 1000, (8, 264, 72))]
    check(gpu_pool.run(scatter_gpu_work.products, world_size, shapes), world_size)


@pytest.mark.skipif(
    not kernels_of(MATMUL_ALL_REDUCE, "bfloat16"),
    reason="this build has no kernel that sends finished tiles",
)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
@pytest.mark.parametrize("bias", [False, True])
def test_all_reduces(gpu_pool: RankPool, world_size: int, bias: bool) -> None:
    shapes = [
        (1, 8, 8),
        (130, 520, 136),
        (2049, 1160, 264),
        (8193, 136, 72),
    ]  # the last in two bands
    check(gpu_pool.run(scatter_gpu_work.all_reduces, world_size, shapes, bias=bias), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_graphs_in_turn_with_eager_calls(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(scatter_gpu_work.in_graphs, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_gradients(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(scatter_gpu_work.gradients, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_gradients_of_a_shared_gather(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(scatter_gpu_work.gradients_of_a_shared_gather, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_async_tp(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(scatter_gpu_work.by_async_tp, world_size), world_size)
