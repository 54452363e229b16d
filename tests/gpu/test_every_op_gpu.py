"""What all ops promise, on GPUs: gradients, results, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

import every_op_work as work
import pytest
import torch
import torch.distributed as dist
from at_hand import needs_nccl, needs_two
from test_every_op import SIZES

from agmm.testing.ranks import RankPool


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process, whose backend takes the GPU's tensors."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_one_rank(alone: dist.ProcessGroup) -> None:
    assert work.gradient_faults(alone, "cuda") == []
    assert work.view_faults(alone, SIZES, "cuda", served=False) == []
    assert work.flop_faults(alone, "cuda") == []


def check(results: list[list[str] | None]) -> None:
    assert [fault for result in results for fault in result or []] == []


@needs_two
@needs_nccl
def test_a_gradient_or_a_refusal(gpu_pool: RankPool) -> None:
    check(gpu_pool.run(work.gradients, 2, "cuda"))


@needs_two
@needs_nccl
def test_no_result_is_a_view(gpu_pool: RankPool) -> None:
    check(gpu_pool.run(work.views, 2, "as planned", SIZES, "cuda"))


@needs_two
@needs_nccl
def test_flops(gpu_pool: RankPool) -> None:
    check(gpu_pool.run(work.flops, 2, "cuda"))
