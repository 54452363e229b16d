"""The predictions of the cost model for a plan, whatever the op and the format."""

from __future__ import annotations

from agmm.planning import cost_model, formats
from agmm.planning.plans import (
    ALL_GATHER_MATMUL,
    BY_TORCH,
    CPU,
    GATHERED,
    LAGGED,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    UNFUSED,
    Plan,
    Problem,
    SmPush,
)


def has_model(problem: Problem) -> bool:
    """Whether there is a cost model: not of the CPU, and not of formats without kernels."""
    return problem.gpu != CPU and formats.of(problem.format).has_kernels


def predict_us(problem: Problem, plan: Plan) -> float | None:
    """Predicted time of a call in µs; None where there is no cost model."""
    return _US[problem.op](problem, plan) if has_model(problem) else None


def _gather_us(problem: Problem, plan: Plan) -> float:
    if plan == UNFUSED:
        return cost_model.unfused_us(problem)
    if plan == GATHERED:
        return cost_model.gathered_us(problem)
    assert plan.kernel is not None
    sm_push = SmPush.parse(plan.transport)
    if sm_push is not None:
        return cost_model.sm_push_us(
            problem,
            plan.kernel,
            sm_push.chunk_columns,
            parts=sm_push.parts,
            first_peers=sm_push.first_peers,
            has_ctas=sm_push.has_ctas(problem.k),
        )
    return cost_model.fused_us(problem, plan.kernel, is_pull=plan.transport == "pull")


def _scatter_us(problem: Problem, plan: Plan) -> float:
    if plan.kernel is not None:
        return cost_model.tile_push_scatter_us(problem, plan.kernel)
    if plan == BY_TORCH:
        return cost_model.fused_matmul_reduce_scatter_us(problem)
    return cost_model.matmul_reduce_scatter_us(problem)


def _all_reduce_us(problem: Problem, plan: Plan) -> float:
    if plan.kernel is None:
        return cost_model.matmul_all_reduce_us(problem)
    if plan.transport == LAGGED:
        return cost_model.lagged_all_reduce_us(problem, plan.kernel)
    return cost_model.scatter_all_reduce_us(problem, plan.kernel)


_US = {
    ALL_GATHER_MATMUL: _gather_us,
    MATMUL_REDUCE_SCATTER: _scatter_us,
    MATMUL_ALL_REDUCE: _all_reduce_us,
}
