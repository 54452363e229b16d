"""Plans a problem: how one call is computed. This module needs no GPU and no torch.

A plan comes from the first of these that knows the problem: the user's table, the packaged table
(`agmm.planning.tables`), the cost model (`agmm.planning.cost_model`). `Planner.choose` has the rule
for an M between two tuned ones; `op_plans` has what differs between ops.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import log
from statistics import fmean

from agmm.planning.op_plans import OP_PLANS, Choice, Found, Here, KernelsOf, OpPlans, rated_us
from agmm.planning.plans import Plan, Row
from agmm.planning.predictions import has_model, predict_us
from agmm.planning.problems import Problem
from agmm.planning.tuned_rows import Rows, TunedRow, TunedRows

_MAX_PLANS = 4096
_MAX_FAMILIES = 512
"""The most that a planner remembers: plans, and problems that differ in more than M."""


class _Family:
    """The facts that a planner has about all problems that differ in M alone."""

    def __init__(self, planner: Planner, problem: Problem) -> None:
        make = OP_PLANS[problem.op]
        self.plans: OpPlans = make(problem, planner.kernels_of, planner.fused_plan)
        twin = replace(problem, return_A=not problem.return_A)
        self.rows = [
            TunedRows(problem, tuned, planner.tables, self.plans.kernels_for, planner.warn)
            for tuned in (problem, twin)
        ]
        """The rows that were tuned for the problem, and for the one that differs in return_A."""


class _Look(Here):
    """A problem that a planner looks at, and what it has found for it."""

    def __init__(self, family: _Family, problem: Problem) -> None:
        super().__init__(problem)
        self.family = family
        self._of_rows: dict[int, tuple[Plan, float]] = {}
        self.between: tuple[list[TunedRow], Found, Found] | None = None
        """The last choice between rows: these, the model's favourite, and what was found."""

    def of_row(self, tuned: TunedRow) -> tuple[Plan, float]:
        found = self._of_rows.get(id(tuned))
        if found is None:
            found = self._of_rows[id(tuned)] = tuned.here(self.at)
        return found


class Planner:
    """Chooses plans for one build and remembers them.

    Args:
        kernels_of: the kernels to choose from by op and format, in any order and raster; those of a
            "matmul_reduce_scatter" send tiles, those of a "matmul_all_reduce" finished ones too.
        tables: the tables to look into; of two rows for one problem the first table's counts.
        learns: whether the ranks that it plans for learn plans while they run.
    """

    def __init__(
        self, kernels_of: KernelsOf, tables: Sequence[Rows] = (), *, learns: bool = False
    ) -> None:
        self.learns = learns
        self._learnt: dict[Problem, Row] = {}
        self.kernels_of = kernels_of
        self.tables = tuple(tables)
        self._warned: set[str] = set()
        self._plan = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, False).plan)
        self._fused = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, True).plan)
        self._family = lru_cache(_MAX_FAMILIES)(lambda problem: _Family(self, problem))
        self._last: _Look | None = None

    def plan(self, problem: Problem) -> Plan:
        """`choose(problem).plan`, remembered."""
        return self._plan(problem)

    def fused_plan(self, problem: Problem) -> Plan:
        """The best fused plan of a GPU problem, remembered. A "matmul_all_reduce" without one has
        the unfused plan.

        Raises:
            ValueError: there is no kernel to choose from.
        """
        return self._fused(problem)

    def choose(self, problem: Problem, *, fused: bool = False) -> Choice:
        """The plan for a problem of any op and format.

        A row of exactly this problem decides, or else one that differs in ``return_A`` alone. Else
        the nearest rows below and above count, each at most 4 times away in M. Each plan is rated
        by the cost model's time at this M, times what its row measured over what the model says
        there. The model's own favourite, where it is none of these, takes part at the mean of these
        ratios: of the rows whose plans are like it (`OpPlans.likeness`), or of all where there is
        none. The order of tiles is the usual one, and so is SM push where shards end inside tiles.
        Where there is no model, the row nearest in M decides as it is (of two equally near the one
        above). Without any such row those of the problem that differs in ``return_A`` count in the
        same way, and without these it is the model's favourite. Rows whose plan this build cannot
        run are passed over, with one warning per reason.

        Args:
            fused: leave the unfused plan out.

        Raises:
            ValueError: ``fused``, and there is no kernel to choose from.
        """
        found = self._find(problem, fused)
        return Choice(found.plan, found.source, predict_us(problem, found.plan), found.row)

    def learn(self, problem: Problem, row: Row) -> None:
        """From now on the row decides for exactly this problem."""
        self._learnt[problem] = row
        self._plan.cache_clear()
        self._fused.cache_clear()

    def alternatives(self, problem: Problem) -> list[tuple[Plan, float | None]]:
        """The plans that the cost model chooses among, with predicted µs, fastest first."""
        plans = self._family_of(problem).plans.alternatives(problem)
        timed = [(plan, predict_us(problem, plan)) for plan in plans]
        return sorted(timed, key=lambda pair: (pair[1] is None, pair[1] or 0.0))

    def warn(self, message: str, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(message, stacklevel=2)

    def _family_of(self, problem: Problem) -> _Family:
        return self._family(replace(problem, m=1))

    def _find(self, problem: Problem, fused: bool) -> Found:
        learnt = self._learnt.get(problem)
        if learnt is not None and not (fused and learnt.plan.gathers_first):
            return Found(learnt.plan, "learnt while running", None, learnt)
        look = self._last
        if look is None or look.problem != problem:
            look = self._last = _Look(self._family_of(problem), problem)
        family = look.family
        # Unfused A costs nothing: what is the fastest with it need not be so without.
        fused_of_twin = fused or not problem.return_A
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            tuned = family.rows[which].usable(look.at, problem.m, only_fused)
            if tuned is not None:
                other = family.plans.instead_of(look, tuned.row)
                if other is not None:
                    return other._replace(source=f"{other.source}, against what was {tuned.source}")
                own_row = tuned.row if which == 0 else None
                return Found(tuned.row.plan, tuned.source, None, own_row)
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            near = family.rows[which].near(look.at, only_fused)
            if near:
                return self._choose_between_rows(look, near, fused)
        return family.plans.favourite(look, fused)

    def _choose_between_rows(self, look: _Look, near: list[TunedRow], fused: bool) -> Found:
        """The plan that the rows of other M lead to."""
        problem, plans = look.problem, look.family.plans
        words = " and ".join(f"M={tuned.row.m}" for tuned in near)
        source = f"tuned at {words} ({near[-1].source})"
        if not has_model(problem):
            nearest = min(reversed(near), key=lambda tuned: abs(log(tuned.row.m / problem.m)))
            return Found(nearest.row.plan, source)
        favourite = plans.favourite(look, fused)
        if look.between is not None:
            before, of, found = look.between
            if before == near and of == favourite:
                return found
        rated: list[tuple[float, Plan]] = []
        ratios: list[tuple[object, float]] = []
        for tuned in near:
            plan_here, here_us = look.of_row(tuned)
            there_us = tuned.there_us(problem)
            assert there_us is not None
            measured = tuned.row.us / there_us
            if plan_here.transport != tuned.row.plan.transport:
                measured = max(1.0, measured)  # it says little of another plan
            ratios.append((plans.likeness(tuned.row.plan), measured))
            rated.append((rated_us(problem, plan_here, here_us) * measured, plan_here))
        assert favourite.us is not None
        best_us, best = min(rated, key=lambda pair: pair[0])
        alike = [ratio for of, ratio in ratios if of == plans.likeness(favourite.plan)]
        mean = fmean(alike or [ratio for _, ratio in ratios])
        is_theirs = any(favourite.plan == plan for _, plan in rated)
        found = Found(best, source)
        if not is_theirs and rated_us(problem, favourite.plan, favourite.us) * mean < best_us:
            found = favourite._replace(source=f"cost model, against what was {source}")
        look.between = near, favourite, found
        return found
