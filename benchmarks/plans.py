"""How good the plans of shapes are that nobody tuned: on drawn shapes the packaged plan beside all
that `agmm tune` would try, found and timed by the tuner's own code.

    torchrun --standalone --nproc-per-node 2 benchmarks/plans.py --limit-s 420 --json plans.jsonl
    python benchmarks/plans.py --from plans.jsonl --set held

Shapes are projections of the presets at tensor parallelism 2, 4 and 8, with rows that a seed draws,
odd ones among them. Ops and formats take turns, and so do shapes to fit the cost model to and
shapes that are held back to judge it, which have seeds of their own. The file has a line of JSON
for each shape, written as soon as it is measured, so that a run which is stopped keeps what it has;
a file that is there is continued. Plans are not compared with a reference, as `agmm tune` does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import agmm
from agmm.bench import launcher, tuner
from agmm.bench.tuning_session import Pace, TuningOptions, first_problem
from agmm.errors import InvalidArgument
from agmm.planning import tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.op_plans import gather_kernels
from agmm.planning.planner import Planner
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, Problem
from agmm.planning.shapes import Shape
from agmm.testing.ranks import RankError
from benchmarks.alone import drawn_rows, projections

SETS = ("fit", "held")
HELD_SEEDS = 1_000_000
"""The seed of shapes that are held back is so much higher than that of the others: a choice."""
LOWEST, HIGHEST = 64, 8192
"""The range of drawn rows, of all ranks together: the rows of batches that are served and trained
on."""
CPU_SCALE = 64
"""CPU ranks get products that are smaller by so much in each direction, so that they take no
longer: a choice."""
PACE = Pace(coarse_samples=3, round_samples=8, max_rounds=2, warmup=1, spin_us=300.0, checks=False)
"""The pace of half a second a shape. The spin hides the launches of most hosts, and the timer makes
it longer where it does not."""
WORST = 5
FORMATS = {"bf16": (torch.bfloat16, None), "fp8": (torch.float8_e4m3fn, "rowwise")}
"""The dtypes of operands and their kinds of scales, by name."""

Entry = dict[str, Any]


class Cell(NamedTuple):
    """An op with a format, by its name in `FORMATS`."""

    op: str
    format: str


CELLS = tuple(
    Cell(op, name) for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER) for name in FORMATS
)


def drawn(cell: Cell, seed: int, world_size: int, scale: int = 1) -> Iterator[Shape]:
    """Yield shapes without an end; K of a reduce-scatter is a rank's."""
    draw = random.Random(f"{seed}, {cell.op}, {cell.format}")
    pairs = projections([cell.op])
    while True:
        m = drawn_rows(draw, LOWEST, HIGHEST) // world_size * world_size
        n, k = draw.choice(pairs)
        yield Shape(max(world_size, m // scale // world_size * world_size), n // scale, k // scale)


def options_of(
    cell: Cell, shapes: Sequence[Shape], device: str, world_size: int, pace: Pace
) -> Any:
    """The tuner's options of a cell. Raises InvalidArgument for what has no plans."""
    dtype, scaling = FORMATS[cell.format]
    given = dtype if device == "cuda" or scaling is not None else None
    return TuningOptions.of(
        device, world_size, shapes, given, op=cell.op, scaling=scaling, pace=pace
    )


class Runner:
    """Measures the plans of shapes in ranks that this process leads, or of which it is one."""

    def __init__(self, ranks: tuner.Ranks, device: str, world_size: int, pace: Pace) -> None:
        self._ranks, self._device, self._world_size = ranks, device, world_size
        self._pace = pace
        self._first: dict[Cell, Problem] = {}

    def measure(self, cell: Cell, shape: Shape) -> Entry | None:
        """The outcome of a shape; None where it has no plans, or none that runs."""
        try:
            options = options_of(cell, [shape], self._device, self._world_size, self._pace)
        except InvalidArgument:
            return None
        first = self._first.get(cell)
        if first is None:
            first = self._first[cell] = self._ranks(first_problem, options)
        problem = replace(first, m=shape.M, n=shape.N, k=shape.K)
        packaged = tables.packaged(problem.gpu, self._world_size)
        planner = Planner(kernels_of, [packaged] if packaged else [])
        choice = planner.choose(problem)
        outcome = tuner.Outcome(shape, problem, choice.plan)
        span = tuner.Span(tuner.Silent(), 0.0, 1.0, str(shape))
        begin = time.monotonic()
        kernels = gather_kernels(problem, kernels_of)
        try:
            tuner.tune_shape(outcome, kernels, options, self._ranks, span)
        except RankError:
            self._ranks.restart()
            return None
        if outcome.row is None or outcome.old_us is None:
            return None
        return {
            "op": cell.op,
            "format": cell.format,
            **shape._asdict(),
            "plan": choice.plan.name,
            "source": choice.source,
            "predicted_us": choice.predicted_us,
            "plan_us": round(outcome.old_us, 2),
            "best": outcome.row.plan.name,
            "best_us": round(outcome.row.us, 2),
            "least_us": round(min(outcome.medians[plan] for plan in outcome.finalists), 2),
            "roof_us": round(outcome.row.roof_us or 0.0, 2),
            "seconds": round(time.monotonic() - begin, 2),
            "failures": [f"{failed.plan.name}: {failed.reason}" for failed in outcome.failures],
            "us": {plan.name: round(us, 2) for plan, us in outcome.medians.items()},
        }

    def header(self) -> Entry:
        """What all entries of a run share."""
        problem = next(iter(self._first.values()))
        return {
            "gpu": problem.gpu,
            "world_size": self._world_size,
            "agmm": agmm.__version__,
            "torch": torch.__version__,
        }


class Figures(NamedTuple):
    """The times of plans ÷ those of the best that were found. The tuner calls a plan the best that
    nothing is ahead of by more than the noise; ``mean_of_least`` is by the least medians instead,
    noise and all."""

    shapes: int
    mean: float
    percentile_97: float
    largest: float
    mean_of_least: float


def figures(entries: Sequence[Entry]) -> Figures | None:
    """The figures of entries; None where there are none."""
    ratios = sorted(entry["plan_us"] / entry["best_us"] for entry in entries)
    if not ratios:
        return None
    place = min(len(ratios) - 1, math.ceil(0.97 * len(ratios)) - 1)
    least = [entry["plan_us"] / entry["least_us"] for entry in entries]
    mean, mean_of_least = statistics.geometric_mean(ratios), statistics.geometric_mean(least)
    return Figures(len(ratios), mean, ratios[place], ratios[-1], mean_of_least)


def show(entries: Sequence[Entry]) -> None:
    """Print the figures of each op, format and set, and the worst shapes."""
    print(f"{'plan ÷ best':34}  shapes   mean    97%  largest  mean ÷ least")
    for op, name in CELLS:
        for which in SETS:
            of_cell = [e for e in entries if (e["op"], e["format"], e["set"]) == (op, name, which)]
            found = figures(of_cell)
            if found is not None:
                label = f"{op}, {name}, {which}"
                print(f"{label:34}  {found.shapes:6}", *(f"{each:6.3f} " for each in found[1:]))
    for entry in sorted(entries, key=lambda e: e["best_us"] / e["plan_us"])[:WORST]:
        shape = f"{entry['M']}x{entry['N']}x{entry['K']}"
        print(f"{entry['op']}, {entry['format']}, {shape}: {entry['plan']}")
        print(f"  {entry['plan_us']:.1f} µs, {entry['best_us']:.1f} by {entry['best']}")


def read(path: Path) -> list[Entry]:
    """The entries of a file of this, which may be compressed, but for a last line that was not
    written whole."""
    entries = []
    whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in whole.decode().splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def _key(entry: Entry) -> tuple[object, ...]:
    """What tells the shapes of a file apart."""
    return tuple(entry[name] for name in ("op", "format", "M", "N", "K"))


def run(arguments: argparse.Namespace) -> list[Entry]:
    """Measure shapes until the time is over; return the entries."""
    begin = time.monotonic()
    device, world_size = launcher.choose(arguments.device, launcher.world_size_or(arguments.tp))
    cells = [cell for cell in CELLS if arguments.only in f"{cell.op}, {cell.format}"]
    options = options_of(CELLS[0], [], device, world_size, PACE)
    leads = launcher.is_rank_0()
    scale = 1 if device == "cuda" else CPU_SCALE
    entries: list[Entry] = []
    there: set[tuple[object, ...]] = set()
    if arguments.json is not None and arguments.json.exists():
        there = {_key(entry) for entry in read(arguments.json)}
    with tuner.Ranks(options) as ranks:
        runner = Runner(ranks, device, world_size, PACE._replace(limit_s=arguments.shape_s))
        turns = [(cell, which) for cell in cells for which in SETS]
        shapes = {
            (cell, which): drawn(cell, seed, world_size, scale)
            for cell in cells
            for which, seed in zip(SETS, (arguments.seed, arguments.seed + HELD_SEEDS), strict=True)
        }
        for turn in range(arguments.count * len(turns)):
            late = time.monotonic() - begin > arguments.limit_s
            if tuner.from_rank_0(late):
                break
            cell, which = turns[turn % len(turns)]
            shape = next(shapes[cell, which])
            key = _key({**cell._asdict(), **shape._asdict()})
            if tuner.from_rank_0(key in there):  # of either set, so that they have none in common
                continue
            there.add(key)
            entry = runner.measure(cell, shape)
            if entry is None:
                continue
            entry |= {"set": which, "seed": arguments.seed, **runner.header()}
            entries.append(entry)
            if leads and arguments.json is not None:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            if leads and arguments.verbose:
                ratio = entry["plan_us"] / entry["best_us"]
                print(
                    f"{cell.op}, {cell.format}, {shape}: {ratio:.3f}, {len(entry['us'])} plans,"
                    f" {entry['seconds']} s",
                    flush=True,
                )
    return entries if leads else []


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge packaged plans on drawn shapes.")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no shape later")
    parser.add_argument("--shape-s", type=float, default=1.0, help="for one shape, about")
    parser.add_argument("--count", type=int, default=100, help="shapes of each kind and set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the name of an op and format")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tp", type=int, help="ranks to start without torchrun")
    parser.add_argument("--json", type=Path, help="a file to add a line to for each shape")
    parser.add_argument("--from", dest="path", type=Path, action="append", help="show such a file")
    parser.add_argument("--set", choices=SETS, help="with --from, only these")
    parser.add_argument("--verbose", action="store_true", help="a line for each shape")
    arguments = parser.parse_args()
    if arguments.path:
        entries = [entry for path in arguments.path for entry in read(path)]
        entries = [e for e in entries if arguments.set in (None, e["set"])]
    else:
        entries = run(arguments)
    if launcher.is_rank_0():
        show(entries)


if __name__ == "__main__":
    main()
