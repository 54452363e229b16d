"""The differences between ops when a plan is looked up: the plans that there are, and the cost
model's favourite."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

from agmm.planning import cost_model
from agmm.planning.cost_model import At
from agmm.planning.heuristics import (
    chooses_sm_push,
    chooses_streamed,
    chooses_swapped,
    lagged_plans,
    scatter_plans,
    streamed_plan,
    usual_plans,
)
from agmm.planning.legality import why_unfused
from agmm.planning.plans import BY_TORCH, GATHERED, GATHERED_TO_KERNEL, UNFUSED, Plan, Row
from agmm.planning.predictions import has_model, predict_us
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    PLAIN,
    KernelConfig,
    Problem,
)
from agmm.planning.search import Search
from agmm.planning.transports import GATHER, LAGGED, PUSH, SCATTER, STREAMED, SmPush

KernelsOf = Callable[..., Sequence[KernelConfig]]
"""The kernels to choose from, by op and name of a format; those of another epilogue than `PLAIN` by
its name and the layout of B too."""


def gather_kernels(problem: Problem, kernels_of: KernelsOf) -> Sequence[KernelConfig]:
    """The kernels that an all-gather -> matmul is asked for."""
    if problem.epilogue == PLAIN:
        return kernels_of(problem.op, problem.format)
    return kernels_of(problem.op, problem.format, problem.epilogue, problem.b_layout)


NO_KERNEL = "no kernel of this build serves it"

_GATHER_VARIES = 0.2
"""The model takes the unfused plan where the fused ones take longer than it by more than so much of
its all-gather: that of more than `cost_model.STEADY_GATHER_BYTES` varies from run to run."""

_MOST_KNOWN = 64
"""The most numbers of rows whose time behind a gather is kept: a choice, enough for every power of
2 and some between."""

_WITHOUT_GATHER = "0.1."
"""The versions of agmm whose unfused plan had only the library's gather to take."""


@dataclass(frozen=True)
class Choice:
    """A plan, where it comes from, and its time in µs, predicted and measured (None: unknown)."""

    plan: Plan
    source: str
    predicted_us: float | None
    row: Row | None = None
    """The row of exactly this problem."""


def rated_us(problem: Problem, plan: Plan, us: float) -> float:
    """The predicted time of a plan as it is compared with other plans."""
    return us * (cost_model.choice_margin(problem, plan.family) or 1.0)


class Found(NamedTuple):
    """A choice whose time is predicted only where the choosing needed it."""

    plan: Plan
    source: str
    us: float | None = None
    """The predicted time, where it had to be predicted."""
    row: Row | None = None


class Here:
    """The problem that a planner looks at. What the choices for it share is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.at = At(problem)
        self.fastest: tuple[tuple[Plan, float] | None] | None = None
        """The fastest fused plan and its time, once it has been looked for."""
        self.unfused: tuple[Plan, float] | None = None
        """The fastest plan that gathers first and its time, once it has been looked for."""


class OpPlans(Protocol):
    """The plans of one op, for problems that differ in M alone."""

    def favourite(self, here: Here, fused: bool) -> Found:
        """The plan that the cost model says; where it says nothing, the plain fused plan.

        Raises:
            ValueError: ``fused``, and there is no kernel to choose from.
        """

    def alternatives(self, problem: Problem) -> list[Plan]:
        """All plans that `favourite` chooses among."""

    def kernels_for(self, plan: Plan) -> Sequence[KernelConfig]:
        """The kernels that such a plan may have."""

    def likeness(self, plan: Plan) -> Hashable:
        """A key that is equal for plans whose errors of prediction are taken to be alike."""

    def instead_of(self, here: Here, row: Row) -> Found | None:
        """What serves in place of a row's plan that was measured by a version of agmm which did not
        have it."""


class GatherPlans:
    """The plans of an all-gather -> matmul."""

    def __init__(self, problem: Problem, kernels_of: KernelsOf, _: Callable[[Problem], Plan]):
        self.why_unfused: str | None = None
        self.kernels: Sequence[KernelConfig] = ()
        if problem.gpu != CPU:
            self.why_unfused = why_unfused(problem.format, problem.n, problem.k)
            if self.why_unfused is None:
                self.kernels = gather_kernels(problem, kernels_of)
        self._search = Search(problem, self.kernels)
        self._behind: Search | None = None
        """The search among the kernels behind a gather, once there was one."""
        self._behind_us: list[tuple[int, float]] = []
        """The least times of these, by numbers of rows in rising order."""

    def favourite(self, here: Here, fused: bool) -> Found:
        problem = here.problem
        if problem.gpu == CPU:
            return Found(Plan(PUSH), "default of the CPU backend")
        if self.why_unfused is not None and not fused:
            return Found(UNFUSED, self.why_unfused, predict_us(problem, UNFUSED))
        best = self._fastest(here)
        if best is None:
            if fused:
                raise ValueError(
                    f"kernels: found none for {problem.format}, wanted a build with CUDA kernels"
                )
            plan, us = self._unfused(here)
            return Found(plan, NO_KERNEL, us)
        plan, us = self._unfused(here)
        margin = cost_model.choice_margin(problem, plan.family)
        if margin is not None:
            is_faster = rated_us(problem, *best) <= us * margin
        elif plan != UNFUSED:  # whose time does not vary
            is_faster = us >= best[1] * cost_model.gathered_margin(problem)
        else:
            is_large = cost_model.gathered_bytes(problem) > cost_model.STEADY_GATHER_BYTES
            varies = _GATHER_VARIES if is_large else 0.0
            is_faster = best[1] <= us + varies * cost_model.all_gather_us(problem)
        # One rank has nothing to gather: the unfused path would only copy A.
        if fused or problem.world_size == 1 or is_faster:
            return Found(best[0], "cost model", best[1])
        return Found(plan, "cost model", us)

    def alternatives(self, problem: Problem) -> list[Plan]:
        plans = [Plan(PUSH)] if problem.gpu == CPU else []
        with_swapped, with_sm_push = chooses_swapped(problem), chooses_sm_push(problem)
        for kernel in self.kernels:
            if with_swapped or not kernel.swapped:
                plans += usual_plans(problem, kernel)
        if not with_sm_push:
            plans = [plan for plan in plans if not isinstance(plan.transport, SmPush)]
        if self.why_unfused is None and GATHER.why_illegal(problem, None) is None:
            plans.append(GATHERED)
            plan = self._to_kernel(problem)
            plans += [] if plan is None else [plan]
        streamed = self._streamed(problem)
        return [*plans, *([] if streamed is None else [streamed]), UNFUSED]

    def kernels_for(self, plan: Plan) -> Sequence[KernelConfig]:
        return self.kernels

    def likeness(self, plan: Plan) -> Hashable:
        return plan.gathers_first, plan.kernel is None

    def instead_of(self, here: Here, row: Row) -> Found | None:
        if row.plan != UNFUSED or not row.agmm.startswith(_WITHOUT_GATHER):
            return None
        plan, us = self._unfused(here)
        return Found(plan, "cost model", us) if plan != UNFUSED else None

    def _fastest(self, here: Here) -> tuple[Plan, float] | None:
        if here.fastest is None:
            here.fastest = (self._search.fastest(here.at),)
        return here.fastest[0]

    def _streamed(self, problem: Problem) -> Plan | None:
        is_asked = self.kernels and chooses_streamed(problem)
        return streamed_plan(problem, self.kernels) if is_asked else None

    def _unfused(self, here: Here) -> tuple[Plan, float]:
        """The fastest of the plans with a matmul of all rows, and its time by the cost model."""
        problem = here.problem
        if here.unfused is None:
            alone_us = cost_model.matmul_us(problem)
            timed = [(UNFUSED, cost_model.unfused_us(problem, alone_us))]
            is_gathered = GATHER.why_illegal(problem, None) is None
            if is_gathered:
                timed.append((GATHERED, cost_model.gathered_us(problem, None, alone_us)))
            streamed = self._streamed(problem)
            if streamed is not None:
                timed.append((streamed, predict_us(problem, streamed) or 0.0))
            rated = [rated_us(problem, *one) for one in timed]
            least_us = min(rated)
            own = self._faster_to_kernel(here, least_us) if is_gathered else None
            here.unfused = own or timed[rated.index(least_us)]
        return here.unfused

    def _faster_to_kernel(self, here: Here, least_us: float) -> tuple[Plan, float] | None:
        """A gather before a kernel, and its time by the cost model, where it is rated as faster
        than ``least_us`` and the fastest fused plan. It is looked for only where a kernel that
        loses nothing to its tiles would be: to look takes as long as all else."""
        problem, fastest = here.problem, self._fastest(here)
        margin = cost_model.margin_of(problem, GATHERED_TO_KERNEL)
        if margin is None or problem.epilogue != PLAIN:
            return None
        if fastest is not None:
            least_us = min(least_us, rated_us(problem, *fastest))
        gather_us = cost_model.before_kernel_us(problem)
        most_us = least_us / margin - gather_us
        known = self._behind_us
        here_at = bisect_right(known, (problem.m, inf))
        is_slower = here_at and known[here_at - 1][1] >= most_us  # more rows take no less
        if is_slower or cost_model.least_behind_us(problem) >= most_us:
            return None
        found = self._search_behind(problem)
        if found is None:
            return None
        if len(known) < _MOST_KNOWN:
            known.insert(here_at, (problem.m, found[1]))
        is_fastest = found[1] < most_us
        return (Plan(GATHER, found[0].kernel), gather_us + found[1]) if is_fastest else None

    def _to_kernel(self, problem: Problem) -> Plan | None:
        """The plan of agmm's gather, which is legal, before the fastest kernel; None where there is
        none, and where nobody has compared such plans with others: they are left to tables then."""
        is_known = cost_model.margin_of(problem, GATHERED_TO_KERNEL) is not None
        if problem.epilogue != PLAIN or not is_known:
            return None
        found = self._search_behind(problem)
        return None if found is None else Plan(GATHER, found[0].kernel)

    def _search_behind(self, problem: Problem) -> tuple[Plan, float] | None:
        """The plan of the fastest kernel for all rows on one rank, and its time."""
        multiplied = cost_model.behind_gather(problem)
        if self._behind is None:
            self._behind = Search(multiplied, self.kernels)
        return self._behind.fastest(At(multiplied))


class ScatterPlans:
    """The plans of a matmul + reduce-scatter."""

    def __init__(self, problem: Problem, kernels_of: KernelsOf, _: Callable[[Problem], Plan]):
        self.kernels = kernels_of(problem.op, problem.format)
        self._kernels_of, self._format = kernels_of, problem.format

    def favourite(self, here: Here, fused: bool) -> Found:
        problem = here.problem
        plans = self.alternatives(problem)
        legal = [plan for plan in plans if not (fused and plan == UNFUSED)]
        if not legal:
            raise ValueError(f"plan: found no fused one of {problem.op}, wanted unfused ones too")
        if problem.gpu == CPU:
            return Found(legal[0], "default of the CPU backend")
        if not has_model(problem):
            return Found(UNFUSED, "cost model")
        own = [plan for plan in legal if plan.kernel is not None]
        is_fused = BY_TORCH in legal and cost_model.is_reduce_scatter_fused(problem)
        others = [BY_TORCH if is_fused or (fused and not own) else UNFUSED]
        rated = own if fused and own else [*own, *others]
        timed = [(plan, predict_us(problem, plan) or 0.0) for plan in rated]
        plan, us = min(timed, key=lambda pair: rated_us(problem, *pair))
        return Found(plan, "cost model", us)

    def alternatives(self, problem: Problem) -> list[Plan]:
        plans = scatter_plans(problem, self.kernels)
        if problem.gpu == CPU or not has_model(problem) or not chooses_streamed(problem):
            return plans
        streamed = streamed_plan(problem, self._kernels_of(ALL_GATHER_MATMUL, problem.format))
        return plans if streamed is None else [streamed, *plans]

    def kernels_for(self, plan: Plan) -> Sequence[KernelConfig]:
        if plan.transport == STREAMED:
            return self._kernels_of(ALL_GATHER_MATMUL, self._format)
        return self.kernels

    def likeness(self, plan: Plan) -> Hashable:
        return plan.transport

    def instead_of(self, here: Here, row: Row) -> Found | None:
        return None


class AllReducePlans:
    """The plans of a matmul + all-reduce, of so many rows that the ranks can share them."""

    def __init__(
        self, problem: Problem, kernels_of: KernelsOf, fused_plan: Callable[[Problem], Plan]
    ):
        self.kernels = kernels_of(problem.op, problem.format)
        self.of_scatter = kernels_of(MATMUL_REDUCE_SCATTER, problem.format)
        self._fused_plan = fused_plan

    def favourite(self, here: Here, fused: bool) -> Found:
        """The first of the unfused plan, the one that scatters and the lagged one, or a later one
        that is predicted to take less than `Transport.gain` of its time; UNFUSED where there is no
        other, even if ``fused``."""
        problem = here.problem
        if problem.gpu == CPU:
            return Found(Plan(PUSH), "default of the CPU backend")
        reason = why_unfused(problem.format, problem.n, problem.k, a="A")
        found = Found(UNFUSED, reason or "cost model", predict_us(problem, UNFUSED))
        for plan in (self._scatter(problem), self._lagged(problem)):
            us = None if plan is None else predict_us(problem, plan)
            if plan is None or us is None:
                continue
            gain = plan.transport.gain(problem.world_size)
            is_first = fused and found.plan == UNFUSED
            if is_first or found.us is None or us < gain * found.us:
                found = Found(plan, "cost model", us)
        return found

    def alternatives(self, problem: Problem) -> list[Plan]:
        if problem.gpu == CPU:
            return [Plan(PUSH), UNFUSED]
        plans = self._scatter(problem), self._lagged(problem), UNFUSED
        return [plan for plan in plans if plan is not None]

    def kernels_for(self, plan: Plan) -> Sequence[KernelConfig]:
        return self.of_scatter if plan.transport == SCATTER else self.kernels

    def likeness(self, plan: Plan) -> Hashable:
        return plan.transport

    def instead_of(self, here: Here, row: Row) -> Found | None:
        return None

    def _scatter(self, problem: Problem) -> Plan | None:
        """The plan that scatters by the kernel that a matmul + reduce-scatter has, and then
        gathers; None where there is none."""
        of_scatter = replace(problem, op=MATMUL_REDUCE_SCATTER)
        plans = scatter_plans(of_scatter, self.of_scatter)
        own = [plan for plan in plans if plan.kernel is not None]
        if not SCATTER.serves(problem) or not own:
            return None
        plan = self._fused_plan(of_scatter)
        if plan.transport == STREAMED:  # which has no gather behind it
            plan = min(own, key=lambda one: predict_us(of_scatter, one) or 0.0)
        return None if plan.kernel is None else Plan(SCATTER, plan.kernel)

    def _lagged(self, problem: Problem) -> Plan | None:
        if not LAGGED.serves(problem):
            return None
        plans = lagged_plans(problem, self.kernels)
        return min(plans, key=lambda plan: predict_us(problem, plan) or 0.0, default=None)


OP_PLANS: dict[str, Callable[[Problem, KernelsOf, Callable[[Problem], Plan]], OpPlans]] = {
    ALL_GATHER_MATMUL: GatherPlans,
    MATMUL_REDUCE_SCATTER: ScatterPlans,
    MATMUL_ALL_REDUCE: AllReducePlans,
}
"""The classes by op. They take any problem of the family, the kernels, and a function that says the
fused plan of another problem."""
