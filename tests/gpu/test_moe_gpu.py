"""Mixtures of experts on GPUs, by kernels and, where sizes are odd, by the group's backend."""

from __future__ import annotations

import moe_gpu_work as work
import pytest
import torch
from at_hand import needs_nccl, needs_two, world_sizes
from moe_layer_work import Kind
from moe_work import Case

from agmm.testing.ranks import RankError, RankPool

pytestmark = [needs_two, needs_nccl]
SKEWS = ("even", "zipf", "one", "none", "drops")


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4))
def test_results_are_those_of_the_model(
    gpu_pool: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    even, uneven = (4,) * world_size, tuple((3 * rank + 5) % 7 for rank in range(world_size))
    cases = [Case(even, k, 2, skew, dtype) for skew in SKEWS for k in (1, 4)]
    # Sizes that torch's grouped matmul takes in bfloat16.
    cases += [
        Case(uneven, 2, 4, skew, dtype, 64, 32, column_major=column_major)
        for skew in SKEWS
        for column_major in (False, True)
    ]
    cases += [Case(even, 2, 4, "zipf", dtype, activation=None, sliced=True, seed=1)]
    cases += [Case((0,) * world_size, 2, 2, "even", dtype)]
    check(gpu_pool.run(work.faults, world_size, cases), world_size)


@pytest.mark.parametrize("options", [{}, {"return_gathered": True}, {"save_preactivation": False}])
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_gradients_are_those_of_the_model(
    gpu_pool: RankPool, world_size: int, options: dict[str, bool]
) -> None:
    even, uneven = (3,) * world_size, tuple((3 * rank + 5) % 7 for rank in range(world_size))
    cases = [Case(even, 2, 2), Case(uneven, 3, 2, "drops", column_major=True)]
    check(gpu_pool.run(work.gradient_faults, world_size, cases, options), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2))
def test_strict_refuses_by_name(gpu_pool: RankPool, world_size: int) -> None:
    results = [said for said in gpu_pool.run(work.refused, world_size) if said is not None]
    refused = [
        "x: found rows of 24 bytes, wanted a multiple of 16",
        "weights: found rows of 24 bytes, wanted a multiple of 16",
    ]
    said = [f"{reason}; strict=True refuses the unfused path" for reason in refused]
    assert results == [["nothing", *said]] * world_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_a_graph_follows_the_ids(gpu_pool: RankPool, world_size: int, dtype: torch.dtype) -> None:
    check(gpu_pool.run(work.captured_faults, world_size, dtype), world_size)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_nothing_waits_on_the_host(
    gpu_pool: RankPool, world_size: int, with_gradients: bool
) -> None:
    check(gpu_pool.run(work.waits, world_size, with_gradients), world_size)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind(), torch.float64),
        (Kind(k=3, score="sigmoid", has_choice_bias=True, shared=True), torch.float64),
        (Kind(k=1, scale=0.5, wide=8), torch.bfloat16),
        (Kind(k=1, scale=0.5, wide=8, sliced=True), torch.bfloat16),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_training_has_the_losses_of_the_unsharded_model(
    gpu_pool: RankPool, world_size: int, kind: Kind, dtype: torch.dtype
) -> None:
    check(gpu_pool.run(work.trained, world_size, kind, dtype), world_size)


@pytest.mark.parametrize("captured", [False, True])
def test_an_overflow_ends_in_an_assertion(captured: bool) -> None:
    with RankPool(2, "cuda") as pool:
        with pytest.raises(RankError):
            pool.run(work.overflow, captured)
        said = [pool.stderr(rank) for rank in range(2)]
    assert any("capacity: found more rows than that" in one for one in said), said
