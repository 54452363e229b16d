"""Batch invariance on GPUs: a row's bits do not depend on how many other rows there are. Products
of a streaming kernel alone are in `test_few_rows`, sums by every method in
`test_collective_kernels`."""

from __future__ import annotations

import invariance_work
import pytest
import torch
from at_hand import needs_nccl, world_sizes

from agmm.testing.ranks import RankPool

SIZES = [
    # N, K
    (72, 136),
    (2112, 328),
    (4096, 3584),  # splits of K
    (7, 65),  # no kernel takes these
]


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(1, 2, 4, 8))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_has_its_bits_among_any_others(
    gpu_pool: RankPool, world_size: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    found = gpu_pool.run(invariance_work.rows_alone, world_size, sizes, dtype, "cuda")
    check(found, world_size)


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_every_way_has_the_same_bits(gpu_pool: RankPool, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = gpu_pool.run(invariance_work.by_other_ways_on_gpus, world_size, dtype)
        check(found, world_size)


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(1, 2))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_layer_for_decoding_keeps_the_bits_of_a_row(
    gpu_pool: RankPool, world_size: int, sizes: tuple[int, int]
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = gpu_pool.run(invariance_work.rows_of_a_layer, world_size, sizes, dtype, "cuda")
        check(found, world_size)


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(1, 2))
def test_scattered_rows_have_their_bits_among_any_others(
    gpu_pool: RankPool, world_size: int
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(gpu_pool.run(invariance_work.scattered_rows, world_size, dtype, "cuda"), world_size)
