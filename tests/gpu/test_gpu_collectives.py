"""`agmm.collectives` and `agmm.check_nan` on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable

import collectives_gpu_work
import pytest
import torch
from at_hand import RANKS, needs_nccl, needs_two, world_sizes
from norm_and_relay_stand_in import cube_mesh

from agmm.testing.ranks import RankError, RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", world_sizes(1, 2, 3, 4, 8))
@pytest.mark.parametrize("kind", collectives_gpu_work.KINDS)
def test_values(gpu_pool: RankPool, world_size: int, kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(gpu_pool.run(collectives_gpu_work.values, world_size, kind, dtype), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_64_mb(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.large, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_graphs_in_turn_with_eager_calls(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.in_graphs, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_calls_in_turn_by_late_ranks(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.in_turn, world_size, 400, 1), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_low_contention(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.low_contention, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, 8))
def test_bits_are_repeatable(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.repeated_bits, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 3, 4, 8))
def test_a_norm_behind_an_all_reduce(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.normed, world_size), world_size)


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(1, 2, 4))
def test_a_norm_behind_a_product(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.normed_sums, world_size), world_size)


@pytest.mark.skipif(RANKS < 8, reason="a hybrid cube mesh has 8 ranks")
def test_a_hybrid_cube_mesh_is_gone_round_pcie() -> None:
    with RankPool(8, "cuda") as pool:
        check(pool.run(collectives_gpu_work.over_relays, cube_mesh()), 8)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_beside_a_matmul(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.beside_a_matmul, world_size), world_size)


@pytest.mark.parametrize("world_size", world_sizes(2, 4))
def test_calls_on_several_streams_come_in_turn(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(collectives_gpu_work.on_streams, world_size), world_size)


@needs_two
def test_memory_is_reserved_and_released() -> None:
    with RankPool(2, "cuda") as pool:
        check(pool.run(collectives_gpu_work.reserved_and_released), 2)


@needs_two
@pytest.mark.parametrize("numbers", [5000, 1_000_000], ids=["packets", "blocks"])
def test_late_ranks_are_told_and_awaited(numbers: int) -> None:
    ranks = min(RANKS, 4)
    with RankPool(ranks, "cuda", 120, {"AGMM_TIMEOUT_S": "60", "AGMM_WARN_S": "2"}) as pool:
        check(pool.run(collectives_gpu_work.late, 8.0, numbers), ranks)
        # Lines of a first call, which names ranks in brackets, are left out.
        said = [x for x in pool.stderr(0).splitlines() if re.search(r" for ranks? \d", x)]
        late = "rank 1;" if ranks == 2 else f"ranks 1, {ranks - 1};"
        assert len(said) == 1 and f"for {late}" in said[0], pool.stderr(0)


@needs_two
@pytest.mark.parametrize("numbers", [1000, 100_000, 1_000_000])
@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (collectives_gpu_work.missing, "from rank 1"),
        (collectives_gpu_work.different, "the ranks made different calls"),
    ],
)
def test_ends_with_a_message(work: Callable[[int], None], wanted: str, numbers: int) -> None:
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": "3"}) as pool:
        with pytest.raises(RankError) as failure:
            pool.run(work, numbers)
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert wanted in stderr, stderr


@needs_nccl
@needs_two
def test_the_rank_that_sends_a_nan_says_so() -> None:
    with RankPool(2, "cuda") as pool:
        pool.run(collectives_gpu_work.nan_warned, 2)
        for rank in (0, 1):
            lines = [x for x in pool.stderr(rank).splitlines() if "sends a NaN" in x]
            wanted = [
                "all_gather_matmul: A_shard at [3, 5] of [64, 64] bfloat16",
                "matmul_reduce_scatter: A at [3, 5] of [128, 64] bfloat16",
                "matmul_reduce_scatter: B at [3, 5] of [64, 64] bfloat16",
                "all_reduce: x at [3, 5] of [64, 64] bfloat16",
            ]
            found = [line.split("a NaN in ")[1].split(";")[0] for line in lines]
            # Where the plan has no kernel of agmm for it, the partial product is looked through.
            found = [line for line in found if "A @ B" not in line]
            assert set(found) <= set(wanted)
            assert (wanted[0] in found and wanted[3] in found) is (rank == 1)


@needs_two
def test_the_rank_that_sends_a_nan_of_fp8_says_so() -> None:
    with RankPool(2, "cuda") as pool:
        pool.run(collectives_gpu_work.nan_warned_of_fp8, 2)
        for rank in (0, 1):
            lines = [x for x in pool.stderr(rank).splitlines() if "sends a NaN" in x]
            found = [line.split("a NaN in ")[1].split(";")[0] for line in lines]
            wanted = [
                "all_gather_scaled_matmul: A_shard at [3, 5] of [64, 64] float8_e4m3fn",
                "all_gather_scaled_matmul: scale_a at [3, 0] of [64, 1] float32",
                "scaled_matmul_reduce_scatter: A at [3, 5] of [128, 64] float8_e4m3fn",
                "scaled_matmul_reduce_scatter: scale_b at [0, 5] of [1, 64] float32",
                "all_gather_matmul: A_shard at [3, 5] of [64, 64] bfloat16",
            ]
            assert found == (wanted if rank == 1 else [])


@needs_nccl
@pytest.mark.parametrize("world_size", world_sizes(2))
def test_nothing_is_sent_where_it_raises(gpu_pool: RankPool, world_size: int) -> None:
    for found in gpu_pool.run(collectives_gpu_work.nan_raised, world_size)[RANKS - world_size :]:
        gather, scatter, collective = found
        assert gather == "A_shard[3, 5]"
        assert scatter in ("A[3, 5]", "A @ B[3, 0]")
        assert collective == "x[3, 5]"
