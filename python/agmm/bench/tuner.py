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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table

import agmm
from agmm.bench import benchmarking
from agmm.cli.terminal import plain_table
from agmm.errors import InvalidArgument
from agmm.planning import call_plans, tables
from agmm.planning.heuristics import orders, predict_us, sm_pushes, usual_order, usual_plans
from agmm.planning.legality import copy_transports, why_unfused
from agmm.planning.planner import Planner
from agmm.planning.plans import CPU, UNFUSED, KernelConfig, Plan, Problem, Row, SmPush
from agmm.planning.tables import Key, TableError
from agmm.runtime.workspaces import cpu_workspace
from agmm.testing.cases import Shape, make_operands
from agmm.testing.ranks import RankError
from agmm.testing.reference import allowed_error, gathered_product
from agmm.testing.timer import time_ways

ROOF = "roof"
CPU_CHUNKS = (1, 2, 4, 8)
"""Row chunks per shard that are tried on the CPU."""

PRUNE_FACTOR = 1.3
"""Kernels that the cost model says take this many times the best one's time are left out."""

COARSE_SAMPLES = 5
KERNELS_IN_ALL_ORDERS = 2
FINALISTS = 4
ROUND_SAMPLES = 10
MAX_ROUNDS = 5
_NOISES_AHEAD = 3.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """What to tune, on "cuda" or "cpu"; ``shapes`` are gathered and divisible by the ranks."""

    device: str
    world_size: int
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    return_A: bool = False
    row_major: bool = False
    again: bool = False
    """Measure shapes anew that this version of agmm has tuned before."""

    @classmethod
    def of(
        cls,
        device: str,
        world_size: int,
        shapes: Sequence[Shape],
        dtype: torch.dtype | None = None,
        **others: bool,
    ) -> Options:
        """With dtype's default filled in. Raises InvalidArgument for what cannot be tuned."""
        given = benchmarking.Options(device, world_size, tuple(shapes), dtype=dtype).resolved()
        assert given.dtype is not None
        options = cls(device, world_size, tuple(shapes), given.dtype, **others)
        for shape in shapes:
            reason = why_unfused(options.dtype_name, shape.N, shape.K)
            if device == "cuda" and reason is not None:
                raise InvalidArgument(f"shape: found {shape}, which cannot be fused: {reason}")
        return options

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def problem(self, shape: Shape, device: torch.device) -> Problem:
        return call_plans.problem(
            *shape,
            self.dtype,
            device,
            world_size=self.world_size,
            return_A=self.return_A,
            column_major=not self.row_major,
        )


class Failure(NamedTuple):
    """A plan that was wrong or did not run, and what was seen."""

    plan: Plan
    reason: str


@dataclass
class Outcome:
    """What came of one shape. ``row`` None: nothing could be measured; times in µs."""

    shape: Shape
    problem: Problem
    old: Plan
    row: Row | None = None
    old_us: float | None = None
    failures: list[Failure] = field(default_factory=list)


class Progress(Protocol):
    """Where a run reports to while it goes."""

    def at(self, done: float, text: str) -> None:
        """The run has come to this fraction, between 0 and 1, and does what ``text`` says."""

    def say(self, line: str) -> None:
        """Something that is to stay on the screen."""


class Silent:
    def at(self, done: float, text: str) -> None:
        pass

    def say(self, line: str) -> None:
        pass


# --- inside the ranks ---


class _Session:
    """One shape's operands and checked calls in one rank."""

    def __init__(self, shape: Shape, options: Options) -> None:
        group = dist.group.WORLD
        assert group is not None
        device = _device(options.device)
        operands = make_operands(
            shape, dist.get_rank(), dist.get_world_size(), dtype=options.dtype, device=device
        )
        if options.row_major:
            operands.B = operands.B.contiguous()
        self.return_A = options.return_A
        self.problem = benchmarking.Problem(shape, group, device, operands)
        self.reference = gathered_product(operands.A, operands.B)
        roof = benchmarking.WAYS[ROOF]
        result, call = benchmarking.check_way(roof.prepare, self.problem, self.reference)
        if call is None or result.relative_error is None:
            raise RuntimeError(f"the matmul alone failed: {result.reason}")
        self.allowed = allowed_error(result.relative_error)
        self.calls: dict[str, Callable[[], Any]] = {ROOF: call}

    def prepare(self, plan: Plan) -> Callable[[benchmarking.Problem], Callable[[], Any]]:
        return_A = self.return_A

        def prepare(p: benchmarking.Problem) -> Callable[[], benchmarking.Result]:
            A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
            if p.device.type == "cpu" and plan != UNFUSED:
                workspace = cpu_workspace(group)
                chunks = plan.chunks_per_shard

                def on_cpu() -> benchmarking.Result:
                    A, outs = workspace.all_gather_matmul(
                        A_shard, [B], [None], return_A=return_A, chunks_per_shard=chunks
                    )
                    return A, outs[0]

                return on_cpu
            config = "unfused" if plan.kernel is None else f"{plan.kernel.name}/{plan.transport}"

            def by_op() -> benchmarking.Result:
                op: Any = agmm.all_gather_matmul
                found = op(A_shard, B, group, return_A=return_A, config=config, strict=True)
                return found if return_A else (None, found)

            return by_op

        return prepare


_session: _Session | None = None


def _device(kind: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(CPU)
    )


def _current() -> _Session:
    assert _session is not None
    return _session


def first_problem(options: Options) -> Problem:
    """The problem of the first shape, as this rank's device has it. In every rank."""
    return options.problem(options.shapes[0], _device(options.device))


def begin(shape: Shape, options: Options) -> None:
    """Makes the operands and the reference. In every rank, as all that follow."""
    global _session
    _session = None
    benchmarking.release_memory(_device(options.device))
    _session = _Session(shape, options)


class Verdict(NamedTuple):
    """Why a plan may not be timed, or None; ``broken``: a rank raised, so that what it left
    behind may spoil other plans."""

    reason: str | None
    broken: bool = False


def check(plan: Plan) -> Verdict:
    """Compares a plan with the reference; `measure` knows it afterwards if it is right."""
    session = _current()
    result, call = benchmarking.check_way(session.prepare(plan), session.problem, session.reference)
    benchmarking.judge(result, session.allowed)
    if result.reason is None:
        assert call is not None
        session.calls[plan.name] = call
    return Verdict(result.reason, broken=result.reason is not None and not result.wrong)


def measure(names: Sequence[str], samples: int) -> dict[str, list[float]]:
    """Interleaved samples in µs of plans that `check` found right, by name, and of the roof."""
    session = _current()
    calls = {name: session.calls[name] for name in (*names, ROOF)}
    group, device = session.problem.group, session.problem.device
    return time_ways(calls, group=group, samples=samples, device=device)


# --- what leads them ---


class _Ranks:
    """Calls functions in every rank; starts the ranks anew after one has failed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Ranks:
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
        ranks = benchmarking.ranks(self._options.device, self._options.world_size)
        self._call = self._stack.enter_context(ranks)


def _from_rank_0(value: _T) -> _T:
    """Under torchrun rank 0's value, else just the value."""
    if benchmarking.torchrun_world_size() is None:
        return value
    shared: list[Any] = [value]
    dist.broadcast_object_list(shared, src=0)
    result: _T = shared[0]
    return result


def tune(options: Options, progress: Progress | None = None) -> Iterator[Outcome]:
    """Tunes the shapes one after the other; yields each outcome as soon as it is there.

    Under torchrun in each of its ranks, with the same outcomes; otherwise starts its own ranks.
    Shapes that this version has tuned before are left out, unless ``options.again``.
    """
    progress = progress or Silent()
    with _Ranks(options) as ranks:
        first = ranks(first_problem, options)
        own = tables.user(first.gpu, options.world_size)
        packaged = tables.packaged(first.gpu, options.world_size)
        found = [table for table in (own, packaged) if table is not None]
        planner = Planner(call_plans.kernels(), found)
        problems = [first._replace(m=s.M, n=s.N, k=s.K) for s in options.shapes]
        done = _from_rank_0([own is not None and _is_done(own, p) for p in problems])
        wanted = [
            (shape, problem)
            for shape, problem, is_done in zip(options.shapes, problems, done, strict=True)
            if options.again or not is_done
        ]
        if len(wanted) < len(problems):
            kept = len(problems) - len(wanted)
            progress.say(f"{kept} of {len(problems)} shapes were tuned before (--again repeats)")
        for i, (shape, problem) in enumerate(wanted):
            old = _from_rank_0(planner.choose(problem).plan)
            outcome = Outcome(shape, problem, old)
            part = _Part(progress, i / len(wanted), 1 / len(wanted), str(shape))
            try:
                _tune_shape(outcome, planner.kernels, options, ranks, part)
            except RankError as error:
                progress.say(f"{shape}: given up: {_cause(error)}")
                outcome.failures.append(Failure(outcome.old, _cause(error)))
                ranks.restart()
            yield outcome


def _is_done(table: tables.Table, problem: Problem) -> bool:
    rows = [row for row in table.rows(problem) if row.m == problem.m]
    return any(row.agmm == agmm.__version__ for row in rows)


@dataclass
class _Part:
    """The part of the progress bar that belongs to one shape."""

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


def candidates(problem: Problem, kernels: Sequence[KernelConfig], old: Plan) -> list[Plan]:
    """The plans to check at first: each kernel in its usual order that the cost model leaves, the
    unfused path, and the plan in use."""
    if problem.gpu == CPU:
        rows = problem.m // problem.world_size
        plans = [Plan("push", chunks_per_shard=c) for c in CPU_CHUNKS if c <= max(1, rows)]
    else:
        fused = [
            Plan(transport, usual_order(problem, kernel))
            for kernel in kernels
            for transport in copy_transports(problem, kernel)
        ]
        fused += [plan for kernel in kernels for plan in usual_plans(problem, kernel)]
        predicted = {plan: predict_us(problem, plan) or 0.0 for plan in fused}
        limit = PRUNE_FACTOR * min(predicted.values(), default=0.0)
        plans = [plan for plan, us in predicted.items() if us <= limit]
    return list(dict.fromkeys([old, *plans, UNFUSED]))


def other_orders(medians: Mapping[Plan, float]) -> list[Plan]:
    """The best kernels in all orders that are not among the plans yet."""
    fused = sorted((p for p in medians if p.kernel is not None), key=lambda p: medians[p])
    more = []
    for plan in fused[:KERNELS_IN_ALL_ORDERS]:
        assert plan.kernel is not None
        more += [Plan(plan.transport, order) for order in orders(plan.kernel)]
    return [plan for plan in dict.fromkeys(more) if plan not in medians]


def other_pushes(problem: Problem, medians: Mapping[Plan, float]) -> list[Plan]:
    """Where SM push is the fastest: the same with other chunks that are not among the plans yet."""
    best = min(medians, key=lambda plan: medians[plan], default=UNFUSED)
    if best.kernel is None or SmPush.parse(best.transport) is None:
        return []
    plans = [Plan(push.name, best.kernel) for push in sm_pushes(problem, best.kernel)]
    return [plan for plan in plans if plan not in medians]


def _tune_shape(
    outcome: Outcome,
    kernels: Sequence[KernelConfig],
    options: Options,
    ranks: _Ranks,
    part: _Part,
) -> None:
    shape, old = outcome.shape, outcome.old
    part.at(0.0, "making the reference")
    ranks(begin, shape, options)
    medians: dict[Plan, float] = {}
    checked: list[Plan] = []

    def try_plans(plans: Sequence[Plan], begin_at: float, end_at: float) -> None:
        before = len(checked)
        for i, plan in enumerate(plans):
            part.at(begin_at + (end_at - begin_at) * i / len(plans), f"checking {plan.name}")
            reason = _check(plan, checked, outcome, options, ranks)
            if reason is None:
                checked.append(plan)
            else:
                outcome.failures.append(Failure(plan, reason))
                part.progress.say(f"{shape}: left out {plan.name}: {reason}")
        new = checked[before:]
        if new:
            samples = ranks(measure, [plan.name for plan in new], COARSE_SAMPLES)
            medians.update({plan: statistics.median(samples[plan.name]) for plan in new})
            best = min(medians, key=lambda plan: medians[plan])
            part.leads(best.name, medians[best])

    try_plans(_from_rank_0(candidates(outcome.problem, kernels, old)), 0.05, 0.4)
    more = other_orders(medians)
    if more:
        try_plans(more, 0.4, 0.6)
    more = other_pushes(outcome.problem, medians)
    if more:
        try_plans(more, 0.6, 0.7)
    if not medians:
        return
    if outcome.failures and all(plan == UNFUSED for plan in medians):
        part.progress.say(f"{shape}: no row, since no fused plan could be measured")
        return
    finalists = sorted(medians, key=lambda plan: medians[plan])[:FINALISTS]
    if old in medians and old not in finalists:
        finalists.append(old)
    by_name = {plan.name: plan for plan in finalists}

    def time_round(names: Sequence[str], number: int) -> dict[str, list[float]]:
        part.at(0.7 + 0.3 * number / MAX_ROUNDS, f"timing {len(names)} plans")
        return ranks(measure, names, ROUND_SAMPLES)

    winner, samples = settle(time_round, list(by_name), old.name)
    final = {name: statistics.median(taken) for name, taken in samples.items()}
    part.leads(winner, final[winner])
    unfused_us = final.get(UNFUSED.name, medians.get(UNFUSED))
    outcome.old_us = final.get(old.name)
    outcome.row = Row(
        shape.M, by_name[winner], final[winner], final[ROOF], unfused_us, agmm.__version__
    )


def _check(
    plan: Plan, checked: Sequence[Plan], outcome: Outcome, options: Options, ranks: _Ranks
) -> str | None:
    """The reason why the plan is left out, or None. After one that breaks the ranks new ones are
    started, which check the others again; those of torchrun have to go on."""
    try:
        verdict = ranks(check, plan)
    except RankError as error:
        verdict = Verdict(_cause(error), broken=True)
    if verdict.broken and benchmarking.torchrun_world_size() is None:
        ranks.restart()
        ranks(begin, outcome.shape, options)
        for other in checked:
            ranks(check, other)
    return verdict.reason


def settle(
    time_round: Callable[[Sequence[str], int], Mapping[str, Sequence[float]]],
    names: Sequence[str],
    old: str,
) -> tuple[str, dict[str, list[float]]]:
    """Times in rounds until one name is ahead of all others by more than the noise.

    A name that is behind by more than the noise is timed no more, except ``old``, which is also
    the winner where no other is ahead of it.

    Args:
        time_round: takes names and the number of the round; returns equally many interleaved
            samples of each name, and of `ROOF`.

    Returns:
        The winner and all samples.
    """
    samples: dict[str, list[float]] = {}
    open_names = list(names)
    for number in range(MAX_ROUNDS):
        timed = [name for name in names if name in open_names or name == old]
        for name, taken in time_round(timed, number).items():
            samples.setdefault(name, []).extend(taken)
        leader = min(open_names, key=lambda name: statistics.median(samples[name]))
        open_names = [
            name
            for name in open_names
            if name == leader or not is_ahead(samples[leader], samples[name])
        ]
        if open_names == [leader]:
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
    """The error's heads, one per rank, or its last line where they say no more than Traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    heads = [line for line in lines if re.match(r"rank \d+: (?!Traceback)", line)]
    return "; ".join(heads) or lines[-1]


class Keeper:
    """Writes rows to the user's table as they come; keeps those that could not be written."""

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
        """The rows that could not be written, as the table that they should have become."""
        by_key: dict[Key, dict[int, Row]] = {}
        for key, row in self.unsaved:
            by_key.setdefault(key, {})[row.m] = row
        return tables.to_text(self._gpu, self._world_size, by_key)


def summary_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per shape: old and new plan with their times, gain, and ratio to the roof."""
    table = plain_table("tuned (µs)")
    table.add_column("shape", no_wrap=True)
    table.add_column("old plan", overflow="fold")
    table.add_column("new plan", overflow="fold")
    for heading in ("old", "new", "gain", "÷ roof", "unfused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for o in outcomes:
        if o.row is None:
            table.add_row(str(o.shape), o.old.name, "none could be measured", *["-"] * 5)
            continue
        gain = None if o.old_us is None else 100 * (1 - o.row.us / o.old_us)
        ratio = None if o.row.roof_us is None else o.row.us / o.row.roof_us
        table.add_row(
            str(o.shape),
            o.old.name,
            "the same" if o.row.plan == o.old else o.row.plan.name,
            _number(o.old_us, ".1f"),
            _number(o.row.us, ".1f"),
            "-" if gain is None else f"{gain:.1f}%",
            _number(ratio, ".3f"),
            _number(o.row.unfused_us, ".1f"),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
