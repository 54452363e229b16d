"""Why `agmm explain` finds a call fused or not, in words."""

from __future__ import annotations

from collections.abc import Sequence

from agmm.bench.units import duration
from agmm.cli import gpu_names
from agmm.planning import cost_model, formats
from agmm.planning.legality import (
    BLOCK_SCALES_SINCE,
    why_illegal,
    why_not_scaled_mm,
    why_unfused,
)
from agmm.planning.op_plans import Choice
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_TORCH, UNFUSED
from agmm.planning.predictions import predict_us
from agmm.planning.problems import (
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
)
from agmm.planning.transports import GATHER, LAGGED, SCATTER


def why_not_by_torch(problem: Problem, columns: Sequence[int]) -> str | None:
    """The reason why ``torch._scaled_mm`` does not multiply the problem's operands, or None. A plan
    for it is passed over where the call has a kernel.

    Args:
        columns: N of each weight.
    """
    of = formats.of(problem.format)
    if of.kind != formats.FP8 or problem.gpu == CPU:
        return None
    cuda: str | None = ".".join(map(str, BLOCK_SCALES_SINCE))
    if problem.gpu == gpu_names.gpu_here():
        import torch

        cuda = torch.version.cuda
    is_by_block = bool(of.columns_of_a_scale)
    reasons = (why_not_scaled_mm(n, is_by_block=is_by_block, cuda=cuda) for n in columns)
    return next((reason for reason in reasons if reason is not None), None)


def why(
    problem: Problem,
    choice: Choice,
    planner: Planner,
    operands: str,
    not_by_torch: str | None,
) -> str:
    """Why the call is fused, or why not, in a sentence.

    Args:
        operands: their name to print.
        not_by_torch: what `why_not_by_torch` says.
    """
    is_fp8 = problem.gpu != CPU and formats.of(problem.format).kind == formats.FP8
    # An all-reduce of fp8 operands has the kernels of its scatter.
    op = MATMUL_REDUCE_SCATTER if problem.op == MATMUL_ALL_REDUCE else problem.op
    if is_fp8 and not planner.kernels_of(op, problem.format):
        return f"{operands}: this build has no kernel for it"
    of_op = {MATMUL_REDUCE_SCATTER: _said_of_scatter, MATMUL_ALL_REDUCE: _said_of_all_reduce}
    if problem.op in of_op:
        return of_op[problem.op](problem, choice)
    if problem.gpu == CPU and problem.format.startswith("float8"):
        return "agmm's own on CPU ranks, of chunks that are dequantised to float32"
    illegal = None if problem.gpu == CPU else why_unfused(problem.format, problem.n, problem.k)
    if illegal is not None:
        return f"unfused, the kernels cannot compute it: {illegal}"
    row = choice.row
    fused = [
        us
        for plan, us in planner.alternatives(problem)
        if plan.kernel and not plan.gathers_first and us is not None
    ]
    if choice.plan.transport == GATHER:
        library = None if not_by_torch else predict_us(problem, UNFUSED)
        others = [] if library is None else [f"{duration(library)} by NCCL's gather"]
        others += [_said_of_fused(min(fused), choice)] if fused else []
        whose = "agmm's" if is_fp8 or choice.plan.kernel else "the library's"
        return f"agmm's gather, then {whose} matmul; {', '.join(others)}"
    if not_by_torch is not None:
        return f"fused, since torch._scaled_mm cannot compute it: {not_by_torch}"
    if choice.plan == UNFUSED:
        if row is not None:
            return "unfused, it was measured to be the fastest"
        said = f", {_said_of_fused(min(fused), choice)}" if fused else ""
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
    by = "the backend's all-gather, then the library's matmul"
    return f"fused, the unfused path ({by}) is predicted to take {duration(unfused)}"


def _said_of_fused(us: float, choice: Choice) -> str:
    """The predicted time of the fastest fused plan, where the choice is another one."""
    is_behind = choice.predicted_us is not None and us < choice.predicted_us
    margin = ", which has to be ahead by a margin fitted to measured shapes" if is_behind else ""
    return f"{duration(us)} fused{margin}"


def _said_of_scatter(problem: Problem, choice: Choice) -> str:
    if choice.row is not None:
        us = None if choice.plan == UNFUSED else choice.row.unfused_us
        beside = "" if us is None else f", {duration(us)} unfused"
        return f"it was measured to be the fastest{beside}"
    if choice.source.startswith("tuned at"):
        return f"it is the fastest by what was {choice.source}"
    if problem.gpu == CPU:
        return "agmm's own, each rank sends the others its partial sums as they are computed"
    unfused, by_torch = (predict_us(problem, plan) for plan in (UNFUSED, BY_TORCH))
    illegal = why_illegal(problem, BY_TORCH, ())
    if choice.plan.kernel is not None:
        assert unfused is not None and by_torch is not None  # kernels have a model
        others = f"{duration(unfused)} unfused"
        others += "" if illegal else f", {duration(by_torch)} by torch's fused op"
        return f"agmm's own, whose kernel sends tiles as they are computed; {others}"
    if illegal is not None:
        return f"unfused, {illegal}"
    assert unfused is not None and by_torch is not None
    least = duration(cost_model.constants(problem.gpu).fused_reduce_scatter_gain_us)
    if choice.plan == BY_TORCH:
        return f"torch's fused op, which saves more than the {least} that it costs the host"
    saved = f"saves {duration(unfused - by_torch)}" if by_torch < unfused else "saves nothing"
    return f"unfused, torch's fused op {saved}, wanted {least}, which it costs the host"


def _said_of_all_reduce(problem: Problem, choice: Choice) -> str:
    if problem.gpu == CPU:
        return "agmm's own, each rank adds up the partial sums of all as they are computed"
    if choice.row is not None:
        return "it was measured to be the fastest"
    illegal = why_unfused(problem.format, problem.n, problem.k)
    if illegal is not None:
        return f"the kernels cannot compute it: {illegal}"
    scatter, lagged = (f"{1 - one.gain(problem.world_size):.0%}" for one in (SCATTER, LAGGED))
    by_one = f", one kernel to save {lagged}" if LAGGED.serves(problem) else ""
    return f"a scatter and a gather where predicted to save {scatter}{by_one}"
