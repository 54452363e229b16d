"""`agmm explain` of `agmm.matmul_all_reduce`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType

from agmm.bench.units import duration
from agmm.cli.terminal import plain_table, whole
from agmm.errors import InvalidArgument
from agmm.planning import call_plans, cost_model
from agmm.planning.heuristics import lagged_kernel
from agmm.planning.legality import why_unfused
from agmm.planning.planner import Planner
from agmm.planning.plans import CPU, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, Problem

_WAYS: dict[cost_model.AllReduceWay, str] = {
    "lagged": "one kernel, whose finished rows go to all ranks while it computes others",
    "scatter": "matmul + reduce-scatter in one kernel, then an all-gather",
    "unfused": "matmul, then all-reduce",
}


def explain(
    problem: Problem, scaling: str | None, planner: Planner, remarks: Iterable[str]
) -> RenderableType:
    """The plan of `agmm.matmul_all_reduce`, ready to print; m is the rows of A, k its columns on
    each rank.

    Raises InvalidArgument for what it does not take.
    """
    if problem.return_A:
        raise InvalidArgument("return_A: found True with matmul_all_reduce, wanted False")
    if scaling is not None or problem.dtype.startswith("float8"):
        raise InvalidArgument("dtype: found fp8 with matmul_all_reduce, wanted another")
    m, n, k, world_size = problem.m, problem.n, problem.k, problem.world_size
    called = f"out[{m}, {n}] = all_reduce(A[{m}, {k}] @ B), {problem.dtype}"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''} on {problem.gpu}"
    lines = [f"{called}, B by {problem.b_layout}, {ranks}"]
    if problem.gpu == CPU:
        return Group(*lines, "plan: agmm's own, through shared memory")
    # Ranks that cannot share the rows equally compute a few more.
    shared = -(-m // world_size) * world_size
    problem = problem._replace(m=shared, op=MATMUL_REDUCE_SCATTER)
    illegal = why_unfused(problem.dtype, n, k)
    scatters = returns = None
    if illegal is None and world_size > 1:
        scatters = planner.fused_plan(problem).kernel
        built = call_plans.all_reduce_kernels()
        if not call_plans.kernels():
            built = cost_model.default_kernels(MATMUL_ALL_REDUCE)
        returns = lagged_kernel(problem, built)
    times = cost_model.all_reduce_times(problem, scatters, returns)
    chosen = cost_model.all_reduce_way(problem, scatters, returns)
    names = dict(_WAYS)
    if returns is not None:
        names["lagged"] += f": {returns.name}"
    if scatters is not None:
        names["scatter"] += f": {scatters.name}"
    lines.append(f"plan: {names[chosen]}")
    lines.append(
        f"why: the kernels cannot compute it: {illegal}"
        if illegal is not None
        else "why: a scatter and a gather where predicted to save "
        f"{1 - cost_model.all_reduce_gain('scatter', world_size):.0%}, one kernel to save "
        f"{1 - cost_model.all_reduce_gain('lagged', world_size):.0%}"
    )
    table = plain_table("alternatives (predicted)")
    table.add_column("plan", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for way, us in sorted(times.items(), key=lambda pair: pair[1]):
        table.add_row(names[way] + (" (the plan)" if way == chosen else ""), duration(us))
    return Group("\n".join([*lines, *remarks]), whole(table))
