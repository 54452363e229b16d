"""Which steps of the ops' flow a call takes, and which it is made to take."""

from __future__ import annotations

from typing import Any
from unittest import mock

from agmm.planning import call_plans
from agmm.planning.plans import Plan


def noted(call_type: type, step: str) -> Any:
    """Within it the step of calls of that type is made as ever, and noted in the mock."""
    return mock.patch.object(call_type, step, autospec=True, side_effect=getattr(call_type, step))


def planned(plan: Plan, fused: Plan | None = None) -> Any:
    """Within it every planner has that plan, and ``fused`` where one that is fused is asked for."""
    planner = mock.Mock(
        plan=lambda problem: plan, fused_plan=lambda problem: fused or plan, learns=False
    )
    return mock.patch.object(call_plans, "planner", return_value=planner)
