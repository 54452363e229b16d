"""Which plan the next call of a kind takes while its group learns, and which plan it keeps.

Everything here follows from the number of calls and from what all ranks have told each other, so
ranks that make the same calls decide the same. This module needs no GPU and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import NamedTuple, Protocol

from agmm.planning.heuristics import chunkings
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_LIBRARY, BY_TORCH, UNFUSED, Plan
from agmm.planning.problems import ALL_GATHER_MATMUL, CPU, Problem

# Choices: the issue of each is how many calls may be spent on plans that are not the best.
MOST_PLANS = 5
MOST_TRIES = 28
MOST_ROUNDS = 6
MOST_OVER_BEST = 1.5
"""No plan is tried that is predicted to take longer than this many times the best one."""
MOST_OVERHEAD = 1.10
"""The plans that are tried take on average at most this many times as long as the model's plan, by
their predicted times."""
FIRST_ROUNDS = 2
"""The rounds of all plans, of which the first is no sample. What is left then goes on."""
NEAR = 1.08
"""Plans go on that take at most so many times as long as the best in these rounds, and the model's.
Replayed on what 1,565 drawn shapes took between two H200, with 1.5% of noise and spikes, the first
30 calls take 1.11 of as many by the model's plan at most, 1.39 where all plans go on; what is kept
is as fast (`benchmarks/replay_learning.py`)."""
PASSED = 2
"""Calls by the model's plan between the last try and an agreement, in which a GPU catches up."""
POSTPONED_BY = 8
MOST_POSTPONED = 6
"""An agreement before whose time a GPU has not come to the last try is made after so many further
calls, then after twice as many, and so on, so often."""
WORTH = 0.995
"""A plan takes the place of the model's where it takes less than this share of its time."""


class Reading(Protocol):
    """The time of one call, which may become known later."""

    def us(self) -> float | None:
        """The time in µs; None while it is not known."""


class Report(NamedTuple):
    """What a rank tells the others."""

    problems: list[str]
    """What was asked of the planner, in words."""
    us: list[float | None] | None
    """The median of each plan, None for a plan that has none; None while times are missing."""


def candidates(planner: Planner, problem: Problem, *, one_kernel: bool = True) -> list[Plan]:
    """The plans that are worth a try, the one that is taken without learning first.

    Args:
        one_kernel: whether one kernel serves the call; else the kernels of a fused plan are chosen
            for each weight, and only one plan stands for all of them.
    """
    first = planner.plan(problem)
    if problem.gpu == CPU:
        plans = [UNFUSED]
        if problem.op == ALL_GATHER_MATMUL:
            plans = [*chunkings(problem), UNFUSED]
        else:
            plans = [plan for plan, _ in planner.alternatives(problem)]
        return list(dict.fromkeys([first, *plans]))[:MOST_PLANS]
    timed = {plan: us for plan, us in planner.alternatives(problem) if us is not None}
    first_us = planner.choose(problem).predicted_us
    if first_us is None:
        return [first]
    if not one_kernel:
        fused = planner.fused_plan(problem) if first.gathers_first else first
        timed = {plan: us for plan, us in timed.items() if plan in (*BY_LIBRARY, fused, first)}
    timed.pop(BY_TORCH, None)  # it costs the host more, which times on a GPU do not show
    limit_us = MOST_OVER_BEST * min([first_us, *timed.values()])
    others = [plan for plan, us in timed.items() if us <= limit_us and plan != first]
    found, spent = [first], 1.0
    for plan in _one_of_each_way_first(first, others):
        more = max(1.0, timed[plan] / first_us)
        if len(found) < MOST_PLANS and (spent + more) / (len(found) + 1) <= MOST_OVERHEAD:
            found.append(plan)
            spent += more
    return found


def _one_of_each_way_first(first: Plan, plans: Sequence[Plan]) -> list[Plan]:
    """The plans in order, before them the first of each way that data moves: predictions of
    different ways are compared with the least certainty."""
    seen, ahead = {type(first.transport)}, []
    for plan in plans:
        if type(plan.transport) not in seen:
            seen.add(type(plan.transport))
            ahead.append(plan)
    return [*ahead, *(plan for plan in plans if plan not in ahead)]


def kind_of(problem: Problem) -> Problem:
    """What calls have in common that are counted together. On the CPU ranks may have a K and a
    layout of their own where products are summed, and must count alike."""
    if problem.gpu == CPU and problem.op != ALL_GATHER_MATMUL:
        return replace(problem, k=1, b_layout="column")
    return problem


@dataclass
class Study:
    """The calls of one kind in one group, and what is learnt from them.

    ``plans`` has the plans to try, the model's own first. ``kept`` is what the ranks have agreed
    on, None before, and ``us`` its time; ``times`` has those of all plans, None for one that has
    none. Times are the largest over the ranks.
    """

    problem: Problem
    plans: Sequence[Plan]
    calls: int = 0
    """The calls that were made, by a tried plan or between the last try and the agreement."""
    kept: Plan | None = None
    us: float | None = None
    times: Sequence[float | None] = ()
    reason: str = ""
    """Why the model's plan stays without a comparison."""
    readings: dict[int, list[Reading]] = field(default_factory=dict)
    _postponed: int = 0
    _turns: Sequence[int] = ()
    """Which plans calls take in turn, from the call `_begin` on."""
    _begin: int = 0
    _tries_all: bool = True
    """Whether no plan has been dropped yet, nor looked at."""
    _agree_at: int = 0
    _problems: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._take_turns(range(len(self.plans)), FIRST_ROUNDS)
        if len(self.plans) < 2:
            self.kept, self.reason = self.plans[0], "there is no other plan to try"

    def _take_turns(self, plans: Sequence[int], rounds: int) -> None:
        self._turns, self._begin = [*plans] * rounds, self.calls
        self._agree_at = self.calls + len(self._turns) + PASSED

    @property
    def is_open(self) -> bool:
        return self.kept is None

    @property
    def is_due(self) -> bool:
        """Whether the ranks are to agree before the next call."""
        return self.is_open and self.calls >= self._agree_at

    @property
    def tried(self) -> int | None:
        """Which of the plans the next call tries; None for none, and the model's plan."""
        turn = self.calls - self._begin
        return self._turns[turn] if turn < len(self._turns) else None

    def note(self, reading: Reading | None, problem: Problem) -> None:
        """Count a call that was made by `tried`. ``reading`` is None where the plan did not serve
        it."""
        index = self.tried
        if reading is not None and index is not None and self.calls >= len(self.plans):
            self.readings.setdefault(index, []).append(reading)
        if len(self._problems) < 2:
            self._problems.add(f"k={problem.k}, b_layout={problem.b_layout}")
        self.calls += 1

    def report(self) -> Report:
        """What this rank tells when the agreement is due."""
        medians: list[float | None] = []
        for index in range(len(self.plans)):
            taken = [reading.us() for reading in self.readings.get(index, ())]
            known = [us for us in taken if us is not None]
            if len(known) < len(taken):
                return Report(sorted(self._problems), None)
            medians.append(median(known) if known else None)
        return Report(sorted(self._problems), medians)

    def agree(self, reports: Sequence[Report]) -> None:
        """Decide by what all ranks have told, the same on each of them."""
        first = reports[0].problems
        if len(first) != 1 or any(report.problems != first for report in reports):
            self._stay("its ranks differ in K or in the layout of B")
            return
        if any(report.us is None for report in reports):
            self._agree_at = self.calls + (POSTPONED_BY << self._postponed)
            self._postponed += 1
            if self._postponed > MOST_POSTPONED:
                self._stay("the times of its calls did not come")
            return
        of_ranks = zip(*(report.us for report in reports if report.us is not None), strict=True)
        times = [_largest(of_plan) for of_plan in of_ranks]
        taking_turns = set(self._turns)
        known = {
            index: us for index, us in enumerate(times) if us is not None and index in taking_turns
        }
        if not known:
            self._stay("no plan has served its calls")
            return
        best = min(known, key=lambda index: known[index])
        self.times = times
        if self._tries_all and self._goes_on(known, known[best]):
            return
        if known[best] >= WORTH * known.get(0, inf):
            best = 0
        self.kept, self.us = self.plans[best], known[best]
        self.readings.clear()

    def _goes_on(self, known: Mapping[int, float], least_us: float) -> bool:
        """Whether plans are as good as alike after the first rounds, which take turns then."""
        self._tries_all = False
        near = [index for index, us in known.items() if index == 0 or us <= NEAR * least_us]
        if len(near) < 2:
            return False
        left = MOST_TRIES - FIRST_ROUNDS * len(self.plans) - PASSED
        self._take_turns(near, max(1, min(MOST_ROUNDS, left // len(near))))
        return True

    def _stay(self, reason: str) -> None:
        self.kept, self.reason = self.plans[0], reason
        self.readings.clear()


def _largest(us: Sequence[float | None]) -> float | None:
    """The time of a plan on the slowest rank; None where a rank has none."""
    known = [one for one in us if one is not None]
    return max(known) if len(known) == len(us) else None
