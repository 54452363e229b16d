"""Several weights of one input in one launch, where there are few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agmm import _core
from agmm.planning.planner import Planner
from agmm.planning.plans import Plan
from agmm.planning.problems import MAX_SIZE, PLAIN, Problem


def plan_of(problems: Sequence[Problem], planner: Planner) -> Plan | None:
    """The plan of all weights in one launch, which has the splits of K that are all weights'
    together. None where there is one weight, where the weights are of several kinds, more than one
    launch multiplies, or followed by an activation, and where so many rows come that no streaming
    kernel serves them.

    Args:
        problems: what the planner is asked of each weight.
    """
    n = sum(problem.n for problem in problems)
    kinds = {replace(problem, n=n) for problem in problems}
    if not 1 < len(problems) <= _core.MAX_STREAMED_WEIGHTS or len(kinds) > 1 or n > MAX_SIZE:
        return None
    if problems[0].epilogue != PLAIN:
        return None
    plan = planner.fused_plan(kinds.pop())
    return plan if plan.kernel is not None and plan.kernel.is_streaming else None
