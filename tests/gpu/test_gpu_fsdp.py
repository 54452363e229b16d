"""FSDP2's collectives by copy engines, on GPUs."""

from __future__ import annotations

import fsdp_gpu_work
import pytest
from at_hand import RANKS, needs_nccl, needs_two, world_sizes

from agmm.testing.ranks import RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
@pytest.mark.parametrize("most_bytes", [4096, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_collectives(gpu_pool: RankPool, world_size: int, most_bytes: int, beside: bool) -> None:
    calls = 20 if most_bytes == 4096 else 200
    args = world_size, calls, most_bytes, beside
    check(gpu_pool.run(fsdp_gpu_work.collectives, *args), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_bits_are_repeatable(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(fsdp_gpu_work.repeated_bits, world_size), world_size)


@needs_nccl
@needs_two
@pytest.mark.parametrize("tp", [1, 2])
def test_trains_as_torch_does(tp: int) -> None:
    if 2 * tp > RANKS:
        pytest.skip(f"needs {2 * tp} GPUs")
    with RankPool(2 * tp, "cuda") as pool:
        check(pool.run(fsdp_gpu_work.trains, tp), 2 * tp)
