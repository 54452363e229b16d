"""torch.ops.symm_mem.fused_all_gather_matmul served by agmm: the contract that torch tests."""

from __future__ import annotations

from collections.abc import Iterator

import async_tp_work as work
import pytest
import torch
from at_hand import needs_nccl, world_sizes

from agmm.testing.ranks import RankPool

pytestmark = needs_nccl


@pytest.fixture(scope="module", params=world_sizes(2, 3, 4, 8))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks of their own: torch's rendezvous needs all of a group to have made as many before."""
    with RankPool(request.param, "cuda", 180) as pool:
        yield pool


def check(results: list[list[str]]) -> None:
    assert [fault for result in results for fault in result] == []


@pytest.mark.parametrize("return_A", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gather_dim", [0, 1, 2])
def test_contract(pool: RankPool, gather_dim: int, dtype: torch.dtype, return_A: bool) -> None:
    for local, n in (((2, 16, 32), 16), ((3, 37, 72), 136), ((2, 130, 264), 24)):
        check(pool.run(work.products, local, n, gather_dim, dtype, return_A))


@pytest.mark.parametrize("row_major", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_native(pool: RankPool, symmetric: bool, row_major: bool) -> None:
    check(pool.run(work.native, symmetric, row_major))


@pytest.mark.parametrize("return_A", [True, False])
def test_graph(pool: RankPool, return_A: bool) -> None:
    check(pool.run(work.graph, 5, return_A))


@pytest.mark.parametrize("mode", ["tensor", "sharded", "replicated"])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_scaled(pool: RankPool, gather_dim: int, mode: str) -> None:
    check(pool.run(work.scaled, gather_dim, mode))


def test_in_turns_with_torch(pool: RankPool) -> None:
    check(pool.run(work.in_turns, 100))


@pytest.mark.parametrize("return_A", [True, False])
@pytest.mark.parametrize(("dims", "gather_dim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_compiled(pool: RankPool, dims: int, gather_dim: int, return_A: bool) -> None:
    check(pool.run(work.compiled, dims, gather_dim, return_A))


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_parallel_module(pool: RankPool, shard_dim: int) -> None:
    check(pool.run(work.parallel_module, shard_dim))
