"""The streaming kernel that multiplies few rows and sums over the ranks: `config="streamed"`."""

from __future__ import annotations

import os
from collections.abc import Callable

import collectives_stand_in
import pytest
import streamed_sum_work
from at_hand import RANKS, needs_two, world_sizes

from agmm.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.skipif(
    not streamed_sum_work.KERNELS, reason="found no streaming kernel, wanted AGMM_KERNELS=default"
)
STRESS_CALLS = int(os.environ.get("AGMM_STRESS_CALLS", "2000"))


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)
    assert streamed_sum_work.wrong_on_one_gpu(world_size) == []


def test_late_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)
    assert streamed_sum_work.wrong_by_late_ranks(4, 500, 1) == []


@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
def test_values(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(streamed_sum_work.values, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_many_calls_by_late_ranks(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(streamed_sum_work.stress, world_size, STRESS_CALLS, 1), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2))
def test_what_cannot_be_served_is_named(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(streamed_sum_work.refused, world_size), world_size)


@needs_two
@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (streamed_sum_work.missing, "from rank 1"),
        (streamed_sum_work.different, "the ranks made different calls"),
    ],
)
def test_ends_with_a_message(work: Callable[[], None], wanted: str) -> None:
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "3"}) as pool:
        with pytest.raises(RankError) as failure:
            pool.run(work)
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert wanted in stderr, stderr
