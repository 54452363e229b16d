"""`agmm explain` of calls on fp8 operands."""

from __future__ import annotations

from rich.console import Group, RenderableType

from agmm import _core
from agmm._core import Accumulation
from agmm.bench.units import duration
from agmm.cli.terminal import plain_table, whole
from agmm.errors import InvalidArgument
from agmm.planning import call_plans, fp8_kernels, kernel_table
from agmm.planning.choices import Choice
from agmm.planning.cost_model import constants
from agmm.planning.cost_model import fp8 as costs
from agmm.planning.planner import Planner
from agmm.planning.plans import CPU, MATMUL_REDUCE_SCATTER, Problem
from agmm.runtime.scaling import BY_NAME, K_MULTIPLE

_WHY_FUSED = "why: fused wherever there is a kernel, unless a tuned row says otherwise"


def explain(problem: Problem, scaling: str, planner: Planner) -> RenderableType:
    """What a call on ``float8_e4m3fn`` operands gets, and what it should cost.

    Raises InvalidArgument where the ranks cannot have equally many rows, for an unknown kind of
    scales, or a K that is no multiple of 16.
    """
    if scaling not in BY_NAME:
        raise InvalidArgument(f"scaling: found {scaling!r}, wanted one of {', '.join(BY_NAME)}")
    if problem.m % problem.world_size:
        raise InvalidArgument(
            f"m: found {problem.m}, wanted a multiple of tp, {problem.world_size}"
        )
    if problem.k % K_MULTIPLE:
        raise InvalidArgument(f"k: found {problem.k}, wanted a multiple of {K_MULTIPLE} with fp8")
    scatters = problem.op == MATMUL_REDUCE_SCATTER
    m, n, k, ranks = problem.m, problem.n, problem.k, problem.world_size
    call = (
        f"out[{m // ranks}, {n}] = reduce_scatter(A[{m}, {k}] @ B)"
        if scatters
        else f"out[{m}, {n}] = all_gather(A_shard)[{m}, {k}] @ B"
    )
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {problem.gpu}"
    lines = [f"{call}, float8_e4m3fn with {scaling} scales, B by column, {where}"]
    if problem.gpu == CPU:
        lines += [
            "plan: push",
            "why: agmm's own on CPU ranks, of chunks that are dequantised to float32",
        ]
        return Group(*lines)
    is_assumed = not call_plans.kernels() and _is_in_default_build(problem.op, scaling)
    choice = None if is_assumed else _choice(problem, scaling, planner)
    fused, unfused = costs.fused_us(problem, scaling), costs.unfused_us(problem, scaling)
    library = (
        "torch._scaled_mm and NCCL's reduce-scatter"
        if scatters
        else ("NCCL's all-gather and torch._scaled_mm")
    )
    times = {library: unfused}
    if isinstance(choice, str):
        plan, us = library, unfused
        lines += [f"plan: unfused, {library}", f"why: {choice}"]
    elif choice is None:
        plan, us = "push, by an fp8 kernel", fused
        times[plan] = us
        lines += [f"plan: {plan}", _WHY_FUSED]
    else:
        kernel = choice.plan.kernel
        plan, us = (library, unfused) if kernel is None else (f"push/{kernel.name}", fused)
        times[plan] = us
        lines += [f"plan: {plan}", f"from: {choice.source}"]
        if choice.row is not None:
            lines.append(f"measured: {duration(choice.row.us)}")
        elif kernel is not None:
            lines.append(_WHY_FUSED)
    roof = costs.matmul_us(problem)
    lines.append(
        f"predicted: {duration(us)}, {us / roof:.2f} × the matmul alone ({duration(roof)})"
    )
    used = constants(problem.gpu).gpu
    if used != problem.gpu:
        lines.append(f"note: no constants of {problem.gpu} are known, those of {used} stand in")
    if is_assumed:
        lines.append("note: this build has no CUDA kernels; assumed are those of a default one")
    table = plain_table("alternatives (predicted)")
    table.add_column("plan", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for name, predicted in sorted(times.items(), key=lambda pair: pair[1]):
        table.add_row(name + (" (the plan)" if name == plan else ""), duration(predicted))
    return Group("\n".join(lines), whole(table))


def _accumulation(scaling: str) -> Accumulation:
    """That of a kind of scales; fast where its scales leave the choice."""
    blocks = {"block": Accumulation.block, "block 1x128": Accumulation.block_1x128}
    return blocks.get(scaling, Accumulation.fast)


def _is_in_default_build(op: str, scaling: str) -> bool:
    """Whether a default build has a kernel for products with such scales."""
    rows = kernel_table.rows_of("default", op, is_fp8=True)
    return _accumulation(scaling).name in {row.accumulation for row in rows}


def _choice(problem: Problem, scaling: str, planner: Planner) -> Choice | str:
    """The plan that the call gets, or why no kernel serves it."""
    if problem.n % _core.ALIGNMENT:
        return f"B: found N={problem.n}, wanted a multiple of {_core.ALIGNMENT}"
    dtype, scatters = "float8_e4m3fn_float8_e4m3fn", problem.op == MATMUL_REDUCE_SCATTER
    accumulation = fp8_kernels.served_by(dtype, _accumulation(scaling), scatters=scatters)
    if not fp8_kernels.built(dtype, accumulation, scatters=scatters):
        return f"fp8 with {scaling} scales: this build has no kernel for it"
    return planner.choose(problem._replace(dtype=dtype, accumulation=accumulation.name))
