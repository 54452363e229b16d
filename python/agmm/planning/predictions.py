"""The predictions of the cost model for a plan, whatever the op and the format."""

from __future__ import annotations

from agmm.planning import cost_model, formats
from agmm.planning.plans import Plan
from agmm.planning.problems import CPU, Problem


def has_model(problem: Problem) -> bool:
    """Whether there is a cost model: not of the CPU, and not of formats without kernels."""
    return problem.gpu != CPU and formats.of(problem.format).has_kernels


def predict_us(problem: Problem, plan: Plan) -> float | None:
    """Predicted time of a call in µs; None where there is no cost model."""
    return plan.transport.predicted_us(problem, plan.kernel) if has_model(problem) else None


def uncertainty(problem: Problem, plan: Plan) -> float | None:
    """How far off a prediction is, as a share of it, for nine in ten shapes that nothing was fitted
    to; None where no such shapes were measured."""
    if not has_model(problem):
        return None
    of_op = cost_model.constants_for(problem).uncertainty.get(problem.op, {})
    return of_op.get(plan.family)
