"""`agmm tune`: it shows what it does, keeps each shape that is done, and says what came of it."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agmm.bench import launcher, tuner
from agmm.bench.tuning_session import TuningOptions
from agmm.bench.units import duration
from agmm.cli.report_tables import tuning_table
from agmm.cli.terminal import console, print_table
from agmm.errors import InvalidArgument
from agmm.planning import tables
from agmm.planning.problems import OPS


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
    if op not in OPS:
        raise InvalidArgument(
            f"op: found {op}, wanted one whose plans are measured, {' or '.join(OPS)}; "
            f"`agmm explain --op {op}` says what decides, `agmm bench --op {op}` times it"
        )


def run(options: TuningOptions, world_size: int) -> bool:
    """Whether every shape has a plan that was saved, and no candidate failed. After Ctrl-C it
    reports what is done, and raises.

    Raises:
        TableError: the user's table cannot be written; before anything is measured.
    """
    tables.check_folder()
    outcomes: list[tuner.Outcome] = []
    keeper = tuner.Keeper(world_size)
    leads = launcher.is_rank_0()
    interrupted = False
    try:
        with TuningBar(leads) as bar:
            for outcome in tuner.tune(options, bar):
                outcomes.append(outcome)
                bar.ended(outcome)
                if leads:
                    keeper.add(outcome)
    except KeyboardInterrupt:
        interrupted = True
    if leads:
        _report(outcomes, keeper)
    if interrupted:
        if leads and outcomes:
            print("agmm: the same command goes on with the rest", file=sys.stderr)
        raise KeyboardInterrupt
    failed = any(outcome.failures or outcome.row is None for outcome in outcomes)
    return not failed and not keeper.unsaved


def _report(outcomes: list[tuner.Outcome], keeper: tuner.Keeper) -> None:
    """Prints what came of each shape, where the plans are kept, and what failed."""
    if outcomes:
        print_table(console(), tuning_table(outcomes))
    if keeper.path is not None:
        print(f"agmm: the plans stand in {keeper.path}", file=sys.stderr)
    failures = [(o.shape, failure) for o in outcomes for failure in o.failures]
    for shape, failure in failures:
        print(f"agmm: {shape}: {failure.plan.name}: {failure.reason}", file=sys.stderr)
    if keeper.unsaved:
        print(f"agmm: {keeper.error}; these rows were not saved:", file=sys.stderr)
        print(keeper.unsaved_text(), end="")
