"""`agmm explain`: the plan of a problem, where it comes from, and what the others would cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from rich.console import Group, RenderableType

from agmm import _core
from agmm.bench.units import duration
from agmm.cli import explain_all_reduce, explain_fp8
from agmm.cli.terminal import plain_table, whole
from agmm.errors import InvalidArgument
from agmm.planning import call_plans, cost_model, tables
from agmm.planning.choices import Choice
from agmm.planning.cost_model import collectives as collective_costs
from agmm.planning.cost_model import default_kernels
from agmm.planning.cost_model.collectives import Kind
from agmm.planning.heuristics import predict_us
from agmm.planning.legality import why_scatter_illegal, why_unfused
from agmm.planning.planner import Planner
from agmm.planning.plans import (
    ALL_GATHER_MATMUL,
    BY_TORCH,
    CPU,
    DEFAULT_GPU,
    GATHERED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
)

GPUS_OF_A_HOST = 8
"""Of Hopper, at most; ranks on several hosts take the unfused path."""

HOPPERS = {
    "nvidia-h100-80gb-hbm3": 132,
    "nvidia-h100-pcie": 114,
    "nvidia-h100-nvl": 132,
    "nvidia-h200": 132,
    "nvidia-h200-nvl": 132,
    "nvidia-h20": 78,
    "nvidia-h800": 132,
    "nvidia-gh200-480gb": 132,
}
"""The names of Hopper GPUs as their driver gives them, with their multiprocessors."""
_SPOKEN = {
    "h100": "nvidia-h100-80gb-hbm3",
    "h100-sxm": "nvidia-h100-80gb-hbm3",
    "h100-sxm5": "nvidia-h100-80gb-hbm3",
    "h200-sxm": "nvidia-h200",
    "gh200": "nvidia-gh200-480gb",
}
_BRAND = "nvidia-"


def known_gpus() -> list[str]:
    """Every GPU that has constants or a table, and the CPU."""
    return sorted({*cost_model.known_gpus(), *tables.known_gpus(), CPU})


def find_gpu(name: str | None) -> str:
    """The GPU that a name, or some words of one, means; for None the one here, else the default.

    Those with constants or a table come before others of the same words.

    Raises InvalidArgument where it means none or several.
    """
    if name is None:
        return _gpu_here() or DEFAULT_GPU
    wanted = tables.gpu_name(name)
    short = wanted.removeprefix(_BRAND)
    known = known_gpus()
    for gpus in (known, HOPPERS):
        for gpu in (wanted, _BRAND + short, _SPOKEN.get(short, "") if gpus is HOPPERS else ""):
            if gpu in gpus:
                return gpu
        words = {*short.split("-")} - {"", "nvidia"}
        found = [gpu for gpu in gpus if words and words <= {*gpu.split("-")}]
        if len(found) == 1:
            return found[0]
    others = ", ".join(gpu for gpu in HOPPERS if gpu not in known)
    raise InvalidArgument(
        f"gpu: found {name!r}, wanted one of {', '.join(known)}, or, with the constants of "
        f"{DEFAULT_GPU}, of {others}"
    )


def _gpu_here() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return tables.gpu_name(torch.cuda.get_device_name())


def has_atomics_here(gpu: str) -> bool:
    """Whether the links do, where the problem's GPU is the one here; else they are taken to."""
    if gpu != _gpu_here() or not _core.cuda_built:
        return True
    from agmm.runtime import links

    return not links.pairs_without_atomics()


def kernels_for(gpu: str) -> tuple[KernelConfig, ...]:
    """The kernels of this build; where it has none, those of a default build."""
    built = call_plans.kernels()
    if built or gpu == CPU:
        return built
    return default_kernels()


def _scatter_kernels_for(gpu: str) -> tuple[KernelConfig, ...]:
    built = call_plans.scatter_kernels()
    if call_plans.kernels() or gpu == CPU:
        return built
    return default_kernels(MATMUL_REDUCE_SCATTER)


def planner_for(gpu: str, world_size: int) -> Planner:
    """A planner with the tables of any GPU."""
    found = tables.user(gpu, world_size), tables.packaged(gpu, world_size)
    known = [table for table in found if table is not None]
    return Planner(kernels_for(gpu), known, _scatter_kernels_for(gpu))


def explain(problem: Problem, planner: Planner) -> RenderableType:
    """The explanation of the planner's choice, ready to print.

    Raises InvalidArgument where the ranks cannot have equally many rows, or nothing is gathered
    that could be returned.
    """
    if problem.return_A and problem.op == MATMUL_REDUCE_SCATTER:
        raise InvalidArgument("return_A: found True with matmul_reduce_scatter, wanted False")
    if problem.m % problem.world_size:
        raise InvalidArgument(
            f"m: found {problem.m}, wanted a multiple of tp, {problem.world_size}"
        )
    problem = problem._replace(peer_atomics=has_atomics_here(problem.gpu))
    choice = planner.choose(problem)
    lines = [
        f"{_call(problem)}, {problem.dtype}, B by {problem.b_layout}, {problem.world_size} "
        f"rank{'s' if problem.world_size > 1 else ''} on {problem.gpu}"
        + (", A returned" if problem.return_A else ""),
        f"plan: {choice.plan.name}",
        f"from: {choice.source}",
        *_times(problem, choice),
        f"why: {why(problem, choice, planner)}",
        *_remarks(problem),
    ]
    if problem.gpu == CPU:  # of which there is no model
        return Group(*lines)
    return Group("\n".join(lines), _table(problem, choice, planner))


def explain_any(problem: Problem, scaling: str | None) -> RenderableType:
    """`explain` with the planner of the tables that are there, or that of fp8 operands.

    Raises InvalidArgument for scales of other operands.
    """
    if problem.op == MATMUL_ALL_REDUCE:
        known, said = planner_for(problem.gpu, problem.world_size), _remarks(problem)
        return explain_all_reduce.explain(problem, scaling, known, said)
    if problem.dtype.startswith("float8"):
        planner = planner_for(problem.gpu, problem.world_size)
        return explain_fp8.explain(problem, scaling or "rowwise", planner)
    if scaling is not None:
        raise InvalidArgument(
            f"scaling: found {scaling!r} with {problem.dtype}, wanted none, or float8_e4m3fn"
        )
    return explain(problem, planner_for(problem.gpu, problem.world_size))


def check_columns(kind: str, n: int | None) -> None:
    """Raises InvalidArgument where a call with a matmul has no ``n``, or a collective has one."""
    if kind in get_args(Kind):
        if n is not None:
            raise InvalidArgument(f"n: found {n}, wanted none for {kind}, of --m rows by --k")
    elif n is None:
        raise InvalidArgument(f"n: found none, wanted the columns of B for {kind}")


def explain_collective(
    kind: Kind, rows: int, columns: int, itemsize: int, world_size: int, gpu: str
) -> RenderableType:
    """The same of one of `agmm.collectives`, of the whole tensor."""
    nbytes = rows * columns * itemsize
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    lines = [f"{kind} of [{rows}, {columns}], {nbytes} bytes in all, {ranks} on {gpu}"]
    if gpu == CPU or world_size == 1:
        by = "a copy" if world_size == 1 else "agmm, through shared memory"
        return Group(*lines, f"plan: {by}")
    library, methods = "NCCL", collective_costs.methods(kind)
    chosen: str = library
    predicted: dict[str, float] = {}
    if collective_costs.is_by_kernel(nbytes, world_size):
        chosen = collective_costs.collective_method(kind, nbytes, world_size)
    lines.append(f"plan: {chosen}")
    if world_size <= collective_costs.MOST_RANKS:
        limits = [
            f"{method} to {_size(limit)}"
            for method, limit in collective_costs.thresholds(kind, world_size)
        ]
        lines.append(f"why: {', '.join(limits)}, {library} beyond, as predicted")
        for method in methods:
            us = collective_costs.collective_us(kind, method, nbytes, world_size)
            predicted[method] = us
    else:
        most = collective_costs.MOST_RANKS
        lines.append(f"why: {world_size} ranks, agmm's kernels serve at most {most}")
    predicted[library] = collective_costs.by_library_us(kind, nbytes, world_size, gpu)
    table = plain_table("alternatives (predicted)")
    table.add_column("plan", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for name, us in sorted(predicted.items(), key=lambda pair: pair[1]):
        table.add_row(name + (" (the plan)" if name == chosen else ""), duration(us))
    return Group("\n".join(lines), whole(table))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _call(problem: Problem) -> str:
    m, n, k = problem.m, problem.n, problem.k
    if problem.op == MATMUL_REDUCE_SCATTER:
        return f"out[{m // problem.world_size}, {n}] = reduce_scatter(A[{m}, {k}] @ B)"
    return f"out[{m}, {n}] = all_gather(A_shard)[{m}, {k}] @ B"


def _times(problem: Problem, choice: Choice) -> Iterable[str]:
    if choice.predicted_us is not None:
        yield f"predicted: {duration(choice.predicted_us)}, {_beside_roof(problem, choice)}"
    row = choice.row
    if row is None:
        if problem.gpu == CPU or why_unfused(problem.dtype, problem.n, problem.k) is None:
            option = "" if problem.op == ALL_GATHER_MATMUL else f" --op {problem.op}"
            yield f"measured: not yet (agmm tune{option} does it)"
        elif problem.op == MATMUL_REDUCE_SCATTER:
            yield "measured: not yet"
    elif row.roof_us is None:
        yield f"measured: {duration(row.us)}"
    else:
        yield (
            f"measured: {duration(row.us)}, {row.us / row.roof_us:.2f} × the matmul alone "
            f"({duration(row.roof_us)}), by agmm {row.agmm}"
        )


def _beside_roof(problem: Problem, choice: Choice) -> str:
    """The prediction beside that of the matmul alone.

    Their ratio is told where it means something. A matmul that is mostly launch and latency is
    predicted by other constants than the call, and below 1 the two models' errors are all that
    is left: the call holds that matmul.
    """
    assert choice.predicted_us is not None
    roof = cost_model.matmul_us(problem)
    c = cost_model.constants(problem.gpu)
    if c.launch_us + c.matmul_latency_us > roof / 2:
        return f"the matmul alone {duration(roof)}, mostly latency: their ratio says nothing"
    if choice.predicted_us < roof:
        return f"the matmul alone {duration(roof)}: alike, as well as the model knows"
    return f"{choice.predicted_us / roof:.2f} × the matmul alone ({duration(roof)})"


def why(problem: Problem, choice: Choice, planner: Planner) -> str:
    """Why the call is fused, or why not, in a sentence."""
    if problem.op == MATMUL_REDUCE_SCATTER:
        return _said_of_scatter(problem, choice)
    illegal = None if problem.gpu == CPU else why_unfused(problem.dtype, problem.n, problem.k)
    if illegal is not None:
        return f"unfused, the kernels cannot compute it: {illegal}"
    row = choice.row
    fused = [us for plan, us in planner.alternatives(problem) if plan.kernel and us is not None]
    if choice.plan == GATHERED:
        library = predict_us(problem, UNFUSED)
        others = [] if library is None else [f"{duration(library)} by NCCL's gather"]
        others += [f"{duration(min(fused))} fused"] if fused else []
        return f"agmm's gather, then the library's matmul; {', '.join(others)}"
    if choice.plan == UNFUSED:
        if row is not None:
            return "unfused, it was measured to be the fastest"
        said = f", {duration(min(fused))} fused" if fused else ""
        return f"unfused is the fastest by {choice.source}{said}"
    if row is not None and row.unfused_us is not None:
        said = f"fused, the unfused path was measured at {duration(row.unfused_us)}"
        within = "" if row.unfused_us >= row.us else ", not faster by more than the noise"
        return said + within
    unfused = predict_us(problem, UNFUSED)
    if problem.world_size == 1:
        return "fused, one rank has nothing to gather"
    if unfused is None:
        return "fused, nothing is known of the unfused path"
    return f"fused, the unfused path is predicted to take {duration(unfused)}"


def _said_of_scatter(problem: Problem, choice: Choice) -> str:
    if choice.row is not None:
        us = None if choice.plan == UNFUSED else choice.row.unfused_us
        beside = "" if us is None else f", {duration(us)} unfused"
        return f"it was measured to be the fastest{beside}"
    if choice.source.startswith("tuned at"):
        return f"it is the fastest by what was {choice.source}"
    if problem.gpu == CPU:
        return "agmm's own, each rank sends the others their parts as they are computed"
    illegal = why_scatter_illegal(problem, BY_TORCH)
    if illegal is not None:
        return f"unfused, {illegal}"
    times = [predict_us(problem, plan) for plan in (UNFUSED, BY_TORCH)]
    assert times[0] is not None and times[1] is not None
    if choice.plan.kernel is not None:
        others = f"{duration(times[0])} unfused, {duration(times[1])} by torch's fused op"
        return f"agmm's own, whose kernel sends tiles as they are computed; {others}"
    least = duration(cost_model.constants(problem.gpu).fused_reduce_scatter_gain_us)
    if choice.plan == BY_TORCH:
        return f"torch's fused op, which saves more than the {least} that it costs the host"
    saved = f"saves {duration(times[0] - times[1])}" if times[1] < times[0] else "saves nothing"
    return f"unfused, torch's fused op {saved}, wanted {least}, which it costs the host"


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
        yield "note: links between the GPUs here have no native atomics, so SM push is not legal"
    gpus, which = _gpus_of_a_host(problem.gpu)
    if problem.world_size > gpus:
        unfused = _UNFUSED[problem.op]
        yield (
            f"note: {problem.world_size} ranks are more than the {gpus} GPUs {which}; ranks on "
            f"several hosts take {unfused}, whatever the plan"
        )
    used = cost_model.constants(problem.gpu).gpu
    if used != problem.gpu:
        yield f"note: no constants of {problem.gpu} are known, those of {used} stand in"
    if not call_plans.kernels():
        yield f"note: this build has no CUDA kernels; assumed are the default ones of {used}"


def _gpus_of_a_host(gpu: str) -> tuple[int, str]:
    import torch

    if gpu == _gpu_here():
        return torch.cuda.device_count(), "that are visible here"
    return GPUS_OF_A_HOST, "of a host"


def _table(problem: Problem, choice: Choice, planner: Planner) -> RenderableType:
    table = plain_table("alternatives (predicted)")
    table.add_column("plan", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("÷ plan", justify="right", no_wrap=True)
    for plan, us in planner.alternatives(problem):
        ratio = us / choice.predicted_us if us and choice.predicted_us else None
        table.add_row(
            plan.name + _mark(plan, choice.plan),
            "-" if us is None else duration(us),
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return whole(table)


def _mark(plan: Plan, chosen: Plan) -> str:
    """What a row of the table says of the plan. No prediction knows the order of the tiles."""
    if plan == chosen:
        return " (the plan)"
    kernels = [p.kernel and (p.kernel.kernel, p.kernel.splits) for p in (plan, chosen)]
    is_alike = plan.transport == chosen.transport and kernels[0] == kernels[1]
    return " (the plan but for the order of tiles)" if is_alike else ""
