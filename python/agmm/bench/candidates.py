"""The plans that tuning measures. This module needs no GPU and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agmm.planning.cost_model import behind_gather, is_b_in_l2
from agmm.planning.heuristics import (
    across,
    all_reduce_plans,
    chooses_streamed,
    chunkings,
    orders,
    scatter_plans,
    sm_pushes,
    streamed_plan,
    usual_order,
    usual_plans,
)
from agmm.planning.legality import why_illegal
from agmm.planning.plans import GATHERED, UNFUSED, Plan
from agmm.planning.predictions import predict_us
from agmm.planning.problems import (
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    KernelConfig,
    Problem,
)
from agmm.planning.transports import GATHER, SmPush, copy_transports

PRUNE_FACTOR = 1.3
"""Kernels are left out that the cost model says take this many times as long as the best one."""
KERNELS_IN_ALL_ORDERS = 2
KERNELS_BEHIND_A_GATHER = 3
"""How many kernels are tried behind agmm's gather: a choice, since the gather is a part of the
time, and the model knows the matmul alone best."""


def candidates(
    problem: Problem,
    kernels: Sequence[KernelConfig],
    old: Plan,
    of_scatter: Sequence[KernelConfig] = (),
) -> list[Plan]:
    """The plans to check at first: each kernel that the cost model leaves, in its usual order, and
    also across the chunks where it would read B anew for each; the unfused path; where they are
    legal, torch's fused op, and a gather by agmm's kernel before the library's matmul or one of the
    best few kernels; a streamed gather where the cost model chooses among such; and the plan in
    use. A matmul + all-reduce may also have kernels of a matmul + reduce-scatter, ``of_scatter``.
    """
    if problem.op == MATMUL_REDUCE_SCATTER:
        plans = _without_slow_kernels(problem, scatter_plans(problem, kernels))
    elif problem.op == MATMUL_ALL_REDUCE:
        plans = _without_slow_kernels(problem, all_reduce_plans(problem, kernels, of_scatter))
    elif problem.gpu == CPU:
        plans = chunkings(problem)
    else:
        ordered = [usual_order(problem, kernel) for kernel in kernels]
        if problem.world_size > 1 and not is_b_in_l2(problem):
            # An order across the chunks reads B once for all of them. It is a candidate only where
            # it is measured: no plan has it by itself.
            ordered += [across(problem, kernel) for kernel in ordered]
        fused = [
            Plan(transport, kernel)
            for kernel in ordered
            for transport in copy_transports(problem, kernel)
            if not kernel.is_streaming  # whose splits are given; the usual plans have these
        ]
        fused += [plan for kernel in kernels for plan in usual_plans(problem, kernel)]
        plans = _without_slow_kernels(problem, fused)
        if why_illegal(problem, GATHERED, ()) is None:
            plans += [GATHERED, *_behind_a_gather(problem, kernels)]
        streamed = streamed_plan(problem, kernels) if chooses_streamed(problem) else None
        if streamed is not None:
            plans.append(streamed)
    return list(dict.fromkeys([old, *plans, UNFUSED]))


def _behind_a_gather(problem: Problem, kernels: Sequence[KernelConfig]) -> list[Plan]:
    """The plans of agmm's gather before the best kernels, each with the splits of K that serve it
    best."""
    multiplied = behind_gather(problem)
    found: list[tuple[float, Plan]] = []
    for kernel in kernels:
        plans = [Plan(GATHER, plan.kernel) for plan in usual_plans(multiplied, kernel)]
        timed = [
            (predict_us(problem, plan) or 0.0, plan)
            for plan in plans
            if why_illegal(problem, plan, kernels) is None
        ]
        found += [min(timed, key=lambda pair: pair[0])] if timed else []
    found.sort(key=lambda pair: pair[0])
    return [plan for _, plan in found[:KERNELS_BEHIND_A_GATHER]]


def _without_slow_kernels(problem: Problem, plans: Sequence[Plan]) -> list[Plan]:
    predicted = {
        plan: predict_us(problem, plan) or 0.0 for plan in plans if plan.kernel is not None
    }
    limit = PRUNE_FACTOR * min(predicted.values(), default=0.0)
    return [plan for plan in plans if predicted.get(plan, 0.0) <= limit]


def other_orders(medians: Mapping[Plan, float]) -> list[Plan]:
    """The plans of the best kernels in all orders that are not among the plans yet."""
    own = (p for p in medians if p.kernel is not None and not p.gathers_first)
    fused = sorted(own, key=lambda p: medians[p])
    more = []
    for plan in fused[:KERNELS_IN_ALL_ORDERS]:
        assert plan.kernel is not None
        more += [Plan(plan.transport, order) for order in orders(plan.kernel)]
    return [plan for plan in dict.fromkeys(more) if plan not in medians]


def other_pushes(problem: Problem, medians: Mapping[Plan, float]) -> list[Plan]:
    """The plans with other chunks that are not among the plans yet, where SM push is the
    fastest."""
    best = min(medians, key=lambda plan: medians[plan], default=UNFUSED)
    if best.kernel is None or not isinstance(best.transport, SmPush):
        return []
    plans = [Plan(push, best.kernel) for push in sm_pushes(problem, best.kernel)]
    return [plan for plan in plans if plan not in medians]
