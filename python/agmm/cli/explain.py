"""`agmm explain`: the plan of a problem, where it comes from, and what the others would cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agmm import _core
from agmm.cli import gpu_names
from agmm.cli.explain_paths import by_other_path, why_on_hosts
from agmm.cli.explain_reasons import why, why_not_by_torch
from agmm.cli.explain_times import times
from agmm.cli.explanations import Alternative, Explanation
from agmm.errors import InvalidArgument
from agmm.planning import built_kernels, cost_model, formats, tables
from agmm.planning.cost_model import collectives as collective_costs
from agmm.planning.cost_model.collectives import Kind
from agmm.planning.legality import why_unfused
from agmm.planning.op_plans import KernelsOf, gather_kernels
from agmm.planning.planner import Planner
from agmm.planning.plans import UNFUSED, Plan
from agmm.planning.predictions import predict_us, uncertainty
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    PLAIN,
    Problem,
)
from agmm.planning.transports import BACKEND, LAGGED, PUSH, SCATTER, Transport
from agmm.runtime.scaling import BY_NAME, K_MULTIPLE

NORM = "all_reduce_rms_norm"
NORMED_METHODS = ("one_shot", "two_shot")
"""The methods of an all-reduce whose kernel adds a residual and a norm (`has_norm`)."""


def has_atomics_here(gpu: str) -> bool:
    """Whether the links carry out atomic additions. It is looked up where the problem's GPU is the
    one here, and assumed elsewhere."""
    if gpu != gpu_names.gpu_here() or not _core.cuda_built:
        return True
    from agmm.runtime import links

    return not links.pairs_without_atomics()


def _has_kernels() -> bool:
    return bool(built_kernels.kernels_of(ALL_GATHER_MATMUL, "bfloat16"))


def kernels_for(gpu: str) -> KernelsOf:
    """The kernels of this build; where it has none, those that the GPU's constants name."""
    if _has_kernels() or gpu == CPU:
        return built_kernels.kernels_of
    return cost_model.default_kernels


def planner_for(gpu: str, world_size: int) -> Planner:
    """A planner with the tables of any GPU."""
    found = tables.user(gpu, world_size), tables.packaged(gpu, world_size)
    return Planner(kernels_for(gpu), [table for table in found if table is not None])


def explain_any(
    problem: Problem, scaling: str | None, columns: Sequence[int] | None = None
) -> Explanation:
    """Explains a problem as `explain` does, with the planner of the tables that are there. The
    format of a problem with fp8 operands is still the name of their dtype, and ``scaling`` the kind
    of their scales. ``columns`` are those of each weight, where there are several.

    Raises InvalidArgument for scales of other operands, and for fp8 operands that no op takes.
    """
    planner = planner_for(problem.gpu, problem.world_size)
    if not problem.format.startswith("float8"):
        if scaling is not None:
            raise InvalidArgument(
                f"scaling: found {scaling!r} with {problem.format}, wanted none, or float8_e4m3fn"
            )
        return explain(problem, planner)
    scaling = scaling or "rowwise"
    if scaling not in BY_NAME:
        raise InvalidArgument(f"scaling: found {scaling!r}, wanted one of {', '.join(BY_NAME)}")
    if problem.k % K_MULTIPLE:
        raise InvalidArgument(f"k: found {problem.k}, wanted a multiple of {K_MULTIPLE} with fp8")
    operands = f"{problem.format} with {scaling} scales"
    if problem.gpu != CPU:
        accumulation = {"block": "block", "block 1x128": "block_1x128"}.get(scaling, "fast")
        dtypes = f"{problem.format}_{problem.format}"
        name = built_kernels.format_served(
            problem.op, dtypes, accumulation, among=planner.kernels_of, epilogue=problem.epilogue
        )
        problem = replace(problem, format=name)
        if problem.epilogue != PLAIN and not gather_kernels(problem, planner.kernels_of):
            problem = replace(problem, epilogue=PLAIN)  # torch's ops follow the kernel
    return explain(problem, planner, operands, columns)


def explain(
    problem: Problem,
    planner: Planner,
    operands: str | None = None,
    columns: Sequence[int] | None = None,
) -> Explanation:
    """The explanation of the planner's choice.

    Args:
        problem: of any op and format.
        planner: has the tables and kernels.
        operands: the name to print for the operands; the name of the format where None.
        columns: N of each weight; one of all columns where None.

    Raises InvalidArgument where the ranks cannot have equally many rows, or nothing is gathered
    that could be returned.
    """
    if problem.return_A and problem.op != ALL_GATHER_MATMUL:
        raise InvalidArgument(f"return_A: found True with {problem.op}, wanted False")
    call, ranks, asked = _call(problem), problem.world_size, _asked(problem, operands)
    if problem.op == MATMUL_ALL_REDUCE:
        # Ranks that cannot share the rows equally compute a few more.
        problem = replace(problem, m=-(-problem.m // ranks) * ranks)
    if problem.m % ranks:
        raise InvalidArgument(f"m: found {problem.m}, wanted a multiple of tp, {ranks}")
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {problem.gpu}"
    words = f"{call}, {operands or problem.format}, B by {problem.b_layout}, {where}"
    other = by_other_path(problem, asked, words)
    if other is not None:
        return other
    problem = replace(problem, peer_atomics=has_atomics_here(problem.gpu))
    not_by_torch = why_not_by_torch(problem, columns or [problem.n])
    choice = planner.choose(problem)
    is_for_library = not_by_torch is None or not _is_fused_gather(problem, planner)
    if choice.plan == UNFUSED and not is_for_library:
        choice = planner.choose(problem, fused=True)
    alternatives: tuple[Alternative, ...] = ()
    if problem.gpu != CPU:  # of which there is no model
        alternatives = tuple(
            Alternative(_named(problem, plan, not_by_torch), us, _mark(plan, choice.plan))
            for plan, us in planner.alternatives(problem)
            if is_for_library or plan != UNFUSED
        )
    row = choice.row
    has_alone = choice.predicted_us is not None and problem.gpu != CPU
    plan = _named(problem, choice.plan, not_by_torch)
    reason = why(problem, choice, planner, operands or problem.format, not_by_torch)
    notes = [*_remarks(problem)]
    on_one_host = None
    on_hosts = why_on_hosts(problem)
    if on_hosts is not None and choice.plan != UNFUSED:
        notes.insert(0, f"on one host the plan would be {plan}, which the times are of")
        on_one_host = plan
        plan, reason = f"unfused, {_UNFUSED[problem.op]}", on_hosts
    return Explanation(
        asked,
        words
        + (", A returned" if problem.return_A else "")
        + ("" if problem.epilogue == PLAIN else f", {problem.epilogue} in the kernel"),
        plan,
        reason,
        on_one_host=on_one_host,
        source=choice.source,
        predicted_us=choice.predicted_us,
        uncertainty=uncertainty(problem, choice.plan),
        unfused_us=None if problem.gpu == CPU else predict_us(problem, UNFUSED),
        alone_us=cost_model.matmul_us(problem) if has_alone else None,
        measured_us=None if row is None else row.us,
        measured_alone_us=None if row is None else row.roof_us,
        times=tuple(times(problem, choice)),
        notes=tuple(notes),
        is_unfused=choice.plan == UNFUSED,
        alternatives=alternatives,
    )


def _asked(problem: Problem, operands: str | None) -> dict[str, Any]:
    return {
        "op": problem.op,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "operands": operands or problem.format,
        "b_layout": problem.b_layout,
        "return_A": problem.return_A,
        "epilogue": problem.epilogue,
        "ranks": problem.world_size,
        "gpu": problem.gpu,
    }


def _is_fused_gather(problem: Problem, planner: Planner) -> bool:
    """Whether it is an all-gather + matmul that this build has a kernel for."""
    illegal = why_unfused(problem.format, problem.n, problem.k)
    kernels = gather_kernels(problem, planner.kernels_of)
    return problem.op == ALL_GATHER_MATMUL and illegal is None and bool(kernels)


def with_activation(problem: Problem, activation: str) -> Problem:
    """The problem of a kernel that computes an activation, where there may be one, of the n of a
    weight. Raises InvalidArgument for no activation's name, and other ops than all-gather + matmul.
    """
    from agmm.runtime.epilogues import named  # it needs torch

    epilogue = named(activation)
    if epilogue is None or problem.op != ALL_GATHER_MATMUL:
        raise InvalidArgument(
            f"activation: found {activation!r} with {problem.op}, wanted {ALL_GATHER_MATMUL}"
        )
    wide = replace(problem, n=problem.n * (2 if epilogue.is_gated else 1))
    return replace(wide, epilogue=epilogue.kernel) if problem.gpu != CPU else wide


def explain_norm(rows: int, columns: int, itemsize: int, world_size: int, gpu: str) -> Explanation:
    """The explanation of `agmm.collectives.all_reduce_rms_norm` of such a tensor: the all-reduce is
    chosen as one without a norm, and its kernel may add the residual and the norm."""
    found = explain_collective("all_reduce", rows, columns, itemsize, world_size, gpu)
    asked = {**found.asked, "op": NORM}
    call = found.call.replace("all_reduce", NORM, 1)
    if found.plan not in NORMED_METHODS or columns * itemsize > _core.MAX_NORM_ROW_BYTES:
        plan = f"{found.plan}, then an addition and torch's rms_norm"
    else:
        plan = f"{found.plan}, with residual and norm in the same kernel"
    norm = (
        f"{' and '.join(NORMED_METHODS)} have residual and norm in their kernel, for rows of at "
        f"most {_size(_core.MAX_NORM_ROW_BYTES)}; times are those of the all-reduce"
    )
    why_so = f"{found.why}; {norm}" if found.why else ""
    return replace(found, asked=asked, call=call, plan=plan, why=why_so)


def explain_collective(
    kind: Kind, rows: int, columns: int, itemsize: int, world_size: int, gpu: str
) -> Explanation:
    """The explanation of a call of `agmm.collectives`, whose whole tensor has these rows and
    columns."""
    nbytes = rows * columns * itemsize
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    asked = {"op": kind, "m": rows, "k": columns, "bytes": nbytes, "ranks": world_size, "gpu": gpu}
    call = f"{kind} of [{rows}, {columns}], {nbytes} bytes in all, {ranks} on {gpu}"
    if gpu == CPU or world_size == 1:
        by = "a copy" if world_size == 1 else "agmm, through shared memory"
        return Explanation(asked, call, by, "")
    library, methods = "NCCL", collective_costs.methods(kind)
    chosen: str = library
    predicted: dict[str, float] = {}
    if collective_costs.is_by_kernel(nbytes, world_size):
        chosen = collective_costs.collective_method(kind, nbytes, world_size)
    if world_size <= collective_costs.MOST_RANKS:
        limits = [
            f"{method} to {_size(limit)}"
            for method, limit in collective_costs.thresholds(kind, world_size)
        ]
        reason = f"{', '.join(limits)}, {library} beyond, as predicted"
        for method in methods:
            us = collective_costs.collective_us(kind, method, nbytes, world_size)
            predicted[method] = us
    else:
        most = collective_costs.MOST_RANKS
        reason = f"{world_size} ranks, agmm's kernels serve at most {most}"
    predicted[library] = collective_costs.by_library_us(kind, nbytes, world_size, gpu)
    alternatives = (
        Alternative(name, us, _CHOSEN if name == chosen else "")
        for name, us in sorted(predicted.items(), key=lambda pair: pair[1])
    )
    return Explanation(
        *(asked, call, chosen, reason),
        predicted_us=predicted.get(chosen),
        alternatives=tuple(alternatives),
    )


def _size(nbytes: int) -> str:
    """A limit in words, rounded down: what is as large is within it."""
    return f"{(10 * nbytes >> 20) / 10:g} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _call(problem: Problem) -> str:
    m, n, k = problem.m, problem.n, problem.k
    if problem.op == MATMUL_REDUCE_SCATTER:
        return f"out[{m // problem.world_size}, {n}] = reduce_scatter(A[{m}, {k}] @ B)"
    if problem.op == MATMUL_ALL_REDUCE:
        return f"out[{m}, {n}] = all_reduce(A[{m}, {k}] @ B)"
    return f"out[{m}, {n}] = all_gather(A_shard)[{m}, {k}] @ B"


_OF_ALL_REDUCE: dict[Transport, str] = {
    LAGGED: "one kernel, whose finished rows go to all ranks while it computes others",
    SCATTER: "matmul + reduce-scatter in one kernel, then an all-gather",
    BACKEND: "matmul, then all-reduce",
    PUSH: "agmm's own, through shared memory",
}
_OF_FP8 = {
    ALL_GATHER_MATMUL: "NCCL's all-gather and {}",
    MATMUL_REDUCE_SCATTER: "{} and NCCL's reduce-scatter",
    MATMUL_ALL_REDUCE: "{} and an all-reduce",
}
"""What the unfused path of each op calls for fp8 operands, with a place for what multiplies."""


def _named(problem: Problem, plan: Plan, not_by_torch: str | None) -> str:
    if problem.op == MATMUL_ALL_REDUCE:
        of_kernel = "" if plan.kernel is None else f": {plan.kernel.name}"
        return _OF_ALL_REDUCE[plan.transport] + of_kernel
    if plan == UNFUSED and formats.of(problem.format).kind == formats.FP8:
        product = "torch._scaled_mm" if not_by_torch is None else "a product in float32"
        return f"{plan.name}, {_OF_FP8[problem.op].format(product)}"
    return plan.name


_UNFUSED = {
    ALL_GATHER_MATMUL: "all-gather + matmul",
    MATMUL_REDUCE_SCATTER: "matmul + reduce-scatter",
    MATMUL_ALL_REDUCE: "matmul + all-reduce",
}


def _remarks(problem: Problem) -> Iterable[str]:
    if problem.gpu == CPU:
        return
    is_scatter = problem.op != ALL_GATHER_MATMUL
    if not (problem.peer_atomics or is_scatter):
        yield "links between the GPUs here have no native atomics, so SM push is not legal"
    used = cost_model.constants(problem.gpu).gpu
    if used != problem.gpu:
        yield f"no constants of {problem.gpu} are known, those of {used} stand in"
    if not _has_kernels():
        yield f"this build has no CUDA kernels; assumed are the default ones of {used}"


_CHOSEN = " (the plan)"


def _mark(plan: Plan, chosen: Plan) -> str:
    """The mark behind a plan in the table where it is the chosen one. No prediction depends on the
    order of the tiles, so a plan that differs in that alone is marked too."""
    if plan == chosen:
        return _CHOSEN
    kernels = [p.kernel and (p.kernel.kernel, p.kernel.splits) for p in (plan, chosen)]
    is_alike = plan.transport == chosen.transport and kernels[0] == kernels[1]
    return " (the plan but for the order of tiles)" if is_alike else ""
