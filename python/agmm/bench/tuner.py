"""`agmm tune`: measures the plans of each shape and makes rows of the fastest ones.

Per shape: the candidates that the cost model leaves are checked against the reference and timed a
few times, then all orders of the best kernels, then other chunks of the best plan's SM push, then
the best few in interleaved rounds until one is ahead of all others by more than the noise. A plan
that is in use is replaced by one that is ahead of it by more than the noise only. Every decision is
made from samples that are the maximum over the ranks, so all ranks of torchrun come to the same
one.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import agmm
from agmm._installation import raised_line
from agmm.bench import launcher
from agmm.bench.candidates import candidates, other_orders, other_pushes
from agmm.bench.exchange import of_all_ranks
from agmm.bench.tuning_session import (
    MAX_ROUNDS,
    TuningOptions,
    Verdict,
    begin,
    check,
    first_problem,
    measure,
)
from agmm.bench.way import ROOF
from agmm.planning import cost_model, tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.op_plans import gather_kernels
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan, Row
from agmm.planning.problems import CPU, MATMUL_REDUCE_SCATTER, KernelConfig, Problem
from agmm.planning.shapes import Shape
from agmm.planning.tables import Key, TableError
from agmm.testing.ranks import RankError

FINALISTS = 4
"""The number of plans that are timed in rounds: a choice, like those of a `Pace`."""
_PLANS_BETWEEN_LOOKS = 8
"""The number of plans after which ranks that have a time limit look at the clock."""
_NOISES_AHEAD = 3.0  # standard errors

_T = TypeVar("_T")


class Failure(NamedTuple):
    """A plan that was wrong or did not run, and what was seen."""

    plan: Plan
    reason: str


@dataclass
class Outcome:
    """The outcome of one shape. ``row`` None: nothing could be measured; times in µs."""

    shape: Shape
    problem: Problem
    old: Plan
    row: Row | None = None
    old_us: float | None = None
    failures: list[Failure] = field(default_factory=list)
    medians: dict[Plan, float] = field(default_factory=dict)
    """The times of all plans that were timed."""
    finalists: list[Plan] = field(default_factory=list)
    """The plans that were timed in rounds, which ``medians`` has the times of."""


class Progress(Protocol):
    """The receiver of what a run reports while it goes."""

    def at(self, done: float, text: str) -> None:
        """Say that the run has come to this fraction, between 0 and 1, and does what ``text``
        says."""

    def say(self, line: str) -> None:
        """Say something that is to stay on the screen."""


class Silent:
    def at(self, done: float, text: str) -> None:
        pass

    def say(self, line: str) -> None:
        pass


# --- what leads them ---


class Ranks:
    """The ranks of a run: calls functions in every rank, and starts the ranks anew after one has
    failed."""

    def __init__(self, options: TuningOptions) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Ranks:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __call__(self, fn: Callable[..., _T], *args: Any) -> _T:
        result: _T = self._call(fn, *args)
        return result

    def restart(self) -> None:
        self._stack.close()
        self._start()

    def _start(self) -> None:
        ranks = launcher.ranks(self._options.device, self._options.world_size)
        self._call = self._stack.enter_context(ranks)


def from_rank_0(value: _T) -> _T:
    """Return rank 0's value, which JSON can hold, under torchrun, else just the value."""
    if launcher.torchrun_world_size() is None:
        return value
    found: _T = of_all_ranks("what to tune", value)[0]
    return found


def _plansfrom_rank_0(plans: Sequence[Plan]) -> list[Plan]:
    found = from_rank_0([tables.plan_to_json(plan) for plan in plans])
    return [tables.plan_from_json(plan) for plan in found]


def tune(options: TuningOptions, progress: Progress | None = None) -> Iterator[Outcome]:
    """Tunes the shapes one after the other; yields each outcome as soon as it is there.

    Under torchrun each of its ranks runs this, with the same outcomes; otherwise it starts ranks.
    Shapes that this version has tuned before are left out, unless ``options.again``.
    """
    progress = progress or Silent()
    with Ranks(options) as ranks:
        first = ranks(first_problem, options)
        own = tables.user(first.gpu, options.world_size)
        packaged = tables.packaged(first.gpu, options.world_size)
        found = [table for table in (own, packaged) if table is not None]
        planner = Planner(kernels_of, found)
        kernels = gather_kernels(first, kernels_of)
        problems = [replace(first, m=s.M, n=s.N, k=s.K) for s in options.shapes]
        done = from_rank_0([own is not None and _is_done(own, p) for p in problems])
        wanted = [
            (shape, problem)
            for shape, problem, is_done in zip(options.shapes, problems, done, strict=True)
            if options.again or not is_done
        ]
        if len(wanted) < len(problems):
            known = len(problems) - len(wanted)
            progress.say(f"{known} of {len(problems)} shapes were tuned before (--again repeats)")
        for i, (shape, problem) in enumerate(wanted):
            (old,) = _plansfrom_rank_0([planner.choose(problem).plan])
            outcome = Outcome(shape, problem, old)
            span = Span(progress, i / len(wanted), 1 / len(wanted), str(shape))
            try:
                tune_shape(outcome, kernels, options, ranks, span)
            except RankError as error:
                progress.say(f"{shape}: given up: {_cause(error)}")
                outcome.failures.append(Failure(outcome.old, _cause(error)))
                ranks.restart()
            yield outcome


def _is_done(table: tables.Table, problem: Problem) -> bool:
    rows = [row for row in table.rows(problem) if row.m == problem.m]
    return any(row.agmm == agmm.__version__ for row in rows)


@dataclass
class Span:
    """The range of the progress bar that belongs to one shape."""

    progress: Progress
    begin: float
    length: float
    label: str
    best: str = ""

    def at(self, done: float, what: str) -> None:
        text = f"{self.label}: {what}" + (f"; best so far {self.best}" if self.best else "")
        self.progress.at(self.begin + self.length * min(done, 1.0), text)

    def leads(self, name: str, us: float) -> None:
        self.best = f"{us:.1f} µs, {name}"


def tune_shape(
    outcome: Outcome,
    kernels: Sequence[KernelConfig],
    options: TuningOptions,
    ranks: Ranks,
    span: Span,
) -> None:
    shape, old, pace = outcome.shape, outcome.old, options.pace
    until = time.monotonic() + pace.limit_s
    span.at(0.0, "making the reference")
    ranks(begin, shape, options)
    medians = outcome.medians
    checked: list[Plan] = []

    def is_late() -> bool:
        return pace.limit_s < math.inf and from_rank_0(time.monotonic() > until)

    def try_plans(plans: Sequence[Plan], begin_at: float, end_at: float) -> None:
        before = len(checked)
        for i, plan in enumerate(plans):
            if i % _PLANS_BETWEEN_LOOKS == 0 and checked and is_late():
                break
            span.at(begin_at + (end_at - begin_at) * i / len(plans), f"checking {plan.name}")
            reason = _check(plan, checked, outcome, options, ranks)
            if reason is None:
                checked.append(plan)
            else:
                outcome.failures.append(Failure(plan, reason))
                span.progress.say(f"{shape}: left out {plan.name}: {reason}")
        new = checked[before:]
        if new:
            samples = ranks(measure, [plan.name for plan in new], pace.coarse_samples)
            medians.update({plan: statistics.median(samples[plan.name]) for plan in new})
            best = min(medians, key=lambda plan: medians[plan])
            span.leads(best.name, medians[best])

    of_scatter = kernels_of(MATMUL_REDUCE_SCATTER, outcome.problem.format)
    first = candidates(outcome.problem, kernels, old, of_scatter)
    try_plans(_plansfrom_rank_0(first), 0.05, 0.4)
    more = other_orders(medians)
    if more:
        try_plans(more, 0.4, 0.6)
    more = other_pushes(outcome.problem, medians)
    if more:
        try_plans(more, 0.6, 0.7)
    if not medians:
        return
    if outcome.failures and all(plan.gathers_first for plan in medians):
        span.progress.say(f"{shape}: no row, since no fused plan could be measured")
        return
    finalists = sorted(medians, key=lambda plan: medians[plan])[:FINALISTS]
    if old in medians and old not in finalists:
        finalists.append(old)
    outcome.finalists = finalists
    by_name = {plan.name: plan for plan in finalists}

    gain_us = _host_gain_us(outcome.problem)

    def time_round(names: Sequence[str], number: int) -> dict[str, list[float]]:
        span.at(0.7 + 0.3 * number / pace.max_rounds, f"timing {len(names)} plans")
        taken = ranks(measure, names, pace.round_samples)
        return {name: [us + gain_us.get(name, 0.0) for us in taken[name]] for name in taken}

    winner, samples = settle(
        time_round, list(by_name), old.name, max_rounds=pace.max_rounds, is_late=is_late
    )
    final = {
        name: statistics.median(taken) - gain_us.get(name, 0.0) for name, taken in samples.items()
    }
    medians.update({plan: final[name] for name, plan in by_name.items()})
    span.leads(winner, final[winner])
    unfused_us = medians.get(UNFUSED)
    outcome.old_us = final.get(old.name)
    outcome.row = Row(
        shape.M, by_name[winner], final[winner], final[ROOF], unfused_us, agmm.__version__
    )


def _host_gain_us(problem: Problem) -> dict[str, float]:
    """How much faster than others a plan has to be, by its name: torch's fused op by what it costs
    the host, which the samples do not show."""
    if problem.gpu == CPU:
        return {}
    return {BY_TORCH.name: cost_model.constants(problem.gpu).fused_reduce_scatter_gain_us}


def _check(
    plan: Plan, checked: Sequence[Plan], outcome: Outcome, options: TuningOptions, ranks: Ranks
) -> str | None:
    """The reason why the plan is left out, or None. After one that breaks the ranks new ones are
    started, which check the others again; those of torchrun have to go on."""
    try:
        verdict = ranks(check, plan)
    except RankError as error:
        verdict = Verdict(_cause(error), broken=True)
    if verdict.broken and launcher.torchrun_world_size() is None:
        ranks.restart()
        ranks(begin, outcome.shape, options)
        for other in checked:
            ranks(check, other)
    return verdict.reason


def settle(
    time_round: Callable[[Sequence[str], int], Mapping[str, Sequence[float]]],
    names: Sequence[str],
    old: str,
    *,
    max_rounds: int = MAX_ROUNDS,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[str, dict[str, list[float]]]:
    """Times in rounds until one name is ahead of all others by more than the noise.

    A name that is behind by more than the noise is timed no more, except ``old``, which is also
    the winner where no other is ahead of it.

    Args:
        time_round: takes names and the number of the round; returns equally many interleaved
            samples of each name, and of `ROOF`.
        is_late: tells whether no further round is to begin; every rank is told the same.

    Returns:
        The winner and all samples.
    """
    samples: dict[str, list[float]] = {}
    open_names = list(names)
    for number in range(max_rounds):
        timed = [name for name in names if name in open_names or name == old]
        for name, taken in time_round(timed, number).items():
            samples.setdefault(name, []).extend(taken)
        leader = min(open_names, key=lambda name: statistics.median(samples[name]))
        open_names = [
            name
            for name in open_names
            if name == leader or not is_ahead(samples[leader], samples[name])
        ]
        if open_names == [leader] or is_late():
            break
    return (old if old in open_names else leader), samples


def is_ahead(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the first samples are shorter than the second, taken beside them, by more than the
    noise: the median difference is above three times its standard error (from the median absolute
    deviation, so that single slow samples do not count)."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    middle = statistics.median(differences)
    spread = 1.4826 * statistics.median(abs(d - middle) for d in differences)
    standard_error = math.sqrt(math.pi / 2) * spread / math.sqrt(len(differences))
    return middle > _NOISES_AHEAD * standard_error


def _cause(error: RankError) -> str:
    """The heads of the error, one per rank, or what was raised where they say no more than
    Traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    heads = [line for line in lines if re.match(r"rank \d+: (?!Traceback)", line)]
    return "; ".join(heads) or raised_line(str(error))


class Keeper:
    """Writes rows to the user's table as they come; holds back those that could not be written."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._gpu = ""
        self.unsaved: list[tuple[Key, Row]] = []
        self.error: str | None = None
        self.path: Path | None = None

    def add(self, outcome: Outcome) -> None:
        if outcome.row is None:
            return
        self._gpu = outcome.problem.gpu
        self.unsaved.append((Key.of(outcome.problem), outcome.row))
        try:
            self.path = tables.save(self._gpu, self._world_size, self.unsaved)
        except TableError as error:
            self.error = str(error)
        else:
            self.unsaved, self.error = [], None

    def unsaved_text(self) -> str:
        """The table of the rows that could not be written."""
        by_key: dict[Key, dict[int, Row]] = {}
        for key, row in self.unsaved:
            by_key.setdefault(key, {})[row.m] = row
        return tables.to_text(self._gpu, self._world_size, by_key)
