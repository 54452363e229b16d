"""Gathers before a streaming kernel, which reads its weight meanwhile, and scatters by one:
`config="streamed"`."""

from __future__ import annotations

import os

import collectives_stand_in
import pytest
import streamed_exchange_work
import streamed_sum_work
from at_hand import RANKS, needs_two, world_sizes

from agmm.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.skipif(
    not streamed_sum_work.KERNELS, reason="found no streaming kernel, wanted AGMM_KERNELS=default"
)
STRESS_CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "2000"))
OPS = ("gather", "scatter")


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gathers_on_one_gpu(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)
    assert streamed_exchange_work.wrong_gathers_on_one_gpu(world_size, 300, world_size) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
def test_values(gpu_pool: RankPool, world_size: int, op: str) -> None:
    check(gpu_pool.run(streamed_exchange_work.values, world_size, op), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_many_calls_by_late_ranks(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(streamed_exchange_work.stress, world_size, STRESS_CALLS, 1), world_size)


@needs_two
@pytest.mark.parametrize("op", OPS)
def test_a_missing_rank_is_named(op: str) -> None:
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "3"}) as pool:
        with pytest.raises(RankError) as failure:
            pool.run(streamed_exchange_work.missing, op)
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert "from rank 1" in stderr, stderr
