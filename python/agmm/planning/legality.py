"""What a plan must fulfil, said once. Needs no GPU and no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agmm.planning import cost_model, formats
from agmm.planning.plans import (
    ALIGNMENT,
    ALL_GATHER_MATMUL,
    BY_TORCH,
    CPU,
    FUSED_DTYPES,
    GATHERED,
    LAGGED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MAX_CHUNKS_PER_SHARD,
    MAX_CLUSTER_SPLITS,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    MAX_SIZE,
    SCATTER,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    SmPush,
)

SM_PUSH = "sm push"
"""What `TRANSPORTS` calls every transport of the name of an `SmPush`."""

TRANSPORTS: dict[tuple[str, str], frozenset[str]] = {
    (ALL_GATHER_MATMUL, formats.BITS_16): frozenset(("push", "pull", SM_PUSH, GATHERED.transport)),
    (ALL_GATHER_MATMUL, formats.FP8): frozenset(("push",)),
    (MATMUL_REDUCE_SCATTER, formats.BITS_16): frozenset(("push", BY_TORCH.transport)),
    (MATMUL_REDUCE_SCATTER, formats.FP8): frozenset(("push",)),
    (MATMUL_ALL_REDUCE, formats.BITS_16): frozenset((LAGGED, SCATTER)),
    (MATMUL_ALL_REDUCE, formats.FP8): frozenset((SCATTER,)),
}
"""What a GPU has, by op and kind of format, beside the unfused plan: the one place that says so."""


WHY_NOT_FP8: dict[str, str] = {
    "pull": "it copies rows of A without their scales",
    SM_PUSH: "it sends rows of A without their scales",
    GATHERED.transport: "nothing is known of its time, config asks for it",
    BY_TORCH.transport: "it is taken for bfloat16 and float16",
    LAGGED: "no kernel sends finished tiles of fp8",
}
"""Why fp8 operands have no plan with a transport that operands of 16 bits have. Scales are carried
where the core's `GatherTransport::carries_scales` says so."""


def _of_fp8(problem: Problem, transport: str) -> str:
    """The reason of `WHY_NOT_FP8` behind a colon; empty where there is none."""
    if formats.of(problem.format).kind != formats.FP8:
        return ""
    reason = WHY_NOT_FP8.get(SM_PUSH if SmPush.parse(transport) else transport)
    return "" if reason is None else f": {reason}"


MOST_PRODUCTS: dict[str, int] = {formats.BITS_16: 3, formats.FP8: 1}
"""Of how many products a kernel makes one sum, by kind of format (`ScatterSpec::kMaxProducts`). The
epilogue of an fp8 kernel scales the sum, so that all of it has the scales of one product."""


def why_too_many_products(kind: str, count: int) -> str | None:
    """The reason why no kernel makes one sum of so many products, or None."""
    most = MOST_PRODUCTS[kind]
    if count <= most:
        return None
    return f"A: found {count} products, wanted at most {most} of {kind} in one kernel"


def transports_of(problem: Problem) -> frozenset[str]:
    """The transports that there are for the problem's op and format on a GPU."""
    return TRANSPORTS.get((problem.op, formats.of(problem.format).kind), frozenset())


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


def why_transport_illegal(problem: Problem, kernel: KernelConfig, transport: str) -> str | None:
    """The reason why a fused call with this kernel cannot use the transport, or None."""
    sm_push = SmPush.parse(transport)
    copying = copy_transports(problem, kernel)
    has_sm_push = problem.gpu != CPU and SM_PUSH in transports_of(problem)
    if sm_push is not None and has_sm_push and "push" in copying:
        if not 1 < problem.world_size <= MAX_PUSH_RANKS:
            return f"sm push: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
        if not problem.peer_atomics:
            return "sm push: found links without native atomics, wanted NVLink between all GPUs"
        if sm_push.first_peers >= problem.world_size:
            return (
                f"sm push: found {sm_push.first_peers} first peers of {problem.world_size} ranks, "
                f"wanted at most {problem.world_size - 1}"
            )
        if sm_push.has_ctas(problem.k) and cost_model.free_sms(problem, kernel) < 1:
            return f"sm push: found {kernel.kernel} on all multiprocessors, wanted free ones"
        return sm_push.why_illegal(problem.k)
    if transport in copying:
        return None
    wanted = " or ".join(copying) or "another kernel"
    return f"found transport {transport}, wanted {wanted}{_of_fp8(problem, transport)}"


def copy_transports(problem: Problem, kernel: KernelConfig | None = None) -> tuple[str, ...]:
    """The legal transports by copies of a fused call with this kernel, the usual one first; none
    where the kernel cannot serve the call.

    Pull copies A into the tensor that is returned. With push the kernel writes that tensor, if it
    can (`KernelConfig.stores_A`).
    """
    if problem.gpu == CPU:
        return ("push",)
    found: tuple[str, ...] = ("push",)
    has_pull = "pull" in transports_of(problem)
    if problem.return_A and (has_pull or problem.world_size > 1):  # one rank has all of A
        found = "push", "pull"
        if kernel is not None and problem.b_layout not in kernel.stores_A:
            found = ("pull",)
    return tuple(transport for transport in found if transport == "push" or has_pull)


def why_illegal(problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]) -> str | None:
    """The reason why this build cannot run the plan, or None. ``kernels`` are those of the build
    for the problem's op and format; for the scatter of a matmul + all-reduce those of a matmul +
    reduce-scatter."""
    if plan == UNFUSED:
        return None
    if problem.gpu == CPU:
        return _why_illegal_on_cpu(problem, plan)
    return _WHY_ILLEGAL[problem.op](problem, plan, kernels)


def _why_illegal_on_cpu(problem: Problem, plan: Plan) -> str | None:
    if not 1 <= plan.chunks_per_shard <= MAX_CHUNKS_PER_SHARD:
        return _wrong_chunks(plan)
    if problem.op != ALL_GATHER_MATMUL and plan != Plan("push"):
        return f"plan: found {plan.name}, wanted push or unfused for {problem.op}"
    if plan == GATHERED:
        return cost_model.why_not_gathered(problem)
    if plan.transport != "push":
        return f"plan: found transport {plan.transport}, wanted push or unfused on the CPU"
    return None if plan.kernel is None else f"plan: found kernel {plan.kernel.name} on the CPU"


def _wrong_chunks(plan: Plan) -> str:
    return (
        f"plan: found {plan.chunks_per_shard} chunks per shard, wanted 1 to {MAX_CHUNKS_PER_SHARD}"
    )


def _why_gather_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan == GATHERED:
        return why_not_gathered(problem)
    if not 1 <= plan.chunks_per_shard <= MAX_CHUNKS_PER_SHARD:
        return _wrong_chunks(plan)
    reason = why_unfused(problem.format, problem.n, problem.k)
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
    return _why_splits_illegal(plan.kernel, legal_splits(problem, built))


def _why_splits_illegal(kernel: KernelConfig, legal: range) -> str | None:
    if kernel.splits in legal:
        return None
    return f"plan: found {kernel.splits} splits of K for {kernel.kernel}, wanted 1 to {legal[-1]}"


def why_not_gathered(problem: Problem) -> str | None:
    """The reason why a call cannot be by agmm's gather and the library's matmul, or None."""
    if problem.gpu != CPU and GATHERED.transport not in transports_of(problem):
        why = _of_fp8(problem, GATHERED.transport)
        return f"plan: found gather of {problem.format}, wanted another transport{why}"
    return cost_model.why_not_gathered(problem)


def _why_scatter_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan.kernel is not None:
        return _why_tile_push_illegal(problem, plan, plan.kernel, kernels)
    if plan != BY_TORCH:
        return f"plan: found {plan.name}, wanted {BY_TORCH.name} or unfused for {problem.op}"
    if BY_TORCH.transport not in transports_of(problem):
        return f"A: dtype={problem.format}, torch's fused op is taken for bfloat16 and float16"
    if problem.world_size == 1:
        return "group: found 1 rank, torch's fused op wants several"
    return None


def _why_all_reduce_illegal(
    problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]
) -> str | None:
    if plan.kernel is None or plan.transport not in transports_of(problem):
        why = _of_fp8(problem, plan.transport)
        return f"plan: found {plan.name}, wanted another or unfused for {problem.op}{why}"
    if plan.transport == SCATTER:
        of_scatter = replace(problem, op=MATMUL_REDUCE_SCATTER)
        return _why_tile_push_illegal(
            of_scatter, replace(plan, transport="push"), plan.kernel, kernels
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


def can_split(problem: Problem, kernel: KernelConfig) -> bool:
    """Whether several CTAs can compute a tile of the problem together: of fp8 operands those of a
    cluster."""
    is_fp8 = formats.of(problem.format).kind == formats.FP8
    return kernel.can_split and (kernel.splits_in_cluster or not is_fp8)


def legal_splits(problem: Problem, kernel: KernelConfig) -> range:
    """Into how many parts K may be split: all parts of all tiles are computed in one wave."""
    if not can_split(problem, kernel):
        return range(1, 2)
    blocks, workers = cost_model.clusters(problem, replace(kernel, splits=1))
    return splits_that_fit(problem, kernel, blocks, workers)


def legal_scatter_splits(problem: Problem, kernel: KernelConfig) -> range:
    """The same of a matmul + reduce-scatter."""
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
