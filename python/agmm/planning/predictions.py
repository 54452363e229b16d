"""The predictions of the cost model for a plan, whatever the op and the format."""

from __future__ import annotations

from agmm.planning import formats
from agmm.planning.plans import Plan
from agmm.planning.problems import CPU, Problem


def has_model(problem: Problem) -> bool:
    """Whether there is a cost model: not of the CPU, and not of formats without kernels."""
    return problem.gpu != CPU and formats.of(problem.format).has_kernels


def predict_us(problem: Problem, plan: Plan) -> float | None:
    """Predicted time of a call in µs; None where there is no cost model."""
    return plan.transport.predicted_us(problem, plan.kernel) if has_model(problem) else None
