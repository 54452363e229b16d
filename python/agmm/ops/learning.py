"""`agmm.learn_plans`: the first calls of a kind try a few plans, and the fastest is kept.

`studies` decides, `call_times` times. Here the ranks of a group tell each other what they have
timed, and what they agree on goes to the group's planner and to the user's table.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, warn_once
from agmm.planning import call_plans, studies, tables
from agmm.planning.planner import Planner
from agmm.planning.plans import UNFUSED, Plan, Row
from agmm.planning.problems import Problem
from agmm.planning.studies import Report, Study
from agmm.planning.tables import Key, TableError
from agmm.runtime import call_times, groups
from agmm.runtime.callers import is_in_compiled_graph

MOST_STUDIES = 1024
"""The kinds of calls that a group learns about, and of which `agmm.status` tells."""

_LEAST_US = 0.01
"""The shortest time that a row of a table can say."""

reported: dict[int, Study] = {}
"""The studies of this process, by their numbers in the order of their first calls."""


def learn_plans(on: bool = True) -> None:
    """Groups learn plans from the calls that a program makes, or no longer do.

    The first calls of a kind (op, format, shapes, layout of B, ``return_A``) that no table knows
    take the cost model's best few plans in turn, the same on all ranks. After two calls by each
    the ranks drop those that are far behind, and after 6 to 30 they agree on the plan whose median
    time is the shortest on the slowest rank; it serves the kind from then on and is kept in the
    user's table, as ``agmm tune`` keeps its own (``AGMM_CACHE=off``: in this process only). Call it
    on all ranks before a group's first call: a group decides at its first planned call whether it
    learns, and does so to its end. ``AGMM_LEARN=on`` does the same. No plan is tried that is
    predicted to take more than 1.5 times as long as the best one. `agmm.status` tells what was
    tried and kept.

    Another plan may round otherwise, so the first calls of a kind do not all have the same bits.
    Calls under ``strict``, those that name a ``config``, and those that a CUDA graph captures or a
    compiled graph makes try nothing, and take what is known by then.

    Args:
        on: whether groups that make their first planned call from now on learn plans.

    Raises:
        InvalidArgument: ``on`` is no bool.
    """
    if on is not True and on is not False:
        raise InvalidArgument(f"on: found {on!r}, wanted True or False")
    others = call_plans.set_learning(on)
    if others:
        what = "learn no plans" if on else "go on learning plans"
        warn_once(
            f"agmm.learn_plans: {others} groups {what}, since they have made planned calls "
            "before; wanted it called before their first"
        )


class Trial:
    """One call that is made by a plan of a study."""

    def __init__(self, study: Study, problem: Problem, plan: Plan, of: Learner) -> None:
        self.plan = plan
        self._study, self._problem, self._of = study, problem, of
        self._is_missed = study.tried is None
        self._is_counted = False

    def miss(self) -> None:
        """Say that the plan does not serve the call: its time says nothing of the plan."""
        self._is_missed = True

    def run(self, compute: Callable[..., Any], *operands: Any) -> Any:
        """Time a call, and count it once it is one for the other ranks, too: a call that raises
        before it has begun is made again by the same plan."""
        reading = call_times.begin(self._of.device, self.plan.name)
        before = self._of.calls
        try:
            found = compute(*operands)
        except BaseException:
            # On a GPU nothing was enqueued; on the CPU a call goes on to its end if it has begun.
            if self._of.device.type == "cpu" and self._of.calls > before:
                self._count(None)
            raise
        reading.end()
        self._count(None if self._is_missed else reading)
        return found

    def _count(self, reading: call_times.Reading | None) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._study.note(reading, self._problem)


class Next(NamedTuple):
    """How the next call of a kind is made."""

    trial: Trial | None
    """None where it takes what the planner says, and counts for nothing."""
    is_settled: bool
    """Whether later calls take the same plan."""


class Learner:
    """What a group learns on one kind of device."""

    def __init__(self, group: dist.ProcessGroup, planner: Planner, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self._planner = planner
        self.device = device
        self._studies: dict[Problem, Study] = {}

    @property
    def calls(self) -> int:
        """How many calls the group has begun on the CPU."""
        return self._known.calls

    @property
    def _known(self) -> groups.Group:
        group = self._group()
        assert group is not None  # a call of it is being made
        return groups.of(group)

    def next(self, problem: Problem, one_kernel: bool) -> Next:
        """How the next call is made. Collective where the ranks are to agree."""
        kind = studies.kind_of(problem)
        study = self._studies.get(kind)
        if study is not None and not study.is_open:
            return Next(None, True)
        if self._is_recorded():
            return Next(None, False)
        if study is None:
            if len(self._studies) >= MOST_STUDIES:
                return Next(None, True)
            study = self._studies[kind] = self._new_study(problem, one_kernel)
        if study.is_due:
            self._agree(study)
        if not study.is_open:
            return Next(None, True)
        tried = study.tried
        plan = self._planner.plan(problem) if tried is None else study.plans[tried]
        return Next(Trial(study, problem, plan, self), False)

    def _is_recorded(self) -> bool:
        """Whether a graph makes the call, or captures it, as often as each rank likes."""
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return is_captured or is_in_compiled_graph()

    def _new_study(self, problem: Problem, one_kernel: bool) -> Study:
        choice = self._planner.choose(problem)
        plans = [choice.plan]
        if choice.row is None:
            plans = studies.candidates(self._planner, problem, one_kernel=one_kernel)
        study = Study(problem, plans)
        if study.is_open and len(reported) < MOST_STUDIES:
            reported[len(reported)] = study
        return study

    def _agree(self, study: Study) -> None:
        problem = study.problem
        sizes = f"M={problem.m}, N={problem.n}"
        topic = f"how long the plans of {problem.op} took, {sizes}, {problem.format}"
        told = self._known.exchange(topic, json.dumps(study.report()))
        study.agree([Report(*json.loads(one)) for one in told])
        if study.is_open or study.us is None:
            return
        assert study.kept is not None
        times = dict(zip(study.plans, study.times, strict=True))
        row = Row(
            problem.m,
            study.kept,
            max(_LEAST_US, study.us),
            unfused_us=times.get(UNFUSED),
            agmm=f"{version('agmm')}, learnt",
        )
        self._planner.learn(problem, row)
        if self._known.rank == 0:
            self._save(problem, row)

    def _save(self, problem: Problem, row: Row) -> None:
        try:
            if tables.user_folder() is not None:
                tables.save(problem.gpu, problem.world_size, [(Key.of(problem), row)])
        except TableError as error:
            warn_once(f"agmm keeps what it has learnt in this process only: {error}")


_learners: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Planner, Learner]]
_learners = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup, planner: Planner, device: torch.device) -> Learner:
    """What a group learns for one of its planners."""
    by_planner = _learners.setdefault(group, {})
    found = by_planner.get(planner)
    if found is None:
        found = by_planner[planner] = Learner(group, planner, device)
    return found
