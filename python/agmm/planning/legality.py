"""What a plan must fulfil, said once. Needs no GPU and no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agmm import _core
from agmm.planning import cost_model, formats
from agmm.planning.plans import BY_TORCH, GATHERED, UNFUSED, Plan
from agmm.planning.problems import (
    ALIGNMENT,
    ALL_GATHER_MATMUL,
    CPU,
    FUSED_DTYPES,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MAX_CHUNKS_PER_SHARD,
    MAX_CLUSTER_SPLITS,
    MAX_SCATTER_TILES,
    MAX_SIZE,
    PLAIN,
    KernelConfig,
    Problem,
)
from agmm.planning.transports import GATHER, LAGGED, PUSH, SCATTER, STREAMED

MOST_PRODUCTS: dict[str, int] = {formats.BITS_16: 3, formats.FP8: 1}
"""How many products a kernel adds up at most, by kind of format (`ScatterSpec::kMaxProducts`). The
epilogue of an fp8 kernel scales the sum, so that all of it has the scales of one product."""


PORTABLE_ROWS = 1024
"""The rows of A from which calls take the portable path by themselves. It is a choice: the host
enqueues three copies and a product for each other rank, for which fewer rows leave no time."""


def why_too_many_products(kind: str, count: int) -> str | None:
    """The reason why no kernel makes one sum of so many products, or None."""
    most = MOST_PRODUCTS[kind]
    if count <= most:
        return None
    return f"A: found {count} products, wanted at most {most} of {kind} in one kernel"


def why_unfused(name: str, n: int, k: int, *, a: str = "A_shard", b: str = "B") -> str | None:
    """The reason why the CUDA kernels cannot compute this product, or None. ``name`` is that of a
    format, ``a`` and ``b`` are what the op calls the operands."""
    of = formats.of(name)
    if not of.has_kernels:
        return f"{a}: found dtype {name}, wanted {' or '.join(FUSED_DTYPES)}"
    if k < 1 or k % of.k_multiple != 0:
        return f"{a}: found K={k}, {_multiple(of.k_multiple)}"
    if n < 1 or n % ALIGNMENT != 0:
        return f"{b}: found N={n}, {_multiple(ALIGNMENT)}"
    if max(n, k) > MAX_SIZE:
        return f"{b}: found shape {(k, n)}, wanted sizes up to {MAX_SIZE}"
    return None


BLOCK_SCALES_SINCE = (12, 9)
"""The first version of CUDA whose ``torch._scaled_mm`` has block scales."""


def why_not_scaled_mm(n: int, *, is_by_block: bool, cuda: str | None) -> str | None:
    """The reason why ``torch._scaled_mm`` of this version of CUDA has no product of N columns,
    with block scales or others, whatever else it is of; or None."""
    if n % 16 != 0:
        return f"B: found {n} columns, wanted a multiple of 16"
    if is_by_block and (cuda is None or tuple(map(int, cuda.split(".")[:2])) < BLOCK_SCALES_SINCE):
        wanted = ".".join(map(str, BLOCK_SCALES_SINCE))
        return f"block scales: found CUDA {cuda}, wanted at least {wanted}"
    return None


def _multiple(of: int) -> str:
    return f"wanted a positive multiple of {of} (16-byte TMA alignment)"


def why_too_many_rows(rows: int, world_size: int) -> str | None:
    """The reason why kernels that gather so many rows of each rank cannot count them, or None."""
    if rows > MAX_SIZE // world_size:
        return (
            f"A_shard: found {rows} rows of each of {world_size} ranks, "
            f"wanted at most {MAX_SIZE // world_size}"
        )
    return None


def why_illegal(problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]) -> str | None:
    """The reason why this build cannot run the plan, or None. ``kernels`` are those of the build
    for the problem's op and format; for the scatter of a matmul + all-reduce those of a matmul +
    reduce-scatter, and for a streamed plan those of an all-gather -> matmul."""
    if plan == UNFUSED:
        return None
    if problem.gpu == CPU:
        return _why_illegal_on_cpu(problem, plan)
    return _WHY_ILLEGAL[problem.op](problem, plan, kernels)


def _why_illegal_on_cpu(problem: Problem, plan: Plan) -> str | None:
    if not 1 <= plan.chunks_per_shard <= MAX_CHUNKS_PER_SHARD:
        return _wrong_chunks(plan)
    if problem.op != ALL_GATHER_MATMUL and plan != Plan(PUSH):
        return f"plan: found {plan.name}, wanted push or unfused for {problem.op}"
    if plan == GATHERED:
        return plan.transport.why_illegal(problem, None)
    if plan.transport != PUSH:
        return f"plan: found transport {plan.transport.name}, wanted push or unfused on the CPU"
    return None if plan.kernel is None else f"plan: found kernel {plan.kernel.name} on the CPU"


def _wrong_chunks(plan: Plan) -> str:
    return (
        f"plan: found {plan.chunks_per_shard} chunks per shard, wanted 1 to {MAX_CHUNKS_PER_SHARD}"
    )


def _why_gather_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan == GATHERED:
        return plan.transport.why_illegal(problem, None)
    if not 1 <= plan.chunks_per_shard <= MAX_CHUNKS_PER_SHARD:
        return _wrong_chunks(plan)
    reason = why_unfused(problem.format, problem.n, problem.k)
    if reason is not None:
        return reason
    if plan.chunks_per_shard != 1:
        return f"plan: found {plan.chunks_per_shard} chunks per shard, wanted 1 on a GPU"
    if plan.kernel is None:
        return "plan: found no kernel, wanted one"
    if plan.transport == GATHER and problem.epilogue != PLAIN:
        return f"plan: found {plan.name} with an activation, wanted a fused one or gather"
    return _why_not_built(problem, plan, plan.kernel, kernels)


def _why_not_built(
    problem: Problem, plan: Plan, kernel: KernelConfig, kernels: Iterable[KernelConfig]
) -> str | None:
    """The reason why the build has not the plan's kernel with its transport, or None."""
    reason = plan.transport.why_illegal(problem, kernel)
    if reason is not None:
        return reason if reason.startswith("plan: ") else f"plan: {reason}"
    built = built_as(kernel, kernels)
    if built is None:
        return f"plan: found kernel {kernel.kernel}, which is not in this build"
    multiplied = cost_model.behind_gather(problem) if plan.transport == GATHER else problem
    return _why_splits_illegal(kernel, legal_splits(multiplied, built))


def _why_streamed_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    reason = why_unfused(problem.format, problem.n, problem.k, a="A")
    if reason is None and plan.kernel is None:
        reason = "plan: found no kernel, wanted a streaming one"
    if reason is not None or plan.kernel is None:
        return reason
    return _why_not_built(problem, plan, plan.kernel, kernels)


def _why_splits_illegal(kernel: KernelConfig, legal: range) -> str | None:
    if kernel.splits in legal:
        return None
    wanted = f"{legal[0]} to {legal[-1]}" if legal else "another kernel"
    return f"plan: found {kernel.splits} splits of K for {kernel.kernel}, wanted {wanted}"


def _why_scatter_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan.transport == STREAMED:
        return _why_streamed_illegal(problem, plan, kernels)
    if plan.kernel is not None:
        return _why_tile_push_illegal(problem, plan, plan.kernel, kernels)
    if plan != BY_TORCH:
        return f"plan: found {plan.name}, wanted {BY_TORCH.name} or unfused for {problem.op}"
    return plan.transport.why_illegal(problem, None)


def _why_all_reduce_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan.kernel is None or not plan.transport.serves(problem):
        why = plan.transport.of_fp8(problem)
        return f"plan: found {plan.name}, wanted another or unfused for {problem.op}{why}"
    if plan.transport == SCATTER:
        of_scatter = replace(problem, op=MATMUL_REDUCE_SCATTER)
        return _why_tile_push_illegal(
            of_scatter, replace(plan, transport=PUSH), plan.kernel, kernels
        )
    if built_as(plan.kernel, kernels) is None:
        return (
            f"plan: found kernel {plan.kernel.kernel}, which in this build does not send "
            "finished tiles"
        )
    return why_lagged_illegal(problem, plan.kernel)


_WHY_ILLEGAL = {
    ALL_GATHER_MATMUL: _why_gather_illegal,
    MATMUL_REDUCE_SCATTER: _why_scatter_illegal,
    MATMUL_ALL_REDUCE: _why_all_reduce_illegal,
}


def _why_tile_push_illegal(
    problem: Problem, plan: Plan, kernel: KernelConfig, kernels: Iterable[KernelConfig]
) -> str | None:
    reason = why_unfused(problem.format, problem.n, problem.k, a="A")
    reason = reason or PUSH.why_illegal(problem, kernel)
    if reason is not None:
        return reason
    if plan.transport != PUSH:
        return f"plan: found {plan.name}, wanted push for {problem.op}"
    built = built_as(kernel, kernels)
    if built is None:
        return f"plan: found kernel {kernel.kernel}, which in this build does not send tiles"
    if kernel.across:
        return f"plan: found {kernel.name}, wanted the order of {problem.op}, without /across"
    reason = _why_splits_illegal(kernel, legal_scatter_splits(problem, built))
    if reason is not None:
        return reason
    tiles = cost_model.scatter_tiles(problem, kernel)
    if tiles > MAX_SCATTER_TILES:
        return f"plan: found {tiles} tiles in a chunk, wanted at most {MAX_SCATTER_TILES}"
    return None


def why_lagged_illegal(problem: Problem, kernel: KernelConfig) -> str | None:
    """The reason why a matmul + all-reduce cannot be computed by one of the build's kernels that
    send finished tiles, or None. m is a multiple of the ranks."""
    reason = why_unfused(problem.format, problem.n, problem.k, a="A")
    return reason or LAGGED.why_illegal(problem, kernel)


def built_as(config: KernelConfig, kernels: Iterable[KernelConfig]) -> KernelConfig | None:
    """The kernel as the build has it; None where the build does not."""
    return next((kernel for kernel in kernels if kernel.kernel == config.kernel), None)


def can_split(problem: Problem, kernel: KernelConfig) -> bool:
    """Whether several CTAs can compute a tile of the problem together; with fp8 operands only the
    CTAs of a cluster can."""
    is_fp8 = formats.of(problem.format).kind == formats.FP8
    return kernel.can_split and (kernel.splits_in_cluster or not is_fp8)


def legal_splits(problem: Problem, kernel: KernelConfig) -> range:
    """How many splits K may have: all splits of all tiles are computed in one wave. A streaming
    kernel has one number for each size of B, with the columns of all weights of its launch, so that
    a row's bits are the same in every call, and is not legal where these are no cluster."""
    if kernel.is_streaming:
        bits = 8 * formats.of(problem.format).element_bytes
        splits = _core.streaming_splits(problem.n, problem.k, bits)
        ctas = splits * kernel.cluster_n
        fits = (
            ctas <= _core.MAX_STREAMING_CLUSTER
            and cost_model.clusters_at_once(cost_model.sms_of(problem), ctas) > 0
        )
        return range(splits, splits + 1 if fits else splits)
    if not can_split(problem, kernel):
        return range(1, 2)
    blocks, workers = cost_model.clusters(problem, replace(kernel, splits=1))
    return splits_that_fit(problem, kernel, blocks, workers)


def legal_scatter_splits(problem: Problem, kernel: KernelConfig) -> range:
    """How many splits K may have in a matmul + reduce-scatter: see `legal_splits`."""
    if not can_split(problem, kernel):
        return range(1, 2)
    _, blocks, at_once = cost_model.scatter_blocks(problem, kernel)
    return splits_that_fit(problem, kernel, max(1, blocks), at_once)


def splits_that_fit(problem: Problem, kernel: KernelConfig, blocks: int, workers: int) -> range:
    """`legal_splits` of a kernel that can split, whose clusters of tiles are known."""
    most = min(workers // blocks, -(-problem.k // kernel.tile_k))
    if kernel.splits_in_cluster:
        most = min(most, MAX_CLUSTER_SPLITS)
    return range(1, max(1, most) + 1)
