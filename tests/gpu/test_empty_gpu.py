"""Calls without elements on GPUs take their turn: ranks that differ are told so."""

from __future__ import annotations

import time
from collections.abc import Callable

import empty_gpu_work
import pytest
from at_hand import RANKS, needs_two, world_sizes

from agmm.testing.ranks import RankError, RankPool


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_on_all_ranks(gpu_pool: RankPool, world_size: int) -> None:
    results = gpu_pool.run(empty_gpu_work.on_all_ranks, world_size)
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def _ended(work: Callable[[str], None], name: str, limit_s: int) -> list[str]:
    """What each rank says as it ends."""
    with RankPool(min(RANKS, 2), "cuda", 120, {"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        started = time.monotonic()
        with pytest.raises(RankError) as failure:
            pool.run(work, name)
        pool.join(20)
        assert time.monotonic() - started < 60
        said = [pool.stderr(rank) for rank in range(pool.world_size)]
    assert 124 in failure.value.exit_codes.values(), (failure.value, said)
    return said


@needs_two
@pytest.mark.parametrize("name", empty_gpu_work.OPS)
def test_on_one_rank(name: str) -> None:
    """Long before the limit: by the tag that a kernel finds, or by what late ranks tell."""
    said = _ended(empty_gpu_work.on_one_rank, name, limit_s=300)
    for rank, words in enumerate(said):
        assert f"agmm: rank {rank}: " in words and "made different calls" in words, said
        assert "[0, 512]" in words, said


@needs_two
@pytest.mark.parametrize("name", ["gather", "scatter", "all_gather"])
def test_on_one_rank_of_a_graph(name: str) -> None:
    said = _ended(empty_gpu_work.on_one_rank_of_a_graph, name, limit_s=3)
    assert all("agmm: rank" in words for words in said), said
