"""What a planner chose, and why; and the cost model's choice for a matmul + reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agmm.planning import cost_model
from agmm.planning.heuristics import predict_us, scatter_plans
from agmm.planning.plans import (
    BY_TORCH,
    CPU,
    FUSED_DTYPES,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    Row,
)


@dataclass(frozen=True)
class Choice:
    """A plan, where it comes from, and its time in µs, predicted and measured (None: unknown)."""

    plan: Plan
    source: str
    predicted_us: float | None
    row: Row | None = None
    """The row of exactly this problem."""


class Found(NamedTuple):
    """The same before it is asked for a prediction."""

    plan: Plan
    source: str
    us: float | None = None
    """Predicted, where it had to be."""
    row: Row | None = None


def scatter_favourite(problem: Problem, kernels: Sequence[KernelConfig], fused: bool) -> Found:
    """What the cost model says of a matmul + reduce-scatter."""
    plans = scatter_plans(problem, kernels)
    legal = [plan for plan in plans if not (fused and plan == UNFUSED)]
    if not legal:
        raise ValueError(f"plan: found no fused one of {problem.op}, wanted unfused ones too")
    if problem.gpu == CPU:
        return Found(legal[0], "default of the CPU backend")
    if problem.dtype not in FUSED_DTYPES:
        return Found(UNFUSED, "cost model")
    own = [plan for plan in legal if plan.kernel is not None]
    is_fused = BY_TORCH in legal and cost_model.is_reduce_scatter_fused(problem)
    others = [BY_TORCH if is_fused or (fused and not own) else UNFUSED]
    rated = [(predict_us(problem, plan) or 0.0, plan) for plan in own]
    if not (fused and own):
        rated += [(predict_us(problem, plan) or 0.0, plan) for plan in others]
    us, plan = min(rated, key=lambda pair: pair[0])
    return Found(plan, "cost model", us)
