"""`agmm explain`: the plan of a problem, where it comes from, and what the others would cost."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType

from agmm import _call_plan, _core, cost_model, tables
from agmm._terminal import plain_table
from agmm.errors import InvalidArgument
from agmm.plan import (
    CPU,
    UNFUSED,
    Choice,
    KernelConfig,
    Plan,
    Planner,
    Problem,
    default_kernels,
    predict_us,
    why_unfused,
)


def known_gpus() -> list[str]:
    """Every GPU that has constants or a table, and the CPU."""
    return sorted({*cost_model.known_gpus(), *tables.known_gpus(), CPU})


def find_gpu(name: str | None) -> str:
    """The GPU that a name or a part of one means; for None the one here, else the default.

    Raises InvalidArgument where it means none or several.
    """
    if name is None:
        return _gpu_here() or cost_model.DEFAULT_GPU
    wanted = tables.gpu_name(name)
    known = known_gpus()
    found = [gpu for gpu in known if gpu == wanted] or [gpu for gpu in known if wanted in gpu]
    if not wanted or len(found) != 1:
        raise InvalidArgument(f"gpu: found {name!r}, wanted one of {', '.join(known)}")
    return found[0]


def _gpu_here() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return tables.gpu_name(torch.cuda.get_device_name())


def _has_atomics_here(gpu: str) -> bool:
    """Whether the links do, where the problem's GPU is the one here; else they are taken to."""
    if gpu != _gpu_here() or not _core.cuda_built:
        return True
    from agmm import _links

    return not _links.pairs_without_atomics()


def kernels_for(gpu: str) -> tuple[KernelConfig, ...]:
    """The kernels of this build; where it has none, those that the GPU's constants name."""
    built = _call_plan.kernels()
    if built or gpu == CPU:
        return built
    return default_kernels(gpu)


def planner_for(gpu: str, world_size: int) -> Planner:
    """A planner with the tables of any GPU."""
    found = tables.user(gpu, world_size), tables.packaged(gpu, world_size)
    return Planner(kernels_for(gpu), [table for table in found if table is not None])


def explain(problem: Problem, planner: Planner) -> RenderableType:
    """The explanation of the planner's choice, ready to print.

    Raises InvalidArgument where the ranks cannot have equally many rows.
    """
    if problem.m % problem.world_size:
        raise InvalidArgument(
            f"m: found {problem.m}, wanted a multiple of tp, {problem.world_size}"
        )
    problem = problem._replace(peer_atomics=_has_atomics_here(problem.gpu))
    choice = planner.choose(problem)
    lines = [
        f"out[{problem.m}, {problem.n}] = all_gather(A_shard)[{problem.m}, {problem.k}] @ B, "
        f"{problem.dtype}, B by {problem.b_layout}, {problem.world_size} ranks on {problem.gpu}"
        + (", A returned" if problem.return_A else ""),
        f"plan: {choice.plan.name}",
        f"from: {choice.source}",
        *_times(problem, choice),
        f"why: {why(problem, choice, planner)}",
        *_remarks(problem),
    ]
    return Group("\n".join(lines), _table(problem, choice, planner))


def _times(problem: Problem, choice: Choice) -> Iterable[str]:
    roof = cost_model.matmul_us(problem) if choice.predicted_us is not None else None
    if choice.predicted_us is not None and roof is not None:
        yield (
            f"predicted: {choice.predicted_us:.1f} µs, {choice.predicted_us / roof:.2f} × the "
            f"matmul alone ({roof:.1f} µs)"
        )
    row = choice.row
    if row is None:
        if problem.gpu == CPU or why_unfused(problem.dtype, problem.n, problem.k) is None:
            yield "measured: not yet (agmm tune does it)"
    elif row.roof_us is None:
        yield f"measured: {row.us:.1f} µs"
    else:
        yield (
            f"measured: {row.us:.1f} µs, {row.us / row.roof_us:.2f} × the matmul alone "
            f"({row.roof_us:.1f} µs), by agmm {row.agmm}"
        )


def why(problem: Problem, choice: Choice, planner: Planner) -> str:
    """Why the call is fused, or why not, in a sentence."""
    illegal = None if problem.gpu == CPU else why_unfused(problem.dtype, problem.n, problem.k)
    if illegal is not None:
        return f"unfused, the kernels cannot compute it: {illegal}"
    row = choice.row
    if choice.plan == UNFUSED:
        if row is not None:
            return "unfused, it was measured to be the fastest"
        times = [us for plan, us in planner.alternatives(problem) if plan.kernel and us is not None]
        said = f", {min(times):.1f} µs fused" if times else ""
        return f"unfused is the fastest by {choice.source}{said}"
    if row is not None and row.unfused_us is not None:
        said = f"fused, the unfused path was measured at {row.unfused_us:.1f} µs"
        within = "" if row.unfused_us >= row.us else ", not faster by more than the noise"
        return said + within
    unfused = predict_us(problem, UNFUSED)
    if problem.world_size == 1:
        return "fused, one rank has nothing to gather"
    if unfused is None:
        return "fused, nothing is known of the unfused path"
    return f"fused, the unfused path is predicted to take {unfused:.1f} µs"


def _remarks(problem: Problem) -> Iterable[str]:
    if problem.gpu == CPU:
        return
    if not problem.peer_atomics:
        yield "note: links between the GPUs here have no native atomics, so SM push is not legal"
    used = cost_model.constants(problem.gpu).gpu
    if used != problem.gpu:
        yield f"note: no constants of {problem.gpu} are known, those of {used} stand in"
    if not _call_plan.kernels():
        yield f"note: this build has no CUDA kernels; assumed are the default ones of {used}"


def _table(problem: Problem, choice: Choice, planner: Planner) -> RenderableType:
    table = plain_table("alternatives (predicted µs)")
    table.add_column("plan", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    table.add_column("÷ plan", justify="right", no_wrap=True)
    for plan, us in planner.alternatives(problem):
        ratio = us / choice.predicted_us if us and choice.predicted_us else None
        table.add_row(
            plan.name + _mark(plan, choice.plan),
            "-" if us is None else f"{us:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table


def _mark(plan: Plan, chosen: Plan) -> str:
    """What a row of the table says of the plan. No prediction knows the order of the tiles."""
    if plan == chosen:
        return " (the plan)"
    kernels = [p.kernel and (p.kernel.kernel, p.kernel.splits) for p in (plan, chosen)]
    is_alike = plan.transport == chosen.transport and kernels[0] == kernels[1]
    return " (the plan but for the order of tiles)" if is_alike else ""
