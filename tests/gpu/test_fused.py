"""The fused op on GPUs: numerics, order, graphs, groups, and how it ends when a rank is missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import gpu_work
import graphs_work
import late_ranks_work
import products_work
import pytest
import stress_work
import torch
from at_hand import RANKS, needs_nccl, needs_two, world_sizes

from agmm.planning.shapes import LocalShape
from agmm.planning.transport_names import parse
from agmm.planning.transports import SmPush
from agmm.testing.cases import UGLY_SHAPES, random_local_shapes
from agmm.testing.ranks import RankError, RankPool

ALL = world_sizes(1, 2, 3, 4, 8)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("world_size", ALL)
def test_product(gpu_pool: RankPool, world_size: int, column_major: bool, return_A: bool) -> None:
    shapes = [*UGLY_SHAPES, *random_local_shapes(8, seed=world_size)]
    dtype = torch.bfloat16 if column_major else torch.float16
    check(
        gpu_pool.run(products_work.products, world_size, shapes, dtype, column_major, return_A),
        world_size,
    )


@pytest.mark.parametrize("world_size", ALL[1:])
def test_every_kernel(gpu_pool: RankPool, world_size: int) -> None:
    shapes = [LocalShape(1, 8, 8), LocalShape(200, 264, 136), LocalShape(512, 1024, 520)]
    for i, kernel in enumerate(gpu_pool.run(products_work.kernels)[0]):
        # Small tiles on fewer rows, so that multiprocessors are left.
        few_rows = 7 * kernel.tile_m if kernel.swapped else 200 * world_size
        few_tiles = [
            LocalShape(min(200, few_rows // world_size), 264, 136),
            LocalShape(min(800, few_rows) // world_size, 512, 520),
        ]
        order = f"swizzle{(1, 2, 8)[i % 3]}/{('along_m', 'along_n')[i % 2]}"
        for transport, return_A in (
            ("push", False),
            ("push", True),
            ("pull", True),
            ("sm4x64", i % 2 == 0),
            ("sm16x128+1", i % 2 == 1),
            ("sm8x64h2", i % 2 == 1),
            ("split2/push", True),
            ("split2/sm8x64", False),
        ):
            splits, _, transport = transport.rpartition("/")
            if splits and not kernel.can_split:
                continue
            if return_A and transport != "pull" and "column" not in kernel.stores_A:
                continue  # refused
            config = "/".join(filter(None, (kernel.kernel, splits, order, transport)))
            found = parse(transport)
            needs_free_sms = splits or (isinstance(found, SmPush) and found.head_chunks)
            results = gpu_pool.run(
                products_work.products,
                world_size,
                few_tiles if needs_free_sms else shapes,
                torch.bfloat16,
                True,
                return_A,
                config,
            )
            check(results, world_size)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("world_size", ALL)
def test_several_weights_bias_and_leading_dimensions(
    gpu_pool: RankPool, world_size: int, return_A: bool
) -> None:
    shapes = [LocalShape(5, 64, 64), LocalShape(130, 136, 264), LocalShape(256, 512, 512)]
    for weights, leading in ((1, None), (3, None), (2, 3)):
        results = gpu_pool.run(
            products_work.products,
            world_size,
            shapes,
            torch.bfloat16,
            True,
            return_A,
            weights=weights,
            with_bias=True,
            leading=leading,
        )
        check(results, world_size)


@pytest.mark.parametrize(
    ("transport", "return_A"), [("push", False), ("push", True), ("pull", True)]
)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_copies_beside_a_full_gpu(
    gpu_pool: RankPool, world_size: int, transport: str, return_A: bool
) -> None:
    """There are tiles for every multiprocessor, and they wait for copies that have not begun."""
    shapes = [LocalShape(2000 // world_size, 3584, 4096), LocalShape(1000, 3584, 1024)] * 3
    for kernel in gpu_pool.run(products_work.kernels)[0][:2]:
        config = f"{kernel.name}/{transport}"
        results = gpu_pool.run(
            products_work.products, world_size, shapes, torch.bfloat16, True, return_A, config
        )
        check(results, world_size)


@pytest.mark.parametrize("world_size", ALL)
def test_native_op(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(products_work.native_op, world_size), world_size)


@pytest.mark.parametrize("delayed", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("world_size", ALL[1:])
def test_delays(gpu_pool: RankPool, world_size: int, delayed: int) -> None:
    if delayed >= world_size:
        pytest.skip("no such rank in this group")
    shape = LocalShape(200, 264, 512)
    check(gpu_pool.run(stress_work.loop, world_size, shape, 150, 7, delayed), world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_the_shard_may_be_overwritten_at_once(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(stress_work.overwritten, world_size, 80, 5), world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_gathers_by_copies(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(stress_work.gathers_by_copies, world_size, 300, 3), world_size)
    check(gpu_pool.run(graphs_work.gathers_in_a_graph, world_size, 100), world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_two_thousand_calls(gpu_pool: RankPool, world_size: int) -> None:
    shape = LocalShape(256, 384, 1024)
    check(gpu_pool.run(stress_work.loop, world_size, shape, 2000, 1, None), world_size)


def stress(
    pool: RankPool, work: Callable[[int, int, int], gpu_work.Faults], world_size: int
) -> None:
    """AGMM_STRESS_CALLS=100000 makes it a stress test. In batches that a pool's time allows."""
    calls, batch = int(os.environ.get("AGMM_STRESS_CALLS", "300")), 10_000
    for begin in range(0, calls, batch):
        check(pool.run(work, world_size, min(batch, calls - begin), begin + 2), world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_sm_push_at_its_size(gpu_pool: RankPool, world_size: int) -> None:
    stress(gpu_pool, stress_work.sm_push_at_its_size, world_size)


@pytest.mark.parametrize("sent_mib", [6, 24])
@pytest.mark.parametrize("world_size", ALL[1:])
def test_first_items_of_an_sm_push(gpu_pool: RankPool, world_size: int, sent_mib: int) -> None:
    """The consumers of a cooperative kernel copy them up to kConsumersCopyBytes, between the two;
    above it the pushing warps do."""
    k = 4096
    rows = sent_mib * 2**20 // (2 * k * (world_size - 1))
    found = gpu_pool.run(products_work.kernels)[0]
    kernel = next(c for c in found if c.schedule == "cooperative")
    shapes = [LocalShape(rows, 264, k), LocalShape(rows - 40, 264, k)]
    config = f"{kernel.name}/sm32x128"
    for column_major in (True, False):
        results = gpu_pool.run(
            products_work.products, world_size, shapes, torch.bfloat16, column_major, False, config
        )
        check(results, world_size)


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("world_size", ALL)
def test_last_rows(gpu_pool: RankPool, world_size: int, return_A: bool) -> None:
    """The last tile of A, when it is not whole: local rows of the last rank and gathered ones of
    the others, or of several ranks."""
    kernel = min(gpu_pool.run(products_work.kernels)[0], key=lambda kernel: kernel.tile_n)
    tile = kernel.tile_m
    shapes = [LocalShape(rows, 264, 1032) for rows in (8, tile + 1, tile + 40, 3 * tile + 33)]
    configs = [None] if world_size == 1 else [None, f"{kernel.name}/sm8x64"]
    if return_A and "column" not in kernel.stores_A:
        configs = [None]
    for config in configs:
        for column_major in (True, False):
            results = gpu_pool.run(
                products_work.products,
                world_size,
                shapes,
                torch.bfloat16,
                column_major,
                return_A,
                config,
            )
            check(results, world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_sm_push_back_to_back(gpu_pool: RankPool, world_size: int) -> None:
    stress(gpu_pool, stress_work.back_to_back, world_size)


@pytest.mark.parametrize("world_size", ALL[1:])
def test_shapes_transports_and_streams_mixed(gpu_pool: RankPool, world_size: int) -> None:
    large = LocalShape(2048 // world_size, 512, 1024)
    shapes = [LocalShape(1, 64, 128), LocalShape(130, 264, 512), large]
    check(gpu_pool.run(stress_work.mixed_loop, world_size, shapes, 400, 3), world_size)


@pytest.mark.parametrize(
    ("calls_per_graph", "first_way"),
    [(1, "planned"), (1, "push"), (1, "push-A"), (1, "pull"), (1, "sm"), (5, "push")],
)
@pytest.mark.parametrize("world_size", ALL[1:])
def test_graphs(gpu_pool: RankPool, world_size: int, calls_per_graph: int, first_way: str) -> None:
    shape = LocalShape(192, 256, 512)
    results = gpu_pool.run(graphs_work.graphs, world_size, shape, calls_per_graph, first_way, 60)
    check(results, world_size)


@pytest.mark.parametrize("way", ["push", "pull", "sm"])
@pytest.mark.parametrize("world_size", ALL[1:])
def test_captures_of_some_ranks(gpu_pool: RankPool, world_size: int, way: str) -> None:
    check(gpu_pool.run(graphs_work.captured_by_some, world_size, way), world_size)


@pytest.mark.parametrize("world_size", ALL[2:])
def test_two_rounds_of_an_sm_push(gpu_pool: RankPool, world_size: int) -> None:
    """With AGMM_STRESS_DELAYS the first credit was lost now and then, and the call ended by its
    limit."""
    stress(gpu_pool, stress_work.two_rounds, world_size)


@needs_two
@pytest.mark.parametrize("way", ["push", "pull", "sm"])
@pytest.mark.parametrize(
    "environment", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_LAUNCH_BLOCKING": "1"}]
)
def test_graphs_where_streams_may_not_run_at_once(environment: dict[str, str], way: str) -> None:
    """What a matmul waits for is captured before it."""
    with RankPool(min(RANKS, 4), "cuda", 120, environment) as pool:
        check(pool.run(graphs_work.profiled_graph, way), pool.world_size)


@needs_two
@pytest.mark.parametrize("work", [graphs_work.graph_outlives_growth, stress_work.two_groups])
def test_with_more_workspaces(work: Callable[[], gpu_work.Faults]) -> None:
    with RankPool(min(RANKS, 4), "cuda") as pool:
        check(pool.run(work), pool.world_size)


@pytest.mark.parametrize("world_size", ALL[1:2])
def test_compiled(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(products_work.compiled, world_size), world_size)


@needs_nccl
@pytest.mark.parametrize("world_size", ALL[1:])
def test_unfused(gpu_pool: RankPool, world_size: int) -> None:
    check(gpu_pool.run(products_work.unfused, world_size), world_size)


# CTAs of the other kernel, of which a multiprocessor holds four.
CTAS, RESERVED_SMS = 120, 32


@needs_two
@pytest.mark.parametrize("way", ["push", "sm"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_another_group_finds_multiprocessors(cluster: int, way: str) -> None:
    environment = {"AGMM_RESERVED_SMS": str(RESERVED_SMS), "AGMM_TIMEOUT_S": "20"}
    with RankPool(2, "cuda", 120, environment) as pool:
        check(pool.run(stress_work.two_communicators, CTAS, cluster, way), 2)


@needs_two
def test_without_them_the_groups_wait_for_each_other() -> None:
    """The test above can fail: a matmul leaves some multiprocessors free by chance, those that have
    no tile in its last wave, but not as many."""
    environment = {"AGMM_RESERVED_SMS": "0", "AGMM_TIMEOUT_S": "5"}
    with RankPool(2, "cuda", 60, environment) as pool:
        with pytest.raises(RankError) as failure:
            pool.run(stress_work.two_communicators, CTAS, 1, "push")
        assert 124 in failure.value.exit_codes.values(), failure.value


MISSING = "from rank 1: "
DIFFERENT = "all_gather_matmul(A_shard ["
CREDIT = "s for buffer 0 of rank 1 to be free: credit is 0"


@needs_two
@pytest.mark.parametrize(
    ("work", "way", "wanted"),
    [
        (late_ranks_work.different_shapes, "planned", DIFFERENT),
        (late_ranks_work.different_shapes, "push", DIFFERENT),
        (late_ranks_work.different_shapes, "sm", DIFFERENT),
        (late_ranks_work.different_scatters, "scatter", "matmul_reduce_scatter(A ["),
        (late_ranks_work.different_fp8, "scaled gather", "all_gather_scaled_matmul(A_shard ["),
        (late_ranks_work.different_fp8, "scaled scatter", "scaled_matmul_reduce_scatter(A ["),
        (late_ranks_work.one_rank_missing, "push", MISSING),
        (late_ranks_work.one_rank_missing, "pull", MISSING),
        (late_ranks_work.one_rank_missing, "sm-A", MISSING),
        (late_ranks_work.one_rank_missing, "sm-ctas", MISSING),
        (late_ranks_work.one_rank_missing, "sm-split-A", MISSING),
        (late_ranks_work.one_rank_misses_a_replay, "push", MISSING),
        (late_ranks_work.one_rank_misses_a_replay, "sm", MISSING),
        (late_ranks_work.credit_missing, "pull", CREDIT),
        (late_ranks_work.credit_missing, "sm", CREDIT),
        (late_ranks_work.credit_missing, "sm-ctas", CREDIT),
    ],
)
def test_ends_with_a_message(work: Callable[[str], None], way: str, wanted: str) -> None:
    limit_s = 2
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        begin = time.monotonic()
        with pytest.raises(RankError) as failure:
            pool.run(work, way)
        assert time.monotonic() - begin < 60
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert 124 in failure.value.exit_codes.values(), (failure.value, stderr)
    assert wanted in stderr, stderr


@needs_two
@pytest.mark.parametrize("way", ["push", "pull", "sm", "scatter"])
def test_a_killed_rank_ends_the_others_with_a_message(way: str, tmp_path: Path) -> None:
    limit_s = 2
    is_calling = tmp_path / "is_calling"
    with RankPool(min(RANKS, 4), "cuda", 90, {"AGMM_TIMEOUT_S": str(limit_s)}) as pool:
        pool.submit(late_ranks_work.call_until_killed, way, str(is_calling))
        begin = time.monotonic()
        while not is_calling.exists():
            assert pool.alive and time.monotonic() - begin < 60, pool.stderr(1)
            time.sleep(0.05)
        pool.processes[1].kill()
        codes = pool.join(limit_s + 20)
        stderr = "".join(pool.stderr(rank) for rank in range(pool.world_size))
    assert codes == [-signal.SIGKILL if rank == 1 else 124 for rank in range(len(codes))], stderr
    assert " for chunk " in stderr or " for buffer " in stderr, stderr
    assert " from rank 1" in stderr or " of rank 1 to be free" in stderr, stderr


@needs_two
@pytest.mark.parametrize("way", ["push", "pull", "sm", "scatter"])
def test_a_late_rank_is_told_and_awaited(way: str) -> None:
    """Once, from the kernel that waits."""
    with RankPool(2, "cuda", 120, {"AGMM_TIMEOUT_S": "60", "AGMM_WARN_S": "2"}) as pool:
        check(pool.run(late_ranks_work.one_rank_late, way, 8.0), 2)
        said = [line for line in pool.stderr(0).splitlines() if " from rank 1;" in line]
        assert len(said) == 1, pool.stderr(0)
        assert said[0].startswith("agmm: rank 0 has waited ")
