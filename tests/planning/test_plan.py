"""Names of kernels, what a plan must fulfil, the cost model, and the look-up of a plan."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import pairwise, product

import pytest

from agmm import _core
from agmm.planning import cost_model, heuristics, legality, plans, problems
from agmm.planning.cost_model import gather
from agmm.planning.planner import Planner
from agmm.planning.plans import GATHERED, UNFUSED, Plan, Row
from agmm.planning.predictions import predict_us
from agmm.planning.problems import CPU, DEFAULT_GPU, KernelConfig, Problem
from agmm.planning.transports import GATHER, PULL, PUSH, SmPush
from agmm.planning.tuned_rows import Rows

KERNELS = tuple(k for k in cost_model.default_kernels() if not k.is_streaming)
"""The kernels that compute tiles in waves; `test_streaming_plan.py` has the others."""


def kernels_for(problem: Problem) -> tuple[KernelConfig, ...]:
    """The kernels that the cost model chooses among."""
    gathered = 2 * problem.m * problem.k
    is_all = problem.world_size == 1 or gathered > cost_model.STEADY_GATHER_BYTES
    return tuple(kernel for kernel in KERNELS if is_all or not kernel.swapped)


FP8 = "float8_e4m3fn_float8_e4m3fn fast"
WIDE, SMALL = (
    KernelConfig.parse(f"{kernel}/swizzle2/along_m")
    for kernel in ("128x256x64_2x1_cooperative", "128x128x64_1x1_pingpong")
)


@dataclass(frozen=True)
class TunedRows:
    """A table of one problem's rows."""

    found: Sequence[Row]
    name: str = "a table"

    def rows(self, problem: Problem) -> Sequence[Row]:
        return self.found


def push(kernel: KernelConfig) -> Plan:
    return Plan("push", kernel)


def planner_of(kernels: Sequence[KernelConfig], found: Sequence[Rows] = ()) -> Planner:
    return Planner(lambda op, name: kernels, found)


def planner(*rows: Row, kernels: Sequence[KernelConfig] = KERNELS) -> Planner:
    return planner_of(kernels, [TunedRows(rows)])


def random_problems(count: int) -> list[Problem]:
    draw = random.Random(5)
    return [
        Problem(
            m=world_size * draw.randint(1, 1200),
            n=8 * draw.randint(1, 700),
            k=8 * draw.randint(1, 1500),
            world_size=world_size,
            return_A=draw.random() < 0.5,
        )
        for world_size in (draw.choice((1, 2, 3, 4, 7, 8)) for _ in range(count))
    ]


# --- names ---


def test_name_and_parse_are_inverse() -> None:
    for tile, cluster, schedule, swizzle, raster, timed in product(
        ((128, 256, 64), (256, 128, 128), (64, 8, 16)),
        ((1, 1), (2, 1), (1, 2)),
        ("cooperative", "pingpong"),
        (1, 2, 4, 8),
        ("along_m", "along_n"),
        (False, True),
    ):
        config = KernelConfig(*tile, *cluster, schedule, swizzle, raster, timed)
        assert KernelConfig.parse(config.name) == config
        assert config.name == f"{config.kernel}/swizzle{swizzle}/{raster}"
        for other in (replace(config, swapped=True), replace(config, across=True)):
            assert KernelConfig.parse(other.name) == other


def test_name_written_out() -> None:
    config = KernelConfig(128, 256, 64, 2, 1, "cooperative", 4, "along_n")
    assert config.name == "128x256x64_2x1_cooperative/swizzle4/along_n"
    assert replace(config, timed=True).kernel == "128x256x64_2x1_cooperative_timed"
    swapped = replace(config, swapped=True)
    assert swapped.kernel == "128x256x64_2x1_cooperative_swapped"
    assert replace(swapped, timed=True).kernel == "128x256x64_2x1_cooperative_swapped_timed"
    split = replace(config, splits=12)
    assert split.name == "128x256x64_2x1_cooperative/split12/swizzle4/along_n"
    across = replace(config, across=True)
    assert across.name == "128x256x64_2x1_cooperative/swizzle4/along_n/across"
    assert KernelConfig.parse(split.name) == split
    assert KernelConfig.parse("128x256x64_2x1_cooperative/split2").splits == 2


@pytest.mark.parametrize(
    ("problem", "chunks", "wanted"),
    [
        (Problem(300, 28672, 8192), 4, True),
        (Problem(300, 28672, 8192), 1, False),
        (Problem(100, 28672, 8192), 100, False),  # a row of tiles
        (Problem(2048, 28672, 8192), 8, False),  # much is left when the last chunk comes late
        (Problem(8192, 28672, 8192), 4, False),  # hidden behind the arithmetic
        (Problem(624, 4096, 4096), 4, False),  # stays in the L2 cache
        (Problem(300, 28672, 16384, format=FP8), 4, True),
        (Problem(624, 4096, 8192, format=FP8), 4, False),
    ],
)
def test_where_a_weight_is_read_once_for_all_chunks(
    problem: Problem, chunks: int, wanted: bool
) -> None:
    for gpu in cost_model.known_gpus():
        here = replace(problem, gpu=gpu)
        assert heuristics.reads_b_across(here, SMALL, chunks) is wanted


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6])
def test_an_order_across_the_chunks_reads_each_column_once(rows: int) -> None:
    problem = Problem(rows * SMALL.tile_m * SMALL.cluster_m, 28672, 8192)
    usual = KernelConfig.parse(SMALL.kernel + "/swizzle8/along_n")
    config = heuristics.across(problem, usual)
    assert config.across
    # The order is made of one chunk, as the kernel makes it, and of rows of tiles, not of elements.
    order = _core.tile_order(rows, 12, 1, 1, 1, 0, config.max_swizzle, config.raster)
    columns = [column for _, column, *_ in order]
    assert columns == sorted(columns)


def test_an_order_across_the_chunks_that_was_tuned_stays() -> None:
    tuned = KernelConfig.parse(SMALL.kernel + "/swizzle8/along_n/across")
    assert heuristics.across_chunks(Problem(300, 28672, 8192), tuned, 4) == tuned


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((624, 28672, 8192), True), ((768, 13824, 5120), True), ((1024, 28672, 8192), False)],
)
@pytest.mark.parametrize("gpu", cost_model.known_gpus())
def test_a_weight_is_read_once_where_that_saves_more_than_tiles_wait(
    shape: tuple[int, int, int], wanted: bool, gpu: str
) -> None:
    """It took 1.22 × torch.mm at 768 × 13824 × 5120 on an H200, by a kernel that read B four times
    beside arithmetic of almost that length; 0.99 with one chunk."""
    problem = Problem(*shape, gpu=gpu)
    kernel = Planner(cost_model.default_kernels).fused_plan(problem).kernel
    assert kernel is not None
    assert heuristics.across_chunks(problem, kernel, 4).across is wanted
    assert not heuristics.across_chunks(problem, kernel, 1).across


def test_swizzle_and_raster_may_be_left_out() -> None:
    plain = KernelConfig(128, 128, 64, 1, 1, "pingpong", 1, "along_m")
    assert KernelConfig.parse("128x128x64_1x1_pingpong") == plain
    assert KernelConfig.parse("128x128x64_1x1_pingpong/swizzle8") == replace(plain, max_swizzle=8)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "unfused",
        "128x256x64",
        "128x256_2x1_cooperative",
        "128x256x64x1_2x1_cooperative",
        "128x256x64_2_cooperative",
        "128x256x64_2x1_stream-k",
        "128x256x64_2x1_cooperative_slow",
        "128x256x64_2x1_cooperative_timed_timed",
        "128x256xlarge_2x1_cooperative",
        "128x256x64_2x1_cooperative/split1",
        "128x256x64_2x1_cooperative/split",
        "128x256x64_2x1_cooperative/swizzle4/split2",
        "128x256x64_2x1_cooperative/swizzle3",
        "128x256x64_2x1_cooperative/swizzle16",
        "128x256x64_2x1_cooperative/swizzle",
        "128x256x64_2x1_cooperative/4",
        "128x256x64_2x1_cooperative/swizzle04",
        "128x256x64_2x1_cooperative/swizzle4/along_k",
        "128x256x64_2x1_cooperative/along_m",
        "128x256x64_2x1_cooperative/swizzle4/along_m/more",
        "128x256x64_2x1_cooperative/swizzle4/",
        " 128x256x64_2x1_cooperative",
        "0x256x64_2x1_cooperative",
        "-128x256x64_2x1_cooperative",
        "128x256x64_2x0_cooperative",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^config: found ") as caught:
        KernelConfig.parse(name)
    assert str(caught.value) == (
        f"config: found {name!r}, wanted a name such as 128x256x64_2x1_cooperative/swizzle4/along_m"
    )


def test_parse_config() -> None:
    config = KERNELS[0]
    assert plans.parse_config("") == (None, None)
    assert plans.parse_config(config.name) == (config, None)
    assert plans.parse_config(f"{config.name}/pull") == (config, PULL)
    assert plans.parse_config(f"{config.name}/gather") == (config, GATHER)
    assert plans.parse_config(f"{config.name}/sm16x128+1") == (config, SmPush(16, 128, 1))
    assert plans.parse_config(f"{config.kernel}/push") == (
        KernelConfig.parse(config.kernel),
        PUSH,
    )
    for plan in plans.BY_LIBRARY:
        assert plans.parse_config(plan.name) == (None, plan.transport)
    for name in (
        "fast",
        "3",
        "fast/pull",
        f"{config.name}/unfused",
        f"{config.name}/teleport",
        "/pull",
        "pull",
    ):
        with pytest.raises(ValueError, match=r"^config: found '.*', wanted a name such as "):
            plans.parse_config(name)


def test_few_tiles_are_split() -> None:
    """64 tiles of 128 x 224 on 132 multiprocessors may be 128 halves, and no more."""
    problem = Problem(512, 3584, 8192, world_size=4)
    wide = next(kernel for kernel in KERNELS if kernel.tile_n == 224)
    plans = heuristics.usual_plans(problem, wide)
    assert [p.kernel.splits for p in plans if p.kernel] == [1, 1, 2, 2]
    assert all(legality.why_illegal(problem, p, KERNELS) is None for p in plans)
    thirds = Plan("push", replace(wide, splits=3))
    reason = "plan: found 3 splits of K for 128x224x64_2x1_cooperative, wanted 1 to 2"
    assert legality.why_illegal(problem, thirds, KERNELS) == reason
    assert legality.why_illegal(replace(problem, m=256), thirds, KERNELS) is None
    # One k tile cannot be split, nor what other kernels compute.
    assert len(heuristics.usual_plans(replace(problem, k=64), wide)) == 2
    assert "2 splits" in str(legality.why_illegal(problem, push(replace(WIDE, splits=2)), KERNELS))


def test_parts_of_a_cluster() -> None:
    """K is split between at most the 8 CTAs of a cluster. Clusters do not fill the GPU, unlike
    splits that are not clusters, of which as many fit at once as there are multiprocessors."""
    kernel = KernelConfig.parse("96x128x64_1x1_cooperative_swapped")
    assert kernel.splits_in_cluster
    problem = Problem(64, 128, 8192)
    splits = legality.legal_splits(problem, kernel)
    assert list(splits) == list(range(1, 9))
    assert list(legality.legal_splits(replace(problem, n=128 * 40), kernel)) == [1, 2, 3]
    at_once = [
        cost_model.Tiling(problem, replace(kernel, splits=splits)).workers for splits in splits
    ]
    assert at_once[0] == 132
    assert all(workers % n == 0 for workers, n in zip(at_once, splits, strict=True))
    assert max(at_once[2:]) <= 120


def test_configs_and_problems_are_values() -> None:
    assert len({KernelConfig.parse(KERNELS[0].name), KERNELS[0]}) == 1
    assert len({Problem(1, 2, 3), Problem(1, 2, 3), Problem(1, 2, 4)}) == 2
    with pytest.raises(FrozenInstanceError):
        KERNELS[0].tile_m = 64  # type: ignore[misc]


@pytest.mark.slow
def test_usual_plans_are_legal() -> None:
    draw = random.Random(7)
    heads = 0
    for problem in random_problems(150):
        problem = replace(
            problem,
            b_layout=draw.choice(("column", "row")),
            peer_atomics=draw.random() < 0.8,
            sm_count=draw.choice((0, 114)),
        )
        for kernel in KERNELS:
            for plan in heuristics.usual_plans(problem, kernel):
                assert legality.why_illegal(problem, plan, KERNELS) is None, (problem, plan.name)
            for push in heuristics.sm_pushes(problem, kernel):
                plan = Plan(push, kernel)
                assert legality.why_illegal(problem, plan, KERNELS) is None, (problem, plan.name)
                heads += push.has_ctas(problem.k)
    assert heads > 0


def test_of_copies_every_field() -> None:
    timed = replace(KERNELS[1], timed=True)
    assert KernelConfig.of(timed.core) == timed
    changed = KernelConfig.of(timed.core, max_swizzle=4, raster="along_n")
    assert changed == replace(timed, max_swizzle=4, raster="along_n")


# --- why_unfused ---


MULTIPLE = "wanted a positive multiple of 8 (16-byte TMA alignment)"


@pytest.mark.parametrize("dtype", problems.FUSED_DTYPES)
def test_aligned_half_precision_is_fused(dtype: str) -> None:
    for n, k in product((8, 16, 1000, 28672), (8, 24, 4096)):
        assert legality.why_unfused(dtype, n, k) is None


@pytest.mark.parametrize(
    ("dtype", "n", "k", "reason"),
    [
        ("float32", 8, 8, "A_shard: found dtype float32, wanted bfloat16 or float16"),
        ("int8", 8, 8, "A_shard: found dtype int8, wanted bfloat16 or float16"),
        ("bfloat16", 8, 12, f"A_shard: found K=12, {MULTIPLE}"),
        ("bfloat16", 8, 0, f"A_shard: found K=0, {MULTIPLE}"),
        ("float16", 1, 8, f"B: found N=1, {MULTIPLE}"),
        ("float16", 0, 8, f"B: found N=0, {MULTIPLE}"),
        (
            "float16",
            2**31,
            8,
            f"B: found shape (8, 2147483648), wanted sizes up to {problems.MAX_SIZE}",
        ),
    ],
)
def test_reasons_against_the_fused_path(dtype: str, n: int, k: int, reason: str) -> None:
    assert legality.why_unfused(dtype, n, k) == reason


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_rows_of_all_ranks_are_counted_in_32_bits(world_size: int) -> None:
    most = problems.MAX_SIZE // world_size
    assert 2**30 < problems.MAX_SIZE < 2**31 - 1024
    assert legality.why_too_many_rows(most, world_size) is None
    found = legality.why_too_many_rows(most + 1, world_size)
    assert found == (
        f"A_shard: found {most + 1} rows of each of {world_size} ranks, wanted at most {most}"
    )


# --- why_illegal ---


@pytest.mark.parametrize("problem", [Problem(8, 8, 8, return_A=a) for a in (False, True)])
def test_what_the_planner_chooses_is_legal(problem: Problem) -> None:
    chosen = planner_of(KERNELS).choose(problem, fused=True).plan
    assert chosen.transport == PUSH
    assert legality.why_illegal(problem, chosen, KERNELS) is None
    assert legality.why_illegal(problem, UNFUSED, ()) is None


@pytest.mark.parametrize(
    ("problem", "found", "reason"),
    [
        (Problem(8, 8, 8), Plan("pull", WIDE), "found transport pull, wanted push"),
        (
            Problem(8, 8, 8, return_A=True),
            push(replace(WIDE, cluster_n=2)),
            "found transport push, wanted pull",
        ),
        (
            Problem(8, 8, 8, return_A=True, b_layout="row"),
            push(WIDE),
            "found transport push, wanted pull",
        ),
        (Problem(8, 8, 8), Plan("sm16x64", WIDE), "found 1 ranks, wanted 2 to 16"),
        (Problem(8, 8, 8, world_size=4), Plan("sm128x64", WIDE), "found 128 parts, wanted a power"),
        (Problem(8, 8, 8, world_size=4), Plan("sm12x64", WIDE), "found 12 parts, wanted a power"),
        (Problem(8, 8, 8, world_size=4), Plan("sm16x12", WIDE), "found 12 columns, wanted a mult"),
        (
            Problem(8, 8, 2048, world_size=4),
            Plan("sm16x8", WIDE),
            "found 256 chunks, wanted at",
        ),
        (Problem(8, 8, 8, world_size=4, gpu=CPU), Plan("sm16x8"), "wanted push or unfused on the"),
        (
            Problem(4096, 3584, 8192, world_size=4),
            Plan("sm16x128h4", WIDE),
            "on all multiprocessors, wanted free ones",
        ),
        (
            Problem(8, 8, 8, return_A=True),
            Plan("teleport", WIDE),
            "found transport teleport, wanted push or pull",
        ),
        (Problem(8, 8, 8), Plan("teleport", WIDE), "found transport teleport"),
        (Problem(8, 8, 8), Plan("push"), "found no kernel"),
        (Problem(8, 8, 8), Plan("push", WIDE, 2), "found 2 chunks per shard, wanted 1"),
        (Problem(8, 8, 8), Plan("push", WIDE, 0), "found 0 chunks per shard, wanted 1 to"),
        (
            Problem(8, 8, 8, gpu=CPU),
            Plan("push", None, 1025),
            "1025 chunks per shard, wanted 1 to 1024",
        ),
        (Problem(8, 8, 8, world_size=4), Plan("sm16x8+4", WIDE), "found 4 first peers of 4 ranks"),
        (Problem(8, 8, 8), push(replace(WIDE, tile_n=64)), "which is not in this build"),
        (Problem(8, 12, 8), push(WIDE), "found N=12, wanted a positive multiple of 8"),
        (Problem(8, 8, 8, gpu=CPU), push(WIDE), "on the CPU"),
        (Problem(8, 8, 8, gpu=CPU, return_A=True), Plan("pull"), "wanted push"),
    ],
)
def test_illegal_plans(problem: Problem, found: Plan, reason: str) -> None:
    assert reason in str(legality.why_illegal(problem, found, KERNELS))


def test_the_cpu_takes_any_columns_and_chunks() -> None:
    problem = Problem(5, 3, 7, format="float64", gpu=CPU)
    assert legality.why_illegal(problem, Plan("push", chunks_per_shard=3), ()) is None


# --- the cost model ---


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel)
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("return_A", [False, True])
def test_time_grows_with_rows(kernel: KernelConfig, world_size: int, return_A: bool) -> None:
    problems = [
        Problem(world_size * rows, 1000, 4096, world_size=world_size, return_A=return_A)
        for rows in (1, 5, 63, 129, 511, 1001, 2047, 8001)
    ]
    for times in (
        [cost_model.fused_us(problem, kernel) for problem in problems],
        [cost_model.unfused_us(problem) for problem in problems],
    ):
        assert times[0] > 0
        assert all(before <= after for before, after in pairwise(times))
        assert times[0] < times[-1]


def test_time_grows_with_every_extent() -> None:
    base = Problem(4096, 4096, 4096, world_size=4)
    for kernel in KERNELS:
        for larger in (replace(base, m=16384), replace(base, n=16384), replace(base, k=16384)):
            assert cost_model.fused_us(larger, kernel) > cost_model.fused_us(base, kernel)
            assert cost_model.unfused_us(larger) > cost_model.unfused_us(base)


def fused_us_tile_by_tile(problem: Problem, config: KernelConfig) -> float:
    """The definition of `fused_us`: workers take the blocks in turn, one after the other, on a rank
    that has the fewest whole blocks in the chunks that are there."""
    c = cost_model.constants(problem.gpu)
    workers = c.sm_count // (config.cluster_m * config.cluster_n)
    block_rows = config.tile_m * config.cluster_m
    in_row = -(-problem.n // (config.tile_n * config.cluster_n))
    blocks = -(-problem.m // block_rows) * in_row
    tile_us = 2e-6 * config.tile_m * config.tile_n * problem.k / c.tflops_per_sm[config.kernel]
    if problem.world_size > 1:
        tile_us *= c.gathered_factor.get(config.kernel, c.other_gathered_factor)
    if blocks < workers:
        tile_us *= 1 - c.idle_gain * (workers - blocks) / workers
    overhead_us = c.tile_overhead_us.get(config.kernel, c.tile_overhead_us[config.schedule])
    tile_us += overhead_us
    hides = config.schedule == "pingpong" and problem.world_size == 1
    hidden_us = c.pingpong_overlap * overhead_us if hides else 0.0
    is_shared = problem.m // problem.world_size % config.tile_m != 0 and problem.world_size > 1
    rows = problem.m // problem.world_size

    def is_there(block_row: int, rank: int, position: int) -> bool:
        begin, end = block_row * block_rows, min((block_row + 1) * block_rows, problem.m)
        first, stop = rank * rows, (rank + position) * rows  # around the ring
        beyond = stop - problem.m
        return (begin >= first and end <= stop) or end <= beyond

    whole = [  # blocks before each position in the ring
        in_row
        * min(
            sum(is_there(b, rank, position) for b in range(blocks // in_row))
            for rank in range(problem.world_size)
        )
        for position in range(problem.world_size)
    ]
    free_at = [0.0] * workers
    for block in range(blocks):
        position = max(p for p, before in enumerate(whole) if before <= block)
        arrival = cost_model.arrival_us(problem, position)
        us = tile_us if block < workers else tile_us - hidden_us
        free_at[block % workers] = max(free_at[block % workers], arrival) + us
    last = cost_model.arrival_us(problem, problem.world_size - 1)
    staging = c.copy_overhead_us if is_shared else 0.0
    return c.launch_us + staging + max(last + tile_us, *free_at)


@pytest.mark.parametrize("m", [16, 64, 256])
def test_swapped_kernels_are_not_chosen_behind_a_small_gather(m: int) -> None:
    """Swapped kernels are faster than predicted or slower there: nobody has timed them."""
    problem = Problem(m, 4608, 7168, world_size=2)
    found = planner().choose(problem, fused=True).plan.kernel
    assert found is not None and not found.swapped
    fused = [plan for plan, _ in planner().alternatives(problem) if not plan.gathers_first]
    assert not any(plan.kernel and plan.kernel.swapped for plan in fused)


@pytest.mark.parametrize("b_layout", ["column", "row"])
@pytest.mark.parametrize(("n", "k"), [(1280, 8192), (4608, 7168), (7168, 8192), (8192, 1024)])
@pytest.mark.parametrize("m", [16, 32, 64])
def test_few_rows_are_computed_in_tiles_of_few_rows(m: int, n: int, k: int, b_layout: str) -> None:
    """Others multiply rows that do not exist."""
    found = planner().fused_plan(Problem(m, n, k, b_layout=b_layout)).kernel
    assert found is not None
    assert found.swapped
    assert found.tile_m <= 64


@pytest.mark.slow
def test_fused_time_is_that_of_the_tiles_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "matmul_memory_us", lambda *_: 0.0)
    monkeypatch.setattr(gather, "lost_clock_us", lambda *_: 0.0)
    for problem in random_problems(60):
        if cost_model.constants_for(problem).gathered_overlap:
            continue  # each of its tiles has the mean time
        for kernel in KERNELS:
            slow = fused_us_tile_by_tile(problem, kernel)
            assert cost_model.fused_us(problem, kernel) == pytest.approx(slow)


def test_no_call_ends_before_its_last_chunk_has_come() -> None:
    for problem in [*random_problems(60), Problem(8, 8, 8192, world_size=8)]:
        last = cost_model.arrival_us(problem, problem.world_size - 1)
        assert all(cost_model.fused_us(problem, kernel) > last for kernel in KERNELS)


def test_waiting_for_peers_costs_time() -> None:
    for problem in random_problems(60):
        for kernel in KERNELS:
            alone = cost_model.fused_us(replace(problem, world_size=1), kernel)
            assert cost_model.fused_us(problem, kernel) >= alone


def test_a_slow_link_dominates_a_small_product() -> None:
    # 8 ranks and 8 columns: next to nothing to compute, 64 MiB to receive.
    problem = Problem(4096, 8, 8192, world_size=8)
    last = cost_model.arrival_us(problem, 7)
    assert last < cost_model.fused_us(problem, KERNELS[4]) < 2 * last


def test_chunks_arrive_one_after_the_other() -> None:
    for problem in random_problems(60):
        arrivals = [cost_model.arrival_us(problem, p) for p in range(problem.world_size)]
        assert arrivals[0] == 0.0
        assert all(before < after for before, after in pairwise(arrivals))


def test_pull_is_slower_than_push() -> None:
    for problem in random_problems(40):
        for position in range(1, problem.world_size):
            pushed = cost_model.arrival_us(problem, position)
            assert cost_model.arrival_us(problem, position, is_pull=True) > pushed


@pytest.fixture
def library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """agmm's own gather before a matmul is left out."""
    monkeypatch.setattr(cost_model, "why_not_gathered", lambda problem: "left out")


def test_a_little_slower_than_a_large_unfused_gather_is_fused(library_alone: None) -> None:
    """Fused plans may be slower by a fifth of the gather, which takes so much longer in some
    runs."""
    behind = []
    for m in range(520, 1200, 8):
        problem = Problem(m, 29568, 8192, world_size=4)  # B takes longer than any gather
        us = min(
            predict_us(problem, p) or 0.0
            for kernel in kernels_for(problem)
            for p in heuristics.usual_plans(problem, kernel)
        )
        late = (us - cost_model.unfused_us(problem)) / cost_model.all_gather_us(problem)
        behind.append(late)
        assert (planner_of(KERNELS).plan(problem) == UNFUSED) == (late > 0.2)
    assert any(0 < late < 0.2 for late in behind)
    assert any(late > 0.2 for late in behind)


def test_a_small_gather_is_worth_no_margin(library_alone: None) -> None:
    """The gather's latency is steady: of 24 to 48 rows of 2048 x 7168 none was faster fused, by
    kernels with tiles of 128 rows."""
    behind = []
    for m in range(8, 96, 8):
        problem = Problem(m, 3584, 8192, world_size=4)
        fused = planner_of(KERNELS).choose(problem, fused=True).predicted_us
        assert fused is not None
        late = (fused - cost_model.unfused_us(problem)) / cost_model.all_gather_us(problem)
        behind.append(late)
        assert (planner_of(KERNELS).plan(problem) == UNFUSED) == (late > 0)
    assert any(0 < late < 0.2 for late in behind)


def test_few_rows_are_gathered_by_a_kernel() -> None:
    """Up to a tenth more than the fused call's predicted time, which few rows seldom keep; of
    megabytes between more than two ranks less."""
    found = []
    for m in (4, 16, 64, 128, 256, 512, 1024, 1032, 2048):
        problem = Problem(m, 3584, 8192, world_size=4)
        choice = planner_of(KERNELS).choose(problem)
        fused_us = planner_of(KERNELS).choose(problem, fused=True).predicted_us
        is_legal = legality.why_illegal(problem, GATHERED, KERNELS) is None
        assert is_legal == (m <= 1024)
        assert fused_us is not None
        limit_us = cost_model.gathered_margin(problem) * fused_us
        is_gathered = is_legal and cost_model.gathered_us(problem) < limit_us
        assert (choice.plan == GATHERED) == is_gathered
        found.append(is_gathered)
    assert found[:4] == [True] * 4 and not found[-1]
    assert planner_of(KERNELS).choose(Problem(64, 3584, 8192, world_size=9)).plan != GATHERED


@pytest.mark.parametrize(
    ("m", "n", "world_size", "margin"),
    [(64, 4096, 4, 1.1), (512, 4096, 2, 1.1), (512, 2048, 4, 0.9), (512, 4096, 4, 1.0)],
)
def test_the_margin_of_a_gather(m: int, n: int, world_size: int, margin: float) -> None:
    """B of 4096 columns is larger than the L2 cache."""
    problem = Problem(m, n, 8192, world_size=world_size)
    assert cost_model.gathered_margin(problem) == margin


def test_rows_of_old_versions_knew_no_gather_but_the_librarys() -> None:
    few = Problem(64, 3584, 8192, world_size=4)
    for version, wanted in (("0.1.0", GATHERED), ("0.2.0", UNFUSED)):
        row = Row(64, UNFUSED, 40.0, agmm=version)
        assert planner(row).plan(few) == wanted
        assert planner(row).fused_plan(few).kernel is not None
    row = Row(64, GATHERED, 30.0, agmm="0.2.0")
    assert planner(row).choose(few).row == row
    assert planner(row).fused_plan(few).kernel is not None
    assert planner(row).plan(replace(few, m=72)) == GATHERED
    assert planner(Row(512, GATHERED, 1.0)).plan(replace(few, m=1024)) != GATHERED  # too much


def test_a_call_that_waits_for_its_links_keeps_its_clock() -> None:
    problem = Problem(262144, 256, 8192, world_size=4)  # 1.6 ms of tiles, 8.9 ms of copies
    last = cost_model.arrival_us(problem, 3)
    assert cost_model.fused_us(problem, WIDE) < 1.1 * last


def test_an_unknown_gpu_gets_the_default_constants_and_its_own_multiprocessors() -> None:
    assert cost_model.constants("nvidia-h999").gpu == DEFAULT_GPU
    problem = Problem(8192, 8192, 8192, gpu="nvidia-h999", sm_count=66)
    half, whole = (cost_model.fused_us(replace(problem, sm_count=c), WIDE) for c in (66, 0))
    assert half > 1.9 * whole


# --- the choice by the model ---


def test_choice_is_the_least_predicted_time() -> None:
    for problem in [*random_problems(60), Problem(1, 8, 8), Problem(7, 8, 8, world_size=7)]:
        choice = planner_of(KERNELS).choose(problem)
        assert legality.why_illegal(problem, choice.plan, KERNELS) is None
        plans = [
            p for kernel in kernels_for(problem) for p in heuristics.usual_plans(problem, kernel)
        ]
        fused_us = min(us for p in plans if (us := predict_us(problem, p)) is not None)
        wanted = fused_us
        margin = cost_model.choice_margin(problem, "gather")
        if margin is not None:  # fitted ones, of which those of NCCL's gathers are never met
            by_library = margin * cost_model.gathered_us(problem)
            is_legal = legality.why_illegal(problem, GATHERED, KERNELS) is None
            if is_legal and by_library < fused_us:
                wanted = cost_model.gathered_us(problem)
            assert choice.predicted_us == wanted
            continue
        if problem.world_size > 1:
            wanted = min(wanted, cost_model.unfused_us(problem))
        if legality.why_illegal(problem, GATHERED, KERNELS) is None:
            gathered_us = cost_model.gathered_us(problem)
            limit_us = cost_model.gathered_margin(problem) * fused_us
            if gathered_us < min(limit_us, cost_model.unfused_us(problem)):
                wanted = gathered_us
        assert choice.predicted_us == wanted
        assert choice.source == "cost model"


def test_choice_is_deterministic() -> None:
    one, other = planner_of(KERNELS), planner_of(KERNELS)
    for problem in random_problems(40):
        assert one.plan(problem) == one.plan(replace(problem)) == other.choose(problem).plan


def test_choice_looks_at_the_problem() -> None:
    assert len({planner_of(KERNELS).plan(problem).kernel for problem in random_problems(60)}) > 2


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel)
def test_only_kernel_is_chosen(kernel: KernelConfig) -> None:
    assert planner_of([kernel]).fused_plan(Problem(4096, 1000, 512)) == push(
        heuristics.usual_order(Problem(4096, 1000, 512), kernel)
    )


def test_no_kernels_to_choose_from() -> None:
    with pytest.raises(
        ValueError, match=r"^kernels: found none for bfloat16, wanted a build with CUDA kernels$"
    ):
        planner_of([]).fused_plan(Problem(8, 8, 8))


def test_one_rank_has_nothing_to_gather() -> None:
    assert planner_of(KERNELS).plan(Problem(8, 3584, 8192)) != UNFUSED


def test_what_the_kernels_cannot_compute_is_unfused() -> None:
    for problem in (Problem(8192, 8192, 8190), Problem(8192, 8192, 8192, format="float32")):
        choice = planner_of(KERNELS).choose(problem)
        assert choice.plan == UNFUSED
        assert choice.source == legality.why_unfused(problem.format, problem.n, problem.k)


def test_alternatives_are_sorted() -> None:
    problem = Problem(4096, 3584, 8192, world_size=4)
    alternatives = planner_of(KERNELS).alternatives(problem)
    times = [us for _, us in alternatives if us is not None]
    assert len(times) == 2 * len(KERNELS) + 1
    assert times == sorted(times)
    assert alternatives[0] == (planner_of(KERNELS).plan(problem), times[0])


def test_every_order_of_a_kernel() -> None:
    names = [config.name for config in heuristics.orders(WIDE)]
    assert len(set(names)) == 8
    assert all(KernelConfig.parse(name).kernel == WIDE.kernel for name in names)


# --- the choice by tables ---

TUNED = Problem(4096, 3584, 8192, world_size=4)


def test_a_row_of_the_problem_decides() -> None:
    row = Row(4096, push(WIDE), 350.0)
    choice = planner(row).choose(TUNED)
    assert (choice.plan, choice.source, choice.row) == (push(WIDE), "a table", row)
    assert planner(Row(4096, UNFUSED, 1.0)).plan(TUNED) == UNFUSED


def test_the_first_table_wins() -> None:
    first = TunedRows([Row(4096, push(WIDE), 1.0)], "first")
    second = TunedRows([Row(4096, push(SMALL), 1.0), Row(8192, push(SMALL), 1.0)], "second")
    chooses = planner_of(KERNELS, [first, second])
    assert chooses.choose(TUNED).source == "first"
    assert chooses.plan(TUNED) == push(WIDE)
    assert chooses.plan(replace(TUNED, m=8192)) == push(SMALL)


def test_neighbours_that_agree_decide() -> None:
    chooses = planner(Row(2048, push(WIDE), 9e9), Row(8192, push(WIDE), 1.0))
    choice = chooses.choose(TUNED)
    assert choice.plan == push(heuristics.usual_order(TUNED, WIDE)) != push(WIDE)
    assert "M=2048 and M=8192" in choice.source
    assert choice.row is None


def calibrated(m: int, kernel: KernelConfig, ratio: float) -> Row:
    """A row that measured ``ratio`` times the model's time."""
    return Row(m, push(kernel), ratio * cost_model.fused_us(replace(TUNED, m=m), kernel))


@pytest.mark.parametrize("m", [2056, 4096, 4104, 8184])
def test_of_neighbours_that_disagree_the_faster_at_this_m_wins(m: int) -> None:
    problem = replace(TUNED, m=m)
    model = {kernel: cost_model.fused_us(problem, kernel) for kernel in (WIDE, SMALL)}
    for lower, upper in ((WIDE, SMALL), (SMALL, WIDE)):
        for first, second in ((0.5, 2.0), (2.0, 0.5)):
            rows = calibrated(2048, lower, first), calibrated(8192, upper, second)
            wanted = lower if model[lower] * first < model[upper] * second else upper
            found = planner(*rows, kernels=(WIDE, SMALL)).plan(problem)
            assert found == push(heuristics.usual_order(problem, wanted))


def test_the_models_favourite_takes_part() -> None:
    slowest = max(KERNELS, key=lambda kernel: cost_model.fused_us(TUNED, kernel))
    favourite = planner_of(KERNELS).choose(TUNED)
    one = planner(calibrated(2048, slowest, 1.0)).choose(TUNED)
    assert one.plan == favourite.plan
    assert one.source == "cost model, against what was tuned at M=2048 (a table)"


def test_a_plan_of_a_row_is_rated_by_its_own_row() -> None:
    """This holds for the model's favourite too: it measured 1.3 times its prediction."""
    favourite, second = [
        p for p, _ in planner_of(KERNELS).alternatives(TUNED) if p.transport == PUSH
    ][:2]
    assert favourite.kernel is not None and second.kernel is not None
    rows = calibrated(2048, favourite.kernel, 1.3), calibrated(8192, second.kernel, 1.0)
    choice = planner(*rows).choose(TUNED)
    assert choice.plan == second
    assert choice.source == "tuned at M=2048 and M=8192 (a table)"


def test_sm_push_cut_anew_is_not_rated_by_how_fast_it_was_cut_otherwise() -> None:
    problem = replace(TUNED, m=4104)  # its shards end inside tiles
    kernel = heuristics.usual_order(problem, WIDE)
    row = Plan("sm8x256", kernel)
    there = predict_us(TUNED, row)
    here = predict_us(problem, heuristics.usual_plans(problem, kernel)[1])
    assert there is not None and here is not None
    fast = planner(Row(4096, row, 0.5 * there), kernels=(WIDE,)).choose(problem)
    slow = planner(Row(4096, row, 2.0 * there), kernels=(WIDE,)).choose(problem)
    # At half its time it would beat the copies by far.
    assert fast.plan == slow.plan == push(kernel)
    assert here > cost_model.fused_us(problem, kernel)


@pytest.mark.parametrize("first", [0.8, 1.0, 1.1, 1.3])
@pytest.mark.parametrize("second", [0.8, 1.0, 1.1, 1.3])
def test_the_models_favourite_is_rated_by_the_mean_of_its_neighbours(
    first: float, second: float
) -> None:
    kernels = [kernel for kernel in KERNELS if kernel.tile_n != 224]
    plans = [plan for plan, _ in planner_of(kernels).alternatives(TUNED) if plan.transport == PUSH]
    favourite, second_best, slowest = plans[0], plans[1], plans[-1]
    assert second_best.kernel is not None and slowest.kernel is not None
    rows = calibrated(2048, second_best.kernel, first), calibrated(8192, slowest.kernel, second)
    rated = {
        second_best: first * cost_model.fused_us(TUNED, second_best.kernel),
        slowest: second * cost_model.fused_us(TUNED, slowest.kernel),
    }
    best = min(rated, key=lambda plan: rated[plan])
    assert favourite.kernel is not None
    mine = (first + second) / 2 * cost_model.fused_us(TUNED, favourite.kernel)
    wanted = favourite if mine < rated[best] else best
    assert planner(*rows, kernels=kernels).plan(TUNED) == wanted


def test_an_unfused_neighbour_is_rated_too() -> None:
    half = replace(TUNED, m=2048)
    unfused = Row(2048, UNFUSED, 0.5 * cost_model.unfused_us(half))
    fused = calibrated(8192, WIDE, 1.0)
    assert planner(unfused, fused).plan(TUNED) == UNFUSED
    assert planner(unfused, fused).choose(TUNED, fused=True).plan != UNFUSED


@dataclass(frozen=True)
class RowsOfOneKind:
    """A table whose rows are of calls that return A, or of calls that do not."""

    found: Sequence[Row]
    return_A: bool
    name: str = "a table"

    def rows(self, problem: Problem) -> Sequence[Row]:
        return self.found if problem.return_A == self.return_A else ()


def test_calls_that_differ_in_return_A_say_something() -> None:
    plain, with_A = TUNED, replace(TUNED, return_A=True)
    slow = Row(TUNED.m, push(SMALL), 1000.0)
    without = planner_of(KERNELS, [RowsOfOneKind([slow], return_A=False)])
    found = without.choose(with_A)
    assert (found.plan, found.source) == (push(SMALL), "a table, return_A=False")
    assert found.row is None
    assert without.choose(plain).row == slow
    both = planner_of(
        KERNELS,
        [
            RowsOfOneKind([slow], return_A=False),
            RowsOfOneKind([Row(TUNED.m, push(WIDE), 9.0)], True),
        ],
    )
    assert both.choose(with_A).plan == push(WIDE)
    # A row of the same M that differs in return_A says more than one with the same return_A at a
    # quarter of M.
    far = RowsOfOneKind([Row(TUNED.m // 4, push(WIDE), 9.0)], return_A=True)
    near = planner_of(KERNELS, [RowsOfOneKind([slow], return_A=False), far])
    assert near.choose(with_A).plan == push(SMALL)
    # A row with return_A serves a call without it only where its plan is legal for the call and not
    # unfused, since only the unfused path returns A for nothing.
    unfused = planner_of(KERNELS, [RowsOfOneKind([Row(TUNED.m, UNFUSED, 9.0)], return_A=True)])
    assert unfused.choose(plain).source == "cost model"
    pull = Row(TUNED.m, Plan("pull", WIDE), 9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pulls = planner_of(KERNELS, [RowsOfOneKind([pull], return_A=True)])
        assert pulls.choose(plain).source == "cost model"


def test_sm_push_of_whole_tiles_is_not_for_shards_that_end_inside_them() -> None:
    kernel = KernelConfig.parse("128x112x64_2x1_cooperative/swizzle4/along_n")
    problem = Problem(512, 3584, 8192, world_size=4)
    tuned = Row(512, Plan("sm16x64", kernel), 1.0)
    assert planner(tuned).choose(problem).plan == tuned.plan
    found = planner(tuned).choose(replace(problem, m=384), fused=True).plan
    assert found.kernel is not None and cost_model.straddles(replace(problem, m=384), found.kernel)
    assert found.transport == SmPush(4, 128)


def test_rows_far_away_say_nothing() -> None:
    chooses = planner(Row(64, push(WIDE), 1.0), Row(65536, push(WIDE), 1.0))
    assert chooses.choose(TUNED).source == "cost model"
    assert planner(Row(1024, push(WIDE), 1.0)).choose(TUNED).source != "cost model"


@pytest.mark.parametrize(("m", "chunks"), [(110, 2), (140, 2), (200, 8), (390, 8), (1000, 8)])
def test_without_a_model_the_nearest_row_decides(m: int, chunks: int) -> None:
    rows = [Row(m, Plan("push", chunks_per_shard=c), 1.0) for m, c in ((100, 2), (400, 8))]
    problem = Problem(m, 5, 7, format="float32", world_size=2, gpu=CPU)
    assert planner(*rows).plan(problem).chunks_per_shard == chunks


def test_the_cpu_without_rows_is_fused_in_one_chunk() -> None:
    choice = planner_of([]).choose(Problem(10, 5, 7, format="float32", world_size=2, gpu=CPU))
    assert (choice.plan, choice.predicted_us) == (Plan("push"), None)


def test_a_row_of_another_build_is_passed_over_with_one_warning() -> None:
    gone = replace(WIDE, tile_n=64)
    rows = Row(4096, push(gone), 1.0), Row(2048, push(gone), 1.0), Row(8192, push(SMALL), 1.0)
    chooses = planner(*rows, kernels=(WIDE, SMALL))
    with pytest.warns(UserWarning, match="128x64x64_2x1_cooperative, which is not in this build"):
        assert chooses.choose(TUNED).source.startswith(("tuned at M=8192", "cost model, against"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chooses.choose(TUNED)


def test_a_warm_look_up_takes_no_time() -> None:
    chooses = planner_of(KERNELS)
    chooses.plan(TUNED)
    calls, best_us = 2000, float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(calls):
            chooses.plan(Problem(4096, 3584, 8192, world_size=4, gpu=TUNED.gpu))
        best_us = min(best_us, (time.perf_counter() - begin) / calls * 1e6)
    assert best_us < 10  # 2 on a quiet machine


# --- links and multiprocessors ---


def test_links_without_atomics_rule_out_sm_push() -> None:
    reason = "sm push: found links without native atomics, wanted NVLink between all GPUs"
    for problem in random_problems(100):
        without = replace(problem, peer_atomics=False)
        for p, _ in planner_of(KERNELS).alternatives(without):
            assert not isinstance(p.transport, SmPush)
        if problem.world_size > 1:
            assert SmPush(16, 128).why_illegal(without, SMALL) == reason
            assert heuristics.sm_pushes(without, SMALL) == []


def test_rows_of_sm_push_are_passed_over_where_links_have_no_atomics() -> None:
    problem = Problem(512, 3584, 8192, world_size=4)
    row = Row(512, Plan("sm16x128", SMALL), 50.0)
    assert planner(row).plan(problem) == row.plan
    with pytest.warns(UserWarning, match="passes over rows of a table: plan: sm push: found links"):
        found = planner(row).plan(replace(problem, peer_atomics=False))
    assert found.kernel is None or found.transport == PUSH


def test_fewer_multiprocessors_take_no_split_that_needs_all() -> None:
    kernel = next(k for k in KERNELS if k.can_split and k.cluster_m == 2)
    sms = cost_model.constants(DEFAULT_GPU).sm_count
    problem = Problem(2 * kernel.tile_m, 8 * kernel.tile_n, 8192, world_size=2)
    most = sms // 16
    row = Row(problem.m, Plan("push", replace(kernel, splits=most)), 50.0)
    assert planner(row).plan(problem) == row.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the row is right, for calls that have all of them
        found = planner(row).plan(replace(problem, sm_count=sms - 8))
    assert found != row.plan
    assert found.kernel is None or found.kernel.splits * 16 <= sms - 8
