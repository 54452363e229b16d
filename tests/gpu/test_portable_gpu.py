"""The portable path on GPUs: copies beside products of the library."""

from __future__ import annotations

import time
from collections.abc import Callable

import portable_gpu_work as work
import pytest
from at_hand import RANKS, needs_nccl, needs_two, world_sizes

from agmm.testing.ranks import RankError, RankPool


@pytest.fixture(params=world_sizes(2, 3, 4, 8))
def sized_pool(request: pytest.FixtureRequest, rank_pools: Callable[..., RankPool]) -> RankPool:
    """A pool for each size: torch's rendezvous are counted by process."""
    return rank_pools(request.param, "cuda")


def check(results: list[list[str]]) -> None:
    assert [fault for faults in results for fault in faults] == []


@pytest.mark.parametrize("case", work.CASES, ids=str)
def test_gather(sized_pool: RankPool, case: work.Case) -> None:
    check(sized_pool.run(work.gathers, case))


@pytest.mark.parametrize("case", work.CASES, ids=str)
def test_scatter(sized_pool: RankPool, case: work.Case) -> None:
    check(sized_pool.run(work.scatters, case))


@needs_nccl  # which gathers what agmm's kernels do not
@pytest.mark.parametrize("case", work.CASES, ids=str)
def test_all_reduce(gpu_pool: RankPool, case: work.Case) -> None:
    check(gpu_pool.run(work.all_reduces, case))


def test_graphs_and_calls(sized_pool: RankPool) -> None:
    check(sized_pool.run(work.graphs_between_calls))


def test_calls_on_two_streams(sized_pool: RankPool) -> None:
    check(sized_pool.run(work.on_two_streams))


def test_gpus_of_another_architecture(gpu_pool: RankPool) -> None:
    check(gpu_pool.run(work.another_architecture))


@needs_two
@pytest.mark.parametrize(
    ("op", "words"),
    [("gather", "all_gather_matmul(A_shard ["), ("scatter", "matmul_reduce_scatter(A [")],
)
@pytest.mark.parametrize("calls", [work.different, work.missing])
def test_ends_with_a_message(calls: Callable[[str], None], op: str, words: str) -> None:
    wanted = words if calls is work.different else "from rank 1"
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "2"}) as pool:
        begin = time.monotonic()
        with pytest.raises(RankError) as failure:
            pool.run(calls, op)
        assert time.monotonic() - begin < 60
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert wanted in stderr, stderr
