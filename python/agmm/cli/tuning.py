"""`agmm tune`: it shows what it does, keeps each shape that is done, and says what came of it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agmm import _env
from agmm.bench import alone, launcher, tuner
from agmm.bench.recorded import Run
from agmm.bench.tuning_session import TuningOptions
from agmm.bench.units import duration
from agmm.cli.command_options import TuneOptions
from agmm.cli.options import say_left_out
from agmm.cli.report_tables import tuning_table
from agmm.cli.terminal import console, print_table
from agmm.errors import InvalidArgument
from agmm.planning import card_rates, tables
from agmm.planning.problems import TUNED
from agmm.planning.shapes import Shape


class TuningBar:
    """Progress of `agmm tune` on stderr: a bar in a terminal; in a pipe or a file a line as each
    shape begins and ends, and every so often between."""

    LINE_EVERY_S = 10.0

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        stderr = console(stderr=True)
        self._by_lines = visible and not stderr.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=stderr,
            transient=True,
            disable=not visible or self._by_lines,
        )
        self._task = self._bar.add_task("starting the ranks", total=1.0)
        self._label = ""
        self._line_at = 0.0

    def __enter__(self) -> TuningBar:
        self._bar.start()
        if self._by_lines:
            self.say("starting the ranks")
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def at(self, done: float, text: str) -> None:
        self._bar.update(self._task, completed=done, description=text)
        label, now = text.partition(":")[0], time.monotonic()
        if self._by_lines and (
            label != self._label or now - self._line_at >= TuningBar.LINE_EVERY_S
        ):
            self._label, self._line_at = label, now
            self.say(f"{done:4.0%} {text}")

    def ended(self, outcome: tuner.Outcome) -> None:
        if self._by_lines and outcome.row is not None:
            self.say(f"     {outcome.shape}: {duration(outcome.row.us)}, {outcome.row.plan.name}")

    def say(self, line: str) -> None:
        if self._visible:
            self._bar.console.print(line, markup=False, soft_wrap=True)


def check_op(op: str) -> None:
    """Raises InvalidArgument for an op of which nothing is chosen by measurement."""
    if op not in TUNED:
        *others, last = TUNED
        raise InvalidArgument(
            f"op: found {op}, wanted one whose plans are measured, {', '.join(others)} or {last}; "
            f"`agmm explain --op {op}` says what decides, `agmm bench --op {op}` times it"
        )


class Session(NamedTuple):
    """Shapes that are tuned together."""

    options: TuningOptions
    label: str = ""
    """What the shapes are of, where there are several sessions."""


class _Share:
    """The range of a bar that belongs to one of several sessions."""

    def __init__(self, bar: TuningBar, number: int, sessions: Sequence[Session]) -> None:
        counts = [len(session.options.shapes) for session in sessions]
        self._bar, self._label = bar, sessions[number].label
        self._begin = sum(counts[:number]) / sum(counts)
        self._length = counts[number] / sum(counts)

    def at(self, done: float, text: str) -> None:
        self._bar.at(self._begin + self._length * done, text)

    def say(self, line: str) -> None:
        self._bar.say(f"{self._label}: {line}" if self._label else line)


def run_all(
    runs: Mapping[Run, Sequence[Shape]], left_out: list[str], kind: str, ranks: int, *, again: bool
) -> bool:
    """Tunes each run, on "cuda" or "cpu", as `run` does. Shapes that cannot be tuned are named,
    behind the lines of what else is ``left_out``.

    Raises:
        InvalidArgument: no shape can be tuned; before anything is measured.
    """
    sessions: list[Session] = []
    for one, listed in runs.items():
        served: list[Shape] = []
        for shape in listed:
            try:
                _options(one, kind, ranks, [shape], again)
            except InvalidArgument as error:
                left_out.append(f"left out {one.op} {shape} {one.dtype}: {error}")
            else:
                served.append(shape)
        if served:
            sessions.append(Session(_options(one, kind, ranks, served, again), str(one)))
    say_left_out(left_out)
    if not sessions:
        raise InvalidArgument("calls: found none that can be tuned, wanted at least one")
    return run(sessions, ranks)


def _options(
    one: Run, kind: str, ranks: int, shapes: Sequence[Shape], again: bool
) -> TuningOptions:
    import torch

    return TuningOptions.of(
        *(kind, ranks, shapes, getattr(torch, one.dtype)),
        op=one.op,
        scaling=one.scaling,
        return_A=one.return_A,
        row_major=one.b_layout == "row",
        again=again,
    )


def run(sessions: Sequence[Session], world_size: int) -> bool:
    """Tunes one session after the other, with one bar.

    Returns:
        Whether every shape has a plan that was saved, and no candidate failed. After Ctrl-C it
        reports what is done, and raises.

    Raises:
        TableError: the user's table cannot be written; before anything is measured.
    """
    tables.check_folder()
    outcomes: list[list[tuner.Outcome]] = [[] for _ in sessions]
    keeper = tuner.Keeper(world_size)
    leads = launcher.is_rank_0()
    interrupted = False
    try:
        with TuningBar(leads) as bar:
            for i, session in enumerate(sessions):
                share = _Share(bar, i, sessions)
                if session.label:
                    count = len(session.options.shapes)
                    bar.say(f"{session.label}, {count} {'shape' if count == 1 else 'shapes'}")
                for outcome in tuner.tune(session.options, share):
                    outcomes[i].append(outcome)
                    bar.ended(outcome)
                    if leads:
                        keeper.add(outcome)
    except KeyboardInterrupt:
        interrupted = True
    found = [outcome for some in outcomes for outcome in some]
    if leads:
        for session, some in zip(sessions, outcomes, strict=True):
            if some:
                print_table(console(), tuning_table(some, session.label))
        _report(found, keeper)
    if interrupted:
        if leads and found:
            print("agmm: the same command goes on with the rest", file=sys.stderr)
        raise KeyboardInterrupt
    failed = any(outcome.failures or outcome.row is None for outcome in found)
    return not failed and not keeper.unsaved


def _report(outcomes: list[tuner.Outcome], keeper: tuner.Keeper) -> None:
    """Prints what was gained, where the plans are kept, and what failed."""
    gains = [o.old_us / o.row.us for o in outcomes if o.row is not None and o.old_us is not None]
    if len(gains) > 1:
        mean = statistics.geometric_mean(gains)
        print(
            f"agmm: {len(gains)} shapes: {mean:.2f} × as fast as by the plans before in the "
            f"geometric mean, {max(gains):.2f} × at most",
            file=sys.stderr,
        )
    if keeper.path is not None:
        print(f"agmm: the plans stand in {keeper.path}", file=sys.stderr)
        print(
            "agmm: your programs on this machine take them from there; for others, of other users "
            f"or on other machines, add\nexport {_env.CACHE_DIR.name}={keeper.path.parent}",
            file=sys.stderr,
        )
    failures = [(o.shape, failure) for o in outcomes for failure in o.failures]
    for shape, failure in failures:
        print(f"agmm: {shape}: {failure.plan.name}: {failure.reason}", file=sys.stderr)
    if keeper.unsaved:
        print(f"agmm: {keeper.error}; these rows were not saved:", file=sys.stderr)
        print(keeper.unsaved_text(), end="")


def run_alone(options: TuneOptions) -> None:
    """Measure what the first GPU does by itself, print it and keep it.

    Raises:
        InvalidArgument: there is no GPU, or another option is given.
    """
    if replace(options, alone=False) != TuneOptions():
        raise InvalidArgument("--alone: found it with other options, wanted it by itself")
    if not torch.cuda.is_available():
        raise InvalidArgument("--alone: found no GPU, wanted one that torch can use")
    device = torch.device("cuda", 0)
    rates = alone.measure(device, alone.peer_of(0))
    gpu = tables.gpu_name(torch.cuda.get_device_name(device))
    tflops, memory, link = rates
    to_peer = "no peer that it reaches" if link is None else f"{link:.0f} GB/s to a peer"
    print(f"{gpu}: {tflops:.0f} TFLOPS of torch.mm in bfloat16, {memory:.0f} GB/s, {to_peer}")
    path = card_rates.save(gpu, rates)
    print("not kept: AGMM_CACHE=off" if path is None else f"kept in {path}")
