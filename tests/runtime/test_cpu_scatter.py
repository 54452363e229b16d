"""Matmul + reduce-scatter of the CPU workspace over real processes: numerics, order, bands, delays,
failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import quick
import scatter_work
import torch

from agmm.runtime import cpu_summands
from agmm.testing.ranks import RankError, RankPool

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [  # rows per rank, N, K
    (1, 1, 1),
    (1, 7, 65),
    (3, 7, 33),
    (17, 1, 64),
    (17, 40, 1),
    (3, 5, 0),
    (64, 96, 128),
]
CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "5000"))


def faults_of(results: list[list[str] | None], world_size: int) -> list[str]:
    assert sum(result is not None for result in results) == world_size
    return [fault for result in results for fault in result or []]


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_as_exact_as_that_of_rounded_parts(
    pool: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    results = pool.run(scatter_work.products, world_size, SHAPES, dtype)
    assert faults_of(results, world_size) == []


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("chunks_per_shard", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_pieces_several_products_avg_and_bias(
    pool: RankPool, world_size: int, chunks_per_shard: int, dtype: torch.dtype
) -> None:
    results = pool.run(
        scatter_work.products,
        world_size,
        SHAPES,
        dtype,
        chunks_per_shard=chunks_per_shard,
        reduce_op="avg",
        bias=True,
        pairs=3,
    )
    assert faults_of(results, world_size) == []


def test_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    pool = rank_pools(8)
    for dtype in (torch.bfloat16, torch.float64):
        assert pool.run(scatter_work.products, 8, SHAPES, dtype, chunks_per_shard=2) == [[]] * 8
    assert pool.run(scatter_work.repeated, 8, 200, 2, 300, torch.bfloat16) == [[]] * 8


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("reduce_op", "bias"), [("sum", False), ("avg", True)])
def test_bits_are_those_of_the_definition(
    pool: RankPool, world_size: int, dtype: torch.dtype, reduce_op: str, bias: bool
) -> None:
    results = pool.run(scatter_work.bits, world_size, (31, 40, 1), dtype, reduce_op, bias)
    assert results == [None] * (5 - world_size) + [True] * world_size


def test_a_sum_of_negative_zeros_is_one() -> None:
    A, B = torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(1, 3, dtype=torch.bfloat16)
    summands = cpu_summands.Summands([A], [B], 2)
    zeros = torch.full((2, 3), -0.0)
    out = torch.ones(2, 3, dtype=torch.bfloat16)
    for rank in range(3):
        summands.sum(zeros, [zeros.bfloat16()] * 2, rank, 3, None, out.fill_(1))
        assert torch.equal(out, torch.zeros_like(out)) and out.signbit().all()


def test_bits_do_not_depend_on_where_the_operands_lie() -> None:
    """MKL's products with a vector do, by up to the last bits."""
    torch.manual_seed(0)
    A, B = torch.randn(17, 333), torch.randn(333, 1)
    found = []
    for at in range(16):
        a = torch.empty(A.numel() + 16)[at : at + A.numel()].view(A.shape).copy_(A)
        b = torch.empty(B.numel() + 16)[at : at + B.numel()].view(B.shape).copy_(B)
        found.append(cpu_summands.Summands([a], [b], 17).product(slice(0, 17)).clone())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_large_calls_go_in_bands_through_bounded_memory(pool: RankPool, world_size: int) -> None:
    most = 8192 // world_size
    rows = [most, most + 1, 2 * most + 7]
    for found in pool.run(scatter_work.in_bands, world_size, rows)[5 - world_size :]:
        assert found == [(True, (world_size - 1) * most * 3 * 4)] * 3


@pytest.mark.parametrize(
    ("world_size", "chunks_per_shard"), quick.first(2, [(4, 3), (2, 1), (5, 1), (1, 1)])
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_in_every_call_with_each_rank_late_in_turn(
    pool: RankPool, world_size: int, chunks_per_shard: int, dtype: torch.dtype
) -> None:
    results = pool.run(
        scatter_work.repeated, world_size, 300 // world_size, chunks_per_shard, 3000, dtype
    )
    assert faults_of(results, world_size) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_calls(pool: RankPool) -> None:
    """AGMM_STRESS_CALLS says how many; in batches that a pool's time allows."""
    for done in range(0, CALLS, 500):
        calls = min(500, CALLS - done)
        results = pool.run(scatter_work.repeated, 4, calls, 2, 100, torch.bfloat16)
        assert faults_of(results, 4) == []


FAULTS = ["signal before data", "no credit", "own rows before the others' sums"]


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("none", "reduce_scatter"),
        ("none", "all_reduce"),
        (FAULTS[0], "reduce_scatter"),
        *(pytest.param(fault, "reduce_scatter", marks=pytest.mark.slow) for fault in FAULTS[1:]),
        *(pytest.param(fault, "all_reduce", marks=pytest.mark.slow) for fault in FAULTS),
    ],
)
def test_deliberate_faults_are_found(fault: str, op: str) -> None:
    """By wrong sums, or by ranks that end since they miss a signal. Without a fault there are none:
    credits alone protect the one slot that all of these calls take."""
    limit_s = 30 if fault == "none" else 2
    with RankPool(4, env={"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        try:
            wrong = pool.run(scatter_work.with_fault, fault, op, 300)
        except RankError as error:
            wrong = [124 in error.exit_codes.values()]
    assert any(wrong) == (fault != "none")


@pytest.mark.parametrize(
    ("kind", "first"),
    [("interrupted", "KeyboardInterrupt()"), ("failed", "RuntimeError('no such product')")],
)
def test_after_half_a_call_the_workspace_refuses(pool: RankPool, kind: str, first: str) -> None:
    """What the others got of it is not known, so that no later sum can be trusted."""
    for found, second in pool.run(scatter_work.after, kind):
        assert found == first
        assert "workspace: found one whose last call was interrupted" in second


def test_memory_is_taken_before_another_rank_takes_part(pool: RankPool) -> None:
    for said, out in pool.run(scatter_work.without_memory):
        assert said.startswith("none left; workspace: found one whose last call was interrupted")
        assert out == [10.0, 10.0]


def test_killed_rank_ends_the_others_with_a_message() -> None:
    limit_s = 2
    with RankPool(3, env={"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        pool.submit(scatter_work.call_forever)
        time.sleep(1.0)
        assert pool.alive
        os.kill(pool.processes[1].pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        assert pool.join(limit_s + 10) == [124, -signal.SIGKILL, 124]
        assert time.monotonic() - killed < limit_s + 5
        for rank in (0, 2):
            lines = [line for line in pool.stderr(rank).splitlines() if line.startswith("agmm:")]
            assert len(lines) == 1
            assert lines[0].startswith(f"agmm: rank {rank} waited 2.0 s for ")
            assert lines[0].endswith("; ending the process (AGMM_TIMEOUT_S=2)")
        # Whoever waited first waited for the dead rank; the other may have waited for that one.
        assert "from rank 1: signal is 0, wanted " in pool.stderr(0) + pool.stderr(2)


@pytest.mark.parametrize("kind", ["rows", "large rows", "N", "dtype", "reduce_op", "op"])
def test_differing_calls_are_named_not_awaited(kind: str) -> None:
    with RankPool(2, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        started = time.monotonic()
        pool.submit(scatter_work.call_with_own, kind)
        assert pool.join(20) == [124, 124]
        assert time.monotonic() - started < 12
        for rank in (0, 1):
            assert f"agmm: rank {rank}: chunk {1 - rank} from rank {1 - rank} carries tag 0x" in (
                pool.stderr(rank)
            )
            assert "the ranks made different calls" in pool.stderr(rank)
