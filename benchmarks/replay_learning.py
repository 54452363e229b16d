"""What `agmm.learn_plans` would have kept, and how long its first calls would have taken, for the
shapes that `benchmarks/plans.py` measured: its own code is fed with the measured times.

    python -m benchmarks.replay_learning benchmarks/results/plans/*.jsonl.gz

Each time gets noise of its own. It prints, by op and format, the geometric mean, the 97th
percentile and the largest of three ratios: the model's plan ÷ the best that was found, what is kept
÷ the best, and the first calls ÷ as many by the model's plan. Plans that were not measured are not
tried.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from agmm.planning import cost_model, formats, studies, tables
from agmm.planning.planner import Planner
from agmm.planning.studies import Study
from benchmarks.behind_gather import Figures
from benchmarks.measured_plans import Product, product_of, time_of
from benchmarks.plans import read

CALLS = 30
"""The number of first calls that are added up."""
NOISE = 0.015
SPIKES, SPIKE = 0.05, 0.1
"""The spread of times, and how often one is longer by how much. They are choices: medians of a run
of eight samples differ by some 1% on H200."""


class Took(NamedTuple):
    time: float

    def us(self) -> float:
        return self.time


class Learnt(NamedTuple):
    """The ratios of one shape."""

    model: float
    kept: float
    first_calls: float


def replay(product: Product, planner: Planner, draw: random.Random) -> Learnt | None:
    """What is learnt of a shape; None where the model's plan was not measured."""
    timed = {
        plan: us
        for plan in studies.candidates(planner, product.problem)
        if (us := time_of(product, plan)) is not None
    }
    model = planner.plan(product.problem)
    if model not in timed:
        return None
    plans = list(timed)
    study, spent = Study(product.problem, plans), 0.0
    for call in range(CALLS + 1):
        while study.is_due:
            study.agree([study.report()])
        if call == CALLS:
            break
        index = study.tried if study.is_open else None
        us = timed[plans[index] if index is not None else study.kept or model]
        spent += us
        if study.is_open:
            noisy = us * (1 + draw.gauss(0, NOISE) + SPIKE * (draw.random() < SPIKES))
            study.note(None if index is None else Took(noisy), product.problem)
    kept = timed[study.kept or model]
    best = product.best_us
    return Learnt(
        max(1.0, timed[model] / best), max(1.0, kept / best), spent / CALLS / timed[model]
    )


def show(label: str, found: Iterable[Learnt]) -> None:
    columns: list[Sequence[float]] = list(zip(*found, strict=True))
    if columns:
        told = ["/".join(f"{each:.3f}" for each in Figures.of(of)) for of in columns]
        tries = f"model ÷ best {told[0]}, kept ÷ best {told[1]}, first calls ÷ model {told[2]}"
        print(f"{label}, {len(columns[0])} shapes: {tries}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay what learning does on measured times.")
    parser.add_argument("paths", type=Path, nargs="+", help="files of benchmarks/plans.py")
    arguments = parser.parse_args()
    draw, found = random.Random(0), dict[str, list[Learnt]]()
    planners: dict[tuple[str, int], Planner] = {}
    for product in (product_of(entry) for path in arguments.paths for entry in read(path)):
        p = product.problem
        table = tables.packaged(p.gpu, p.world_size)
        planner = planners.setdefault(
            (p.gpu, p.world_size), Planner(cost_model.default_kernels, [table] if table else [])
        )
        learnt = replay(product, planner, draw)
        if learnt is not None:
            kind = formats.of(p.format).kind
            found.setdefault(f"{p.gpu}, {p.world_size} ranks, {p.op}, {kind}", []).append(learnt)
    for label, of in found.items():
        show(label, of)
    every = [one.first_calls for of in found.values() for one in of]
    if every:
        print(f"first calls ÷ model of all: {statistics.geometric_mean(every):.3f}")


if __name__ == "__main__":
    main()
