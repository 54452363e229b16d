"""The matmul of all rows behind agmm's gather: by the library, or by one of agmm's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from agmm.planning import built_kernels
from agmm.planning.cost_model import behind_gather
from agmm.planning.planner import Planner
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig, Problem


def kernels_of(
    asked: KernelConfig | None,
    plan: Plan | None,
    problem: Callable[[int], Problem],
    weights: int,
) -> list[KernelConfig | None]:
    """A kernel for each weight; None where none is named.

    Args:
        asked: the one that the caller names for all of them.
        plan: the plan of the call. Its kernel is one for all columns together, so several weights
            have the fastest by the cost model.
        problem: what the planner is asked of a weight.
    """
    planned = None if plan is None else plan.kernel
    if asked is None and planned is not None and weights > 1:
        return [by_model.fused_plan(behind_gather(problem(i))).kernel for i in range(weights)]
    return [asked or planned] * weights


by_model = Planner(built_kernels.kernels_of)
"""A planner without tables, which is the same on all ranks."""


def by_library(rows: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The library's product. It is rounded once, together with the bias, as on the fused path."""
    return torch.mm(rows, B) if bias is None else torch.addmm(bias, rows, B)
