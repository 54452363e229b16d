"""Problem -> plan: how one call is computed. Needs no GPU and no torch.

A plan comes from the first of these that knows the problem: the user's table, the packaged table
(`agmm.planning.tables`), the cost model (`agmm.planning.cost_model`). `Planner.choose` has the rule
for an M between two tuned ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import log
from statistics import fmean

from agmm.planning import cost_model, fp8_kernels
from agmm.planning.choices import Choice, Found, scatter_favourite
from agmm.planning.cost_model import At
from agmm.planning.heuristics import (
    chooses_swapped,
    has_model,
    predict_us,
    scatter_plans,
    usual_plans,
    usual_scatter_order,
)
from agmm.planning.legality import why_scatter_illegal, why_unfused
from agmm.planning.plans import (
    CPU,
    GATHERED,
    MATMUL_REDUCE_SCATTER,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    Row,
)
from agmm.planning.search import Search
from agmm.planning.tuned_rows import Rows, TunedRow, TunedRows, near_in_m

_MAX_PLANS = 4096
_MAX_FAMILIES = 512
"""What a planner remembers: plans, and problems that differ in more than M."""

_WITHOUT_GATHER = "0.1."
"""Versions of agmm whose unfused plan had only the library's gather to take."""

_GATHER_VARIES = 0.2
"""The model takes the unfused plan where the fused ones take longer than it by more than so much of
its all-gather: that of more than `cost_model.STEADY_GATHER_BYTES` varies from run to run."""


class _Family:
    """What a planner knows of all problems that differ in M alone."""

    def __init__(self, planner: Planner, problem: Problem) -> None:
        self.why_unfused: str | None = None
        kernels: Sequence[KernelConfig] = ()
        if problem.gpu != CPU:
            self.why_unfused = why_unfused(problem.dtype, problem.n, problem.k)
            kernels = planner.kernels if self.why_unfused is None else ()
        self.search = Search(problem, kernels)
        twin = problem._replace(return_A=not problem.return_A)
        self.rows = [
            TunedRows(problem, tuned, planner.tables, planner.kernels, planner.warn)
            for tuned in (problem, twin)
        ]
        """What was tuned for the problem, and for the one that differs in return_A."""


class _Here:
    """A problem under a planner's eyes; what the choices for it share is worked out once."""

    def __init__(self, family: _Family, problem: Problem) -> None:
        self.family = family
        self.problem = problem
        self.at = At(problem)
        self._fastest: tuple[tuple[Plan, float] | None] | None = None
        self._unfused: tuple[Plan, float] | None = None
        self._of_rows: dict[int, tuple[Plan, float]] = {}
        self.between: tuple[list[TunedRow], Found, Found] | None = None
        """The last choice between rows: these, the model's favourite, and what was found."""

    def fastest(self) -> tuple[Plan, float] | None:
        if self._fastest is None:
            self._fastest = (self.family.search.fastest(self.at),)
        return self._fastest[0]

    def of_row(self, kept: TunedRow) -> tuple[Plan, float]:
        found = self._of_rows.get(id(kept))
        if found is None:
            found = self._of_rows[id(kept)] = kept.here(self.at)
        return found

    def unfused(self) -> tuple[Plan, float]:
        """The faster of the plans with the library's matmul, and its time by the cost model."""
        if self._unfused is None:
            self._unfused = UNFUSED, cost_model.unfused_us(self.problem)
            if cost_model.why_not_gathered(self.problem) is None:
                gathered_us = cost_model.gathered_us(self.problem)
                if gathered_us < self._unfused[1]:
                    self._unfused = GATHERED, gathered_us
        return self._unfused


class Planner:
    """Chooses plans for one build and remembers them.

    Args:
        kernels: the kernels to choose from, in any order and raster.
        tables: the tables to look into; of two rows for one problem the first table's counts.
        scatter_kernels: those that send tiles, for "matmul_reduce_scatter".
    """

    def __init__(
        self,
        kernels: Sequence[KernelConfig],
        tables: Sequence[Rows] = (),
        scatter_kernels: Sequence[KernelConfig] = (),
    ) -> None:
        self.kernels = tuple(kernels)
        self.scatter_kernels = tuple(scatter_kernels)
        self.tables = tuple(tables)
        self._warned: set[str] = set()
        self._plan = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, False).plan)
        self._fused = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, True).plan)
        self._family = lru_cache(_MAX_FAMILIES)(lambda key: _Family(self, Problem(1, *key)))
        self._last: _Here | None = None

    def plan(self, problem: Problem) -> Plan:
        """`choose(problem).plan`, remembered."""
        return self._plan(problem)

    def fused_plan(self, problem: Problem) -> Plan:
        """The best fused plan of a GPU problem, remembered.

        Raises:
            ValueError: there is no kernel to choose from.
        """
        return self._fused(problem)

    def choose(self, problem: Problem, *, fused: bool = False) -> Choice:
        """The plan for a problem.

        A row of exactly this problem decides, or else one that differs in ``return_A`` alone. Else
        the nearest rows below and above count, each at most 4 times away in M. Each plan is rated
        by the cost model's time at this M, times what its row measured over what the model says
        there. The model's own favourite, where it is none of these, takes part at the mean of these
        ratios (of the fused rows where it is fused). The order of tiles is the usual one, and so is
        SM push where shards end inside tiles. Where there is no model, the row nearest in M decides
        as it is (of two equally near the one above). Without any such row those of the problem that
        differs in ``return_A`` count in the same way, and without these it is the model's
        favourite. Rows of "matmul_reduce_scatter" serve in the same way; the favourite counts at
        the mean of those that are carried out as it is. Of fp8 problems, which have no model, the
        row nearest in M says whether they are fused, and of the near rows' kernels the one with
        the fewest waves serves; without a row it is that of all kernels, behind a gather of all but
        swapped ones. Rows whose plan this build cannot run are passed over, with one warning per
        reason.

        Args:
            fused: leave the unfused plan out.

        Raises:
            ValueError: ``fused``, and there is no kernel to choose from.
        """
        found = self._find(problem, fused)
        return Choice(found.plan, found.source, predict_us(problem, found.plan), found.row)

    def warn(self, message: str, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(message, stacklevel=2)

    def _find(self, problem: Problem, fused: bool) -> Found:
        if problem.accumulation:
            return self._scaled(problem, fused)
        if problem.op == MATMUL_REDUCE_SCATTER:
            return self._scattered(problem, fused)
        here = self._last
        if here is None or here.problem != problem:
            here = self._last = _Here(self._family(problem[1:]), problem)
        family = here.family
        # Unfused A costs nothing: what is the fastest with it need not be so without.
        fused_of_twin = fused or not problem.return_A
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            kept = family.rows[which].usable(here.at, problem.m, only_fused)
            if kept is not None:
                if kept.row.plan == UNFUSED and kept.row.agmm.startswith(_WITHOUT_GATHER):
                    plan, us = here.unfused()
                    if plan == GATHERED:
                        source = f"cost model, against what was {kept.source}"
                        return Found(plan, source, us)
                own_row = kept.row if which == 0 else None
                return Found(kept.row.plan, kept.source, None, own_row)
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            near = family.rows[which].near(here.at, only_fused)
            if near:
                return self._choose_between_rows(here, near, fused)
        return self._favourite(here, fused)

    def _choose_between_rows(self, here: _Here, near: list[TunedRow], fused: bool) -> Found:
        """What the rows of other M say."""
        problem = here.problem
        favourite = None
        if has_model(problem):
            favourite = self._favourite(here, fused)
            if here.between is not None:
                before, of, found = here.between
                if before == near and of == favourite:
                    return found
        words = " and ".join(f"M={kept.row.m}" for kept in near)
        source = f"tuned at {words} ({near[-1].source})"
        if favourite is None:
            nearest = min(reversed(near), key=lambda kept: abs(log(kept.row.m / problem.m)))
            return Found(nearest.row.plan, source)
        rated: list[tuple[float, Plan]] = []
        ratios: list[tuple[bool, float]] = []
        for kept in near:
            plan_here, here_us = here.of_row(kept)
            there_us = kept.there_us(problem)
            assert there_us is not None
            measured = kept.row.us / there_us
            if plan_here.transport != kept.row.plan.transport:
                measured = max(1.0, measured)  # it says little of another plan
            ratios.append((kept.row.plan.kernel is None, measured))
            rated.append((here_us * measured, plan_here))
        assert favourite.us is not None
        best_us, best = min(rated, key=lambda pair: pair[0])
        is_unfused = favourite.plan.kernel is None
        alike = [ratio for of_unfused, ratio in ratios if of_unfused == is_unfused]
        alike = alike or [ratio for _, ratio in ratios]
        mean = sum(alike) / len(alike)
        is_theirs = any(favourite.plan == plan for _, plan in rated)
        found = Found(best, source)
        if not is_theirs and favourite.us * mean < best_us:
            found = favourite._replace(source=f"cost model, against what was {source}")
        here.between = near, favourite, found
        return found

    def _scaled(self, problem: Problem, fused: bool) -> Found:
        """The plan of a problem with fp8 operands."""
        rows = self._scaled_rows(problem, fused)
        size = fp8_kernels.size_of(problem)
        if problem.m in rows:
            name, row = rows[problem.m]
            kernel = row.plan.kernel
            if kernel is None or fp8_kernels.fits(kernel, *size):
                return Found(row.plan, name, None, row)
        source, near = (
            "whole waves",
            sorted(near_in_m(problem.m, rows), key=lambda m: (abs(log(m / problem.m)), -m)),
        )
        if near:
            source = f"tuned at M={near[0]} ({rows[near[0]][0]})"
            if rows[near[0]][1].plan == UNFUSED:
                return Found(UNFUSED, source)
            tuned = (rows[m][1].plan.kernel for m in near)
            kernels = tuple(kernel for kernel in tuned if kernel is not None)
        else:
            kernels = fp8_kernels.predicted(problem)
        if not kernels:
            if fused:
                raise ValueError("no kernel to choose from")
            return Found(UNFUSED, "no kernel of this build serves it")
        return Found(Plan("push", fp8_kernels.choose(kernels, *size)), source)

    def _scaled_rows(self, problem: Problem, fused: bool) -> dict[int, tuple[str, Row]]:
        """Those that may serve it, with their tables' names, by M; of a problem that differs in
        ``return_A`` where there are none of its own."""
        built, serving = (
            {kernel.kernel for kernel in fp8_kernels.of_problem(each)}
            for each in (problem._replace(return_A=False), problem)
        )
        for asked in (problem, problem._replace(return_A=not problem.return_A)):
            found: dict[int, tuple[str, Row]] = {}
            for table in self.tables:
                for row in table.rows(asked):
                    kernel = row.plan.kernel
                    if row.m in found or (fused and kernel is None):
                        continue
                    if kernel is not None and kernel.kernel not in built:
                        reason = f"{kernel.kernel} for fp8, which this build has not"
                        self.warn(f"agmm passes over rows of {table.name}: {reason}", reason)
                    elif kernel is None or kernel.kernel in serving:
                        found[row.m] = table.name, row
            if found:
                return found
        return {}

    def _scattered(self, problem: Problem, fused: bool) -> Found:
        """The plan of a matmul + reduce-scatter."""
        rows = self._scatter_rows(problem, fused)
        if problem.m in rows:
            name, row = rows[problem.m]
            return Found(row.plan, name, None, row)
        near = near_in_m(problem.m, rows)
        favourite = None
        if has_model(problem) or not near:
            favourite = scatter_favourite(problem, self.scatter_kernels, fused)
        if not near:
            assert favourite is not None
            return favourite
        words = " and ".join(f"M={m}" for m in near)
        source = f"tuned at {words} ({rows[near[-1]][0]})"
        if favourite is None:
            nearest = min(reversed(near), key=lambda m: abs(log(m / problem.m)))
            return Found(rows[nearest][1].plan, source)
        rated: list[tuple[float, Plan]] = []
        ratios: list[tuple[str, float]] = []
        for m in near:
            row = rows[m][1]
            there_us = predict_us(problem._replace(m=m), row.plan)
            here = row.plan
            if here.kernel is not None:
                here = replace(here, kernel=usual_scatter_order(here.kernel))
            here_us = predict_us(problem, here)
            assert there_us is not None and here_us is not None
            ratios.append((here.transport, row.us / there_us))
            rated.append((here_us * row.us / there_us, here))
        best_us, best = min(rated, key=lambda pair: pair[0])
        alike = [ratio for transport, ratio in ratios if transport == favourite.plan.transport]
        mean = fmean(alike or [ratio for _, ratio in ratios])
        is_theirs = any(favourite.plan == plan for _, plan in rated)
        assert favourite.us is not None
        if not is_theirs and favourite.us * mean < best_us:
            return favourite._replace(source=f"cost model, against what was {source}")
        return Found(best, source)

    def _scatter_rows(self, problem: Problem, fused: bool) -> dict[int, tuple[str, Row]]:
        """Those that may serve the problem, with their tables' names, by M."""
        found: dict[int, tuple[str, Row]] = {}
        for table in self.tables:
            for row in table.rows(problem):
                if row.m in found or (fused and row.plan == UNFUSED):
                    continue
                own = problem._replace(m=row.m)
                reason = why_scatter_illegal(own, row.plan, self.scatter_kernels)
                if reason is not None:
                    self.warn(f"agmm passes over rows of {table.name}: {reason}", reason)
                elif why_scatter_illegal(problem, row.plan, self.scatter_kernels) is None:
                    found[row.m] = table.name, row
        return found

    def alternatives(self, problem: Problem) -> list[tuple[Plan, float | None]]:
        """`usual_plans` of each kernel and those with the library's matmul, or `scatter_plans`;
        with predicted µs, fastest first."""
        plans = [UNFUSED]
        if problem.op == MATMUL_REDUCE_SCATTER:
            plans = scatter_plans(problem, self.scatter_kernels)
        elif problem.gpu == CPU:
            plans.insert(0, Plan("push"))
        elif why_unfused(problem.dtype, problem.n, problem.k) is None:
            with_swapped = chooses_swapped(problem)
            kernels = [kernel for kernel in self.kernels if with_swapped or not kernel.swapped]
            plans += [plan for kernel in kernels for plan in usual_plans(problem, kernel)]
            if cost_model.why_not_gathered(problem) is None:
                plans.append(GATHERED)
        timed = [(plan, predict_us(problem, plan)) for plan in plans]
        return sorted(timed, key=lambda pair: (pair[1] is None, pair[1] or 0.0))

    def _favourite(self, here: _Here, fused: bool) -> Found:
        """What the cost model says; where it says nothing, the plain fused plan."""
        problem, family = here.problem, here.family
        if problem.gpu == CPU:
            return Found(Plan("push"), "default of the CPU backend")
        if family.why_unfused is not None and not fused:
            return Found(UNFUSED, family.why_unfused, predict_us(problem, UNFUSED))
        # One rank has nothing to gather: the unfused path would only copy A.
        fused = fused or problem.world_size == 1
        best = here.fastest()
        if best is None and fused:
            raise ValueError("kernels: found none, wanted a build with CUDA kernels")
        if best is not None:
            gathered = problem.m * problem.k * cost_model.ELEMENT_BYTES
            varies = _GATHER_VARIES if gathered > cost_model.STEADY_GATHER_BYTES else 0.0
            margin_us = varies * cost_model.all_gather_us(problem)
            unfused, unfused_us = here.unfused()
            if unfused == GATHERED:  # whose time does not vary
                is_faster = unfused_us >= best[1] * cost_model.gathered_margin(problem)
            else:
                is_faster = best[1] <= unfused_us + margin_us
            if fused or is_faster:
                return Found(best[0], "cost model", best[1])
        plan, us = here.unfused()
        return Found(plan, "cost model", us)
