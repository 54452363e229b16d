"""The benchmark harness: times agmm beside the ways it replaces, in one run, by one timing rule.

`run` starts the ranks (or uses those of torchrun), checks every way against the reference, times
those that are right, and returns a report. A way that
fails or is wrong on any rank is left out on all of them, and the report says why.

Traps, and what is done about each (the timing itself is in `agmm.bench.timer`):

- Clocks: seconds of load take an H200 to its power limit and from 1980 to about 1600 MHz, and a
  warm card ranks kernels differently. Warm-up samples are dropped, the ways are interleaved in an
  order drawn anew for each sample, and times are compared within one run only.
- Launches: a spin of 400 µs on the GPU hides them, longer on a host that takes longer. A way that
  waits for the GPU on the host shows it in its time; what the host pays has a column ("host µs"):
  the median over the ranks, since a rank that shares its core with another process says nothing of
  the op; the report has every rank's.
- L2: a buffer larger than L2 is written before each sample, so no way finds its operands there.
- Ranks: a tiny all-reduce aligns them after the spin, whose length in time depends on the clock of
  each GPU (before it, they were found 25 µs apart), and a sample is the maximum over them; the
  mean would hide that one waits for another.
- First calls load kernels, allocate and exchange handles. The check and the warm-up come before.
- Speed of wrong results: each way is checked against a float64 reference before it is timed. Its
  output is filled with NaN before that, so that what an earlier call left cannot pass.
- Single slow samples: the median is reported, all samples are stored.
- Data: normal random numbers, since the power drawn, and so the clock, depends on the values. B is
  a transposed weight, as in a layer.
- Ways that hang: each call is a step that the process outside sees (`agmm.bench.steps`). A way in
  which no step ends within a limit, or in which a rank dies, is left out and named; its ranks are
  ended, and the other ways of the shape are measured in new ones. Ranks of torchrun cannot be
  started anew: what is measured is kept, and the job ends.
- Other processes on the machine: nothing here sees them. Where `agmm bench --compare` finds that
  the roof changed too, suspect them, or the clocks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agmm._installation import raised_line
from agmm.bench import steps
from agmm.bench.launcher import SHAPE_TIMEOUT_S, rank_pool, torchrun_world_size
from agmm.bench.measure import WayResult, measure_watched
from agmm.bench.options import Options
from agmm.bench.reports import new_report
from agmm.bench.way import ROOF
from agmm.errors import InvalidArgument
from agmm.planning.shapes import AnyShape
from agmm.testing.ranks import RankError

STUCK_EXIT_CODE = 124
"""The exit code of ranks that torchrun has started, after a way that hangs."""
_LATER_S = 10.0
"""torchrun's other ranks end this much later than rank 0, which writes the report."""


def run(
    options: Options,
    progress: Callable[[str], None] = lambda line: None,
    begun: Callable[[dict[str, Any]], None] = lambda report: None,
    lost: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs the benchmark and returns the report. `begun` gets it at first, without a shape; a shape
    is in there when it has been measured.

    Under torchrun the ranks are its own and every one of them returns the report. Where a way hangs
    there, rank 0 calls `lost` in a thread of its own, and all processes end with STUCK_EXIT_CODE.
    Otherwise this process starts `options.world_size` ranks.
    Raises InvalidArgument for options that cannot run.
    """
    torchrun_size = torchrun_world_size()
    if torchrun_size is not None:
        options = replace(options, world_size=torchrun_size)
    options = options.resolved()
    if options.device == "cuda" and torch.cuda.device_count() < options.world_size:
        raise InvalidArgument(
            f"world size: found {options.world_size}, wanted at most {torch.cuda.device_count()}, "
            "the number of GPUs here (--device cpu needs none)"
        )
    assert options.shapes is not None
    assert options.ways is not None
    with _Ranks(options, lost) as watched:
        report = new_report(options)
        begun(report)
        for i, shape in enumerate(options.shapes, 1):
            progress(f"[{i}/{len(options.shapes)}] {shape}: {len(options.ways)} ways")
            report["shapes"].append(_measure_in(watched, shape, options, progress))
    return report


def _measure_in(
    watched: _Ranks, shape: AnyShape, options: Options, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measures one shape. Ways that break the ranks are left out, one after the other."""
    assert options.ways is not None
    left_out: dict[str, str] = {}

    def leave_out(names: Iterable[str], reason: str) -> None:
        for name in names:
            left_out[name] = reason
            progress(f"{shape}: left out {name}: {reason}")

    while True:
        names = tuple(name for name in options.ways if name not in left_out)
        if ROOF in left_out:  # all others are compared with it
            leave_out(names, "the matmul alone did not run")
        if ROOF in left_out or not names:
            report = _unmeasured(shape)
            break
        try:
            report = watched.measure(shape, replace(options, ways=names))
            break
        except _WayFailed as failure:
            leave_out(names if failure.way is None else [failure.way], failure.reason)
            watched.restart()
    failed = {name: asdict(WayResult(reason=reason)) for name, reason in left_out.items()}
    found = {**report["ways"], **failed}
    return {**report, "ways": {name: found[name] for name in options.ways}}


def _unmeasured(shape: AnyShape) -> dict[str, Any]:
    return {**shape._asdict(), "sm_clock_mhz": None, "ways": {}}


class _WayFailed(Exception):
    """Raised where the ranks are lost; `way` is the one they were in, None before the first."""

    def __init__(self, way: str | None, reason: str) -> None:
        super().__init__(reason)
        self.way = way
        self.reason = reason


class _Ranks:
    """The ranks that measure, torchrun's or its own. Each of their steps has a time limit."""

    def __init__(self, options: Options, lost: Callable[[], None]) -> None:
        self._options = options
        self._lost = lost
        self._stack = contextlib.ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="agmm-bench-"))

    def __enter__(self) -> _Ranks:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._stack.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        options = self._options
        self._pool = self._stack.enter_context(rank_pool(options.device, options.world_size))

    def restart(self) -> None:
        """Ends the ranks and starts new ones."""
        self._stack.close()
        self._start()

    def measure(self, shape: AnyShape, options: Options) -> dict[str, Any]:
        """Runs `measure` in every rank. Raises _WayFailed where the ranks are lost by it."""
        world_size = options.world_size if self._pool is not None else 1
        watch = steps.Watch(self._folder, world_size, options.limit_s, SHAPE_TIMEOUT_S)
        if self._pool is None:
            return self._measure_here(watch, shape, options)
        self._pool.submit(measure_watched, str(self._folder), shape, options)
        try:
            results: list[dict[str, Any]] = self._pool.collect(watch.is_stuck)
        except RankError as error:
            behind, what = watch.behind(sorted(error.exit_codes) or error.ranks)
            reason = _cause(error, behind, options.limit_s)
            raise _WayFailed(_way(options, what), reason) from None
        return results[0]

    def _measure_here(
        self, watch: steps.Watch, shape: AnyShape, options: Options
    ) -> dict[str, Any]:
        rank = dist.get_rank()

        def give_up() -> None:
            way = _way(options, watch.behind()[1]) or "before the first way"
            said = f"did not come back within {options.limit_s:g} s"
            print(f"agmm: rank {rank}: {shape}: {way} {said}", file=sys.stderr, flush=True)
            if rank:
                time.sleep(_LATER_S)
            else:
                self._lost()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(STUCK_EXIT_CODE)

        end = watch.call_if_stuck(give_up)
        try:
            return measure_watched(str(self._folder), shape, options, watched_as=0)
        finally:
            end()


def _way(options: Options, what: int) -> str | None:
    assert options.ways is not None
    return None if what == steps.BEGINNING else options.ways[what]


def _cause(error: RankError, behind: Sequence[int], limit_s: float) -> str:
    """Says in a line what became of the ranks that are furthest behind."""
    rank = behind[0]
    code = error.exit_codes.get(rank)
    of_rank = str(error).partition(f"rank {rank}: ")[2].partition("\nrank ")[0]
    lines = [line for line in of_rank.splitlines() if line.strip()]
    if code is not None:
        last = f": {raised_line(of_rank)}" if len(lines) > 1 else ""
        return f"rank {rank} ended in it with exit code {code}{last}"
    if not lines or lines[0].startswith("did not answer"):
        which = f"rank{'s' if len(behind) > 1 else ''} {', '.join(map(str, behind))}"
        return f"{which} did not come back from it within {limit_s:g} s"
    return f"rank {rank}: {raised_line(of_rank)}"
