"""The usual orders of tiles and transports of a kernel, as measurements on H200 have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from agmm.planning import cost_model, formats
from agmm.planning.cost_model import At, Load, Tiling
from agmm.planning.legality import (
    legal_scatter_splits,
    legal_splits,
    why_illegal,
    why_lagged_illegal,
)
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan
from agmm.planning.problems import (
    ALIGNMENT,
    CPU,
    MATMUL_REDUCE_SCATTER,
    MAX_COLUMN_CHUNKS,
    MAX_PUSH_PARTS,
    RASTERS,
    SWIZZLES,
    KernelConfig,
    Problem,
)
from agmm.planning.transports import (
    LAGGED,
    PUSH,
    SCATTER,
    STREAMED,
    SmPush,
    copy_transports,
)

_PUSH_ROWS = 8
PUSH_COLUMNS = (64, 128)
"""The rows of a part, and the columns of a chunk, of the usual SM push. The narrow chunks begin
earlier but send less in a second: they are for matmuls whose only wave takes longer than the
sending, with tiles of one shard each that one CTA computes. A part has twice the rows where K is
split or shards end inside tiles, which wait for two ranks. Calls of two ranks, and those whose
nearest peer goes first, have one peer to send to at a time."""

_PUSH_SMS = 8
_PUSH_RATE_GB_PER_S = 220.0
_ONE_PEER_RATE_GB_PER_S = 100.0
"""A matmul that needs rows at least this fast is expected to wait for the sending: to several
peers, and to one, whose fences are not shared."""
_LINK_BOUND_GB_PER_S = 300.0
_LINK_BOUND_PARTS = 8
_LINK_BOUND_ROWS = 48
"""A matmul that needs rows faster than this, and whose shards end inside tiles, gets more parts
than these only if each has as many rows as this."""
_HEAD = (128, 4)
"""The columns of a chunk, and the number of chunks that the matmul's own warps still send, where
CTAs of their own push. These need `_PUSH_SMS` free multiprocessors, and a matmul that takes the
others' rows faster than its own warps send them."""

_MOST_SPLIT_CTAS = 96
"""The most CTAs of a matmul whose K is split, beside which CTAs of their own push. Those take
places that the clusters of the others need: with 100 to 120 of them calls on two H200 took up to
twice as long as with 96."""

_ROWS_OF_A_COLUMN = 6
"""The most rows of tiles, or of clusters of them, with which `across` goes column by column
(measured on one H100)."""

MAX_SPLITS = 8
"""The most splits of K in the usual plans. With more, adding up takes longer than the matmul."""


def is_fp8(problem: Problem) -> bool:
    return formats.of(problem.format).kind == formats.FP8


def chooses_swapped(problem: Problem) -> bool:
    """Whether the cost model chooses among swapped kernels too: those of 16 bits were timed behind
    gathers of more than `cost_model.STEADY_GATHER_BYTES` only, those of fp8 behind none; else they
    are left to tables."""
    if problem.world_size == 1:
        return True
    return not is_fp8(problem) and (
        cost_model.gathered_bytes(problem) > cost_model.STEADY_GATHER_BYTES
    )


def chooses_sm_push(problem: Problem) -> bool:
    """Whether the cost model chooses SM push too: of fp8 where it was timed; else it is left to
    tables."""
    return not is_fp8(problem) or cost_model.constants_for(problem).sends_scales


def chooses_streamed(problem: Problem) -> bool:
    """Whether the cost model chooses streamed gathers and scatters too, which it does where they
    were timed; else they are left to calls that name them."""
    return cost_model.constants_for(problem).streams_exchanges


def orders(config: KernelConfig) -> Iterator[KernelConfig]:
    """The kernel with every raster and swizzle."""
    for raster, max_swizzle in product(RASTERS, SWIZZLES):
        yield replace(config, raster=raster, max_swizzle=max_swizzle)


def has_few_rows_of_tiles(problem: Problem, tile_m: int) -> bool:
    """Whether a shard has so few rows of tiles that a swizzle gains nothing; of fp8 operands, where
    nobody has measured it, all shards together."""
    shards = 1 if is_fp8(problem) else problem.world_size
    return -(-problem.m // (shards * tile_m)) <= 8


def usual_order(problem: Problem, config: KernelConfig) -> KernelConfig:
    """The kernel with the raster and swizzle that were the best, or within 2% of it, on all but a
    few of the shapes measured on H200, within 4% on those (docs/dev/tried.md). Kernels for fp8
    operands have the orders in which their rates were measured, of every op."""
    fp8 = is_fp8(problem)
    if config.is_streaming:  # which has an order of its own
        return replace(config, raster="along_m", max_swizzle=1)
    if config.schedule == "pingpong":
        if has_few_rows_of_tiles(problem, config.tile_m):
            return replace(config, raster="along_m", max_swizzle=1)
        # Bands of rows read all of B each: from the L2 cache, or one reading for two tiles.
        reads_b_cheaply = config.cluster_m > 1 or cost_model.is_b_in_l2(problem)
        raster = "along_n" if reads_b_cheaply and not fp8 else "along_m"
        return replace(config, raster=raster, max_swizzle=4)
    max_swizzle = 4 if config.tile_m > config.tile_n and not fp8 else 8
    return replace(config, raster="along_n", max_swizzle=max_swizzle)


def batch_invariant_kernel(
    problem: Problem, kernels: Sequence[KernelConfig]
) -> KernelConfig | None:
    """The streaming kernel that multiplies without regard to the number of rows, of an
    all-gather -> matmul on one rank; None where there is none, for no M then. With its splits the
    sums do not depend on its tile (`streaming_kernel.hpp`), which is the smallest that reads B the
    least often."""
    streaming = [kernel for kernel in kernels if kernel.is_streaming]
    found = [
        replace(kernel, splits=splits)
        for kernel in streaming
        for splits in legal_splits(problem, kernel)
    ]
    if not found:
        return None
    least = min(found, key=lambda kernel: (-(-problem.m // kernel.tile_m), kernel.tile_m))
    return usual_order(problem, least)


MOST_STREAMED_ROWS = 256
"""The most rows of all ranks for which a streamed gather or scatter is looked at. It is a choice:
with more B is read again for each 64 rows, and the exchange takes longer than a launch."""


def streamed_plan(problem: Problem, kernels: Sequence[KernelConfig]) -> Plan | None:
    """The plan of few rows by one of the streaming kernels, which are those of an all-gather ->
    matmul; None where none is legal."""
    is_few = problem.m <= MOST_STREAMED_ROWS
    kernel = batch_invariant_kernel(problem, kernels) if is_few else None
    plan = None if kernel is None else Plan(STREAMED, kernel)
    return None if plan is None or why_illegal(problem, plan, kernels) is not None else plan


def reads_b_across(problem: Problem, kernel: KernelConfig, chunks: int) -> bool:
    """Whether a matmul whose rows come in so many chunks should go ``across`` them: where reading
    B, which the L2 cache does not hold, anew for each takes longer than the arithmetic, and one
    reading saves more than tiles may have to wait for their chunks.

    Reading and arithmetic take the time of both, as `cost_model.roofline_us` has it: on one H100
    with 4 chunks that are there 391 µs instead of 675 at 624 × 28672 × 8192 and 72 instead of 116
    at 192 × 18944 × 3584, on an H200 0.99 of torch.mm instead of 1.22 at 768 × 13824 × 5120. The
    chunks of a gather come by the links, at the rate of a push, in the mean after half of it.
    """
    rows_of_blocks = -(-problem.m // (kernel.tile_m * kernel.cluster_m))
    readings = min(chunks, rows_of_blocks)
    if readings == 1 or cost_model.is_b_in_l2(problem):
        return False
    arithmetic_us = cost_model.arithmetic_us(problem)
    once_us, anew_us = (cost_model.matmul_memory_us(problem, n) for n in (1, readings))
    busy_us, busy_anew_us = (cost_model.roofline_us(arithmetic_us, us) for us in (once_us, anew_us))
    waits_us = cost_model.pushed_us(problem) * (chunks - 1) / chunks / 2
    return arithmetic_us < anew_us and busy_anew_us - busy_us > waits_us


@lru_cache(maxsize=4096)
def across_chunks(problem: Problem, kernel: KernelConfig, chunks: int) -> KernelConfig:
    """The kernel as a matmul without a gather runs it, where its rows come in so many chunks."""
    if kernel.across or not reads_b_across(problem, kernel, chunks):
        return kernel
    return across(problem, kernel)


def across(problem: Problem, kernel: KernelConfig) -> KernelConfig:
    """The kernel, with its tiles in one order over all chunks. Few rows of tiles go column by
    column: bands of 2 or 4 of them would read B anew each."""
    if problem.m <= _ROWS_OF_A_COLUMN * kernel.tile_m * kernel.cluster_m:
        kernel = replace(kernel, raster="along_m", max_swizzle=1)
    return replace(kernel, across=True)


def _can_have_head(k: int, free_sms: int) -> bool:
    """Whether CTAs of their own find a multiprocessor, and most of K left to push."""
    columns, chunks = _HEAD
    return free_sms >= _PUSH_SMS and k >= 2 * columns * chunks


def usual_sm_push(problem: Problem, kernel: KernelConfig) -> SmPush:
    at, tiling = At(problem), Tiling(problem, kernel)
    return usual_sm_push_at(at, tiling, at.load(tiling), kernel.splits)


def usual_sm_push_at(at: At, tiling: Tiling, load: Load, splits: int) -> SmPush:
    # With more than one wave of tiles the nearest consumer's rows go first, since it computes them
    # first.
    problem, rows = at.problem, max(1, at.rows)
    one_wave = load.waves <= 1
    # In shorter shards this holds up the others for longer than it helps.
    straddles = at.straddles(tiling.tile_m)
    is_short = straddles or rows < max(256, tiling.block_rows)
    first_peers = 0 if one_wave or is_short else 1
    has_one_peer = problem.world_size == 2
    one_peer = first_peers == 1 or has_one_peer
    has_small_parts = one_peer or (splits == 1 and not straddles)
    part_rows = _PUSH_ROWS if has_small_parts else 2 * _PUSH_ROWS
    rate = at.push_rate_gb_per_s(load)
    waits = rate > (_ONE_PEER_RATE_GB_PER_S if has_one_peer else _PUSH_RATE_GB_PER_S)
    most_parts = MAX_PUSH_PARTS
    if straddles and rate > _LINK_BOUND_GB_PER_S:
        most_parts = max(_LINK_BOUND_PARTS, rows // _LINK_BOUND_ROWS)
    # The largest power of 2 that leaves each part enough rows.
    parts = 1 << (max(1, min(most_parts, rows // part_rows)).bit_length() - 1)
    is_narrow = one_wave and has_small_parts and not one_peer and not waits
    columns = PUSH_COLUMNS[0 if is_narrow else 1]
    head_chunks = 0
    has_head = waits and (one_peer or not straddles)
    if splits > 1 and load.blocks * tiling.ctas > _MOST_SPLIT_CTAS:
        has_head = False
    if has_head and _can_have_head(problem.k, tiling.free_sms(load.blocks)):
        columns, head_chunks = _HEAD
    while problem.k > columns * MAX_COLUMN_CHUNKS:
        columns *= 2
    return SmPush(parts, min(columns, max(ALIGNMENT, problem.k)), first_peers, head_chunks)


def sm_pushes(problem: Problem, kernel: KernelConfig) -> list[SmPush]:
    """The legal SM pushes of a call with this kernel that are worth a measurement."""
    usual = usual_sm_push(problem, kernel)
    can_have_head = _can_have_head(problem.k, cost_model.free_sms(problem, kernel))
    found = [
        SmPush(parts, columns, first_peers, head_chunks)
        for parts in dict.fromkeys((usual.parts, max(1, usual.parts // 2)))
        for columns in (64, 128, 192, 256)
        for first_peers in dict.fromkeys((0, usual.first_peers))
        for head_chunks in ((0, _HEAD[1]) if can_have_head else (0,))
    ]
    return [push for push in found if push.why_illegal(problem, kernel) is None]


CPU_CHUNKS = (1, 2, 4, 8)
"""The numbers of row chunks per shard that are tried on the CPU."""


def chunkings(problem: Problem) -> list[Plan]:
    """The plans of an all-gather -> matmul on the CPU that are worth a measurement."""
    rows = problem.m // problem.world_size
    return [Plan(PUSH, chunks_per_shard=c) for c in CPU_CHUNKS if c <= max(1, rows)]


def usual_plans(problem: Problem, kernel: KernelConfig) -> list[Plan]:
    """The usual plans of a call with this kernel: with copies, and with SM push where that is
    legal; in the order of tiles that serves each best; where there are few tiles, with K split too.
    There are none where the kernel cannot serve the problem."""
    plans: list[Plan] = []
    if not copy_transports(problem, kernel):
        return plans
    for splits in legal_splits(problem, kernel)[:MAX_SPLITS]:
        config = replace(usual_order(problem, kernel), splits=splits)
        plans.append(Plan(copy_transports(problem, config)[0], config))
        push = usual_sm_push(problem, config)
        if push.why_illegal(problem, config) is None:
            plans.append(Plan(push, config))
    return plans


def scatter_plans(problem: Problem, kernels: Iterable[KernelConfig] = ()) -> list[Plan]:
    """The legal plans of a matmul + reduce-scatter, by one of `kernels`, which send tiles, each in
    its usual order and where there are few tiles with K split too, or by others."""
    own = [
        Plan(PUSH, replace(scatter_order(problem, kernel), splits=splits))
        for kernel in kernels
        for splits in legal_scatter_splits(problem, kernel)[:MAX_SPLITS]
    ]
    plans = (*own, Plan(PUSH), BY_TORCH, UNFUSED)
    return [plan for plan in plans if why_illegal(problem, plan, kernels) is None]


def all_reduce_plans(
    problem: Problem, kernels: Iterable[KernelConfig], of_scatter: Iterable[KernelConfig]
) -> list[Plan]:
    """The legal plans of a matmul + all-reduce without the unfused one: lagged ones by one of
    `kernels`, and those that scatter by one of the other kernels, with K split where a scatter has
    it split."""
    if problem.gpu == CPU:
        return [Plan(PUSH)]
    scattered = scatter_plans(replace(problem, op=MATMUL_REDUCE_SCATTER), of_scatter)
    scatters = [Plan(SCATTER, plan.kernel) for plan in scattered if plan.kernel is not None]
    return [*lagged_plans(problem, kernels), *(scatters if SCATTER.serves(problem) else ())]


def scatter_order(problem: Problem, kernel: KernelConfig) -> KernelConfig:
    """The usual order of a matmul + reduce-scatter."""
    return usual_order(problem, kernel) if is_fp8(problem) else usual_scatter_order(kernel)


def usual_scatter_order(kernel: KernelConfig) -> KernelConfig:
    """The usual order of a kernel that sends tiles. Pingpong kernels take columns of tiles of 512
    rows, cooperative ones all tiles of a chunk along M: within 1% of the best of all orders on H200
    (8192 columns, 512 to 8192 rows, K of 2048 and 7168), in the geometric mean. On two H100
    cooperative ones take 0.4 to 2% less in this order."""
    if kernel.schedule == "cooperative":
        return replace(kernel, raster="along_m", max_swizzle=1)
    return replace(kernel, raster="along_n", max_swizzle=8 if kernel.tile_m <= 64 else 4)


def usual_all_reduce_order(problem: Problem, kernel: KernelConfig) -> KernelConfig:
    """The usual order of a matmul + all-reduce: columns of few rows of tiles, since a wave has
    those of all ranks' chunks. On an H100 as rank 0 of 4 two rows of each were the best of 1, 2, 4
    and 8, as rank 0 of 8 too."""
    return replace(kernel, raster="along_n", max_swizzle=4 if problem.world_size < 3 else 2)


def lagged_plans(problem: Problem, kernels: Iterable[KernelConfig]) -> list[Plan]:
    """The legal plans of a matmul + all-reduce by one of `kernels`, which send finished tiles too,
    each in its usual order."""
    return [
        Plan(LAGGED, usual_all_reduce_order(problem, kernel))
        for kernel in kernels
        if why_lagged_illegal(problem, kernel) is None
    ]
