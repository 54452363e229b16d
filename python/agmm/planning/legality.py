"""What a plan must fulfil, said once. Needs no GPU and no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agmm.planning import cost_model
from agmm.planning.cost_model import At, Tiling
from agmm.planning.plans import (
    ALIGNMENT,
    BY_TORCH,
    CPU,
    FUSED_DTYPES,
    GATHERED,
    MATMUL_REDUCE_SCATTER,
    MAX_CHUNKS_PER_SHARD,
    MAX_CLUSTER_SPLITS,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    MAX_SIZE,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    SmPush,
)


def why_unfused(dtype: str, n: int, k: int, *, a: str = "A_shard", b: str = "B") -> str | None:
    """The reason why the CUDA kernels cannot compute this product, or None. ``a`` and ``b`` are
    what the op calls the operands."""
    wanted = f"wanted a positive multiple of {ALIGNMENT} (16-byte TMA alignment)"
    if dtype not in FUSED_DTYPES:
        return f"{a}: found dtype {dtype}, wanted {' or '.join(FUSED_DTYPES)}"
    if k < 1 or k % ALIGNMENT != 0:
        return f"{a}: found K={k}, {wanted}"
    if n < 1 or n % ALIGNMENT != 0:
        return f"{b}: found N={n}, {wanted}"
    if max(n, k) > MAX_SIZE:
        return f"{b}: found shape {(k, n)}, wanted sizes up to {MAX_SIZE}"
    return None


def why_too_many_rows(rows: int, world_size: int) -> str | None:
    """The reason why kernels that gather so many rows of each rank cannot count them, or None."""
    if rows > MAX_SIZE // world_size:
        return (
            f"A_shard: found {rows} rows of each of {world_size} ranks, "
            f"wanted at most {MAX_SIZE // world_size}"
        )
    return None


def why_transport_illegal(problem: Problem, kernel: KernelConfig, transport: str) -> str | None:
    """The reason why a fused call with this kernel cannot use the transport, or None."""
    sm_push = SmPush.parse(transport)
    copying = copy_transports(problem, kernel)
    if sm_push is not None and problem.gpu != CPU and "push" in copying:
        if not 1 < problem.world_size <= MAX_PUSH_RANKS:
            return f"sm push: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
        if not problem.peer_atomics:
            return "sm push: found links without native atomics, wanted NVLink between all GPUs"
        if sm_push.first_peers >= problem.world_size:
            return (
                f"sm push: found {sm_push.first_peers} first peers of {problem.world_size} ranks, "
                f"wanted at most {problem.world_size - 1}"
            )
        if sm_push.has_ctas(problem.k) and free_sms(problem, kernel) < 1:
            return f"sm push: found {kernel.kernel} on all multiprocessors, wanted free ones"
        return sm_push.why_illegal(problem.k)
    if transport in copying:
        return None
    return f"found transport {transport}, wanted {' or '.join(copying)}"


def copy_transports(problem: Problem, kernel: KernelConfig | None = None) -> tuple[str, ...]:
    """The legal transports by copies of a fused call with this kernel, the usual one first.

    Pull copies A into the tensor that is returned. With push the kernel writes that tensor, if it
    can (`KernelConfig.stores_A`).
    """
    if problem.gpu == CPU or not problem.return_A:
        return ("push",)
    if kernel is not None and problem.b_layout not in kernel.stores_A:
        return ("pull",)
    return "push", "pull"


def why_illegal(problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]) -> str | None:
    """The reason why this build, whose kernels are ``kernels``, cannot run the plan, or None."""
    if problem.op == MATMUL_REDUCE_SCATTER:
        return why_scatter_illegal(problem, plan, kernels)
    if plan == UNFUSED:
        return None
    if plan == GATHERED:
        return cost_model.why_not_gathered(problem)
    if not 1 <= plan.chunks_per_shard <= MAX_CHUNKS_PER_SHARD:
        return (
            f"plan: found {plan.chunks_per_shard} chunks per shard, "
            f"wanted 1 to {MAX_CHUNKS_PER_SHARD}"
        )
    if problem.gpu == CPU:
        if plan.transport != "push":
            return f"plan: found transport {plan.transport}, wanted push or unfused on the CPU"
        return None if plan.kernel is None else f"plan: found kernel {plan.kernel.name} on the CPU"
    reason = why_unfused(problem.dtype, problem.n, problem.k)
    if reason is not None:
        return reason
    if plan.chunks_per_shard != 1:
        return f"plan: found {plan.chunks_per_shard} chunks per shard, wanted 1 on a GPU"
    if plan.kernel is None:
        return "plan: found no kernel, wanted one"
    reason = why_transport_illegal(problem, plan.kernel, plan.transport)
    if reason is not None:
        return f"plan: {reason}"
    built = built_as(plan.kernel, kernels)
    if built is None:
        return f"plan: found kernel {plan.kernel.kernel}, which is not in this build"
    legal = legal_splits(problem, built)
    if plan.kernel.splits not in legal:
        return (
            f"plan: found {plan.kernel.splits} splits of K for {plan.kernel.kernel}, "
            f"wanted 1 to {legal[-1]}"
        )
    return None


def why_scatter_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig] = ()
) -> str | None:
    """The reason why a matmul + reduce-scatter cannot be computed by the plan, or None. `kernels`:
    those of the build that send tiles."""
    if plan == UNFUSED:
        return None
    if problem.gpu != CPU and plan.kernel is not None:
        return _why_tile_push_illegal(problem, plan, plan.kernel, kernels)
    own = Plan("push") if problem.gpu == CPU else BY_TORCH
    if plan != own:
        return f"plan: found {plan.name}, wanted {own.name} or unfused for {problem.op}"
    if problem.gpu != CPU:
        if problem.dtype not in FUSED_DTYPES:
            return f"A: dtype={problem.dtype}, torch's fused op is taken for bfloat16 and float16"
        if problem.world_size == 1:
            return "group: found 1 rank, torch's fused op wants several"
    return None


def _why_tile_push_illegal(
    problem: Problem, plan: Plan, kernel: KernelConfig, kernels: Iterable[KernelConfig]
) -> str | None:
    reason = why_unfused(problem.dtype, problem.n, problem.k, a="A")
    if reason is not None:
        return reason
    if not 1 < problem.world_size <= MAX_PUSH_RANKS:
        return f"group: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
    if plan.transport != "push":
        return f"plan: found {plan.name}, wanted push for {problem.op}"
    built = built_as(kernel, kernels)
    if built is None:
        return f"plan: found kernel {kernel.kernel}, which in this build does not send tiles"
    if kernel.across:
        return f"plan: found {kernel.name}, wanted the order of {problem.op}, without /across"
    legal = legal_scatter_splits(problem, built)
    if kernel.splits not in legal:
        return (
            f"plan: found {kernel.splits} splits of K for {kernel.kernel}, wanted 1 to {legal[-1]}"
        )
    tiles = cost_model.scatter_tiles(problem, kernel)
    if tiles > MAX_SCATTER_TILES:
        return f"plan: found {tiles} tiles in a chunk, wanted at most {MAX_SCATTER_TILES}"
    return None


def why_lagged_illegal(problem: Problem, kernel: KernelConfig) -> str | None:
    """The reason why a matmul + all-reduce cannot be computed by one of the build's kernels that
    send finished tiles, or None. m is a multiple of the ranks."""
    reason = why_unfused(problem.dtype, problem.n, problem.k, a="A")
    if reason is not None:
        return reason
    if not 1 < problem.world_size <= MAX_PUSH_RANKS:
        return f"group: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
    tiles, most = cost_model.scatter_tiles(problem, kernel), MAX_SCATTER_TILES // 2
    if tiles > most:  # each has a signal for its sums and one when it is finished
        return f"plan: found {tiles} tiles in a chunk, wanted at most {most}"
    return None


def built_as(config: KernelConfig, kernels: Iterable[KernelConfig]) -> KernelConfig | None:
    """This kernel as the build has it."""
    return next((kernel for kernel in kernels if kernel.kernel == config.kernel), None)


def legal_splits(problem: Problem, kernel: KernelConfig) -> range:
    """Into how many parts K may be split: all parts of all tiles are computed in one wave."""
    if not kernel.can_split:
        return range(1, 2)
    blocks, workers = cost_model.clusters(problem, replace(kernel, splits=1))
    return splits_that_fit(problem, kernel, blocks, workers)


def legal_scatter_splits(problem: Problem, kernel: KernelConfig) -> range:
    """The same of a matmul + reduce-scatter."""
    if not kernel.can_split:
        return range(1, 2)
    _, blocks, at_once = cost_model.scatter_blocks(problem, kernel)
    return splits_that_fit(problem, kernel, max(1, blocks), at_once)


def splits_that_fit(problem: Problem, kernel: KernelConfig, blocks: int, workers: int) -> range:
    """`legal_splits` of a kernel that can split, whose clusters of tiles are known."""
    most = min(workers // blocks, -(-problem.k // kernel.tile_k))
    if kernel.splits_in_cluster:
        most = min(most, MAX_CLUSTER_SPLITS)
    return range(1, max(1, most) + 1)


def free_sms(problem: Problem, kernel: KernelConfig) -> int:
    """Multiprocessors without a tile, in whole clusters; 0 with more than one wave of tiles."""
    tiling = Tiling(problem, kernel)
    return free_of(tiling, At(problem).blocks(tiling))


def free_of(tiling: Tiling, blocks: int) -> int:
    return max(0, tiling.workers - blocks) * tiling.ctas
