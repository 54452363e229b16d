"""The cost model's constants of the library's matmul, for a GPU, a number of ranks and both kinds
of operands: fitted to the times of the matmul alone that `benchmarks/plans.py` took of shapes to
fit to, judged on the shapes that it held back.

    python -m benchmarks.fit_library plans.jsonl more.jsonl
    python -m benchmarks.fit_library plans.jsonl --write

Of the tiles that the library may have those are kept without which the fit would be worse, so many
as a prediction has time for. `--write` puts the constants into `tables/<gpu>.json` of the agmm that
is imported, under "of_ranks", where a call takes some 2 µs longer than on a GPU alone. The margins
of plans then have to be fitted anew: `python -m benchmarks.fit_plans plans.jsonl --only-margins
--write`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agmm.planning import cost_model, formats, tables
from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.cost_model.library_matmul import is_badly_chosen
from agmm.planning.problems import Problem
from benchmarks.descent import FITTED, MOST_STEPS, STEPS, rounded
from benchmarks.measured_plans import Cell, product_of
from benchmarks.plans import Entry, read

ROWS = (32, 48, 64, 96, 128, 160, 192, 224, 256, 320)
COLUMNS = (64, 128, 192, 256)
MOST_ELEMENTS = 128 * 256
"""The rows and columns of tiles that are tried, and the most elements of one: the library's kernels
have such names on Hopper, and larger sums do not fit into the registers."""
KEPT_TILES = 8
"""How many tiles are kept. It is a choice: a prediction takes 10 µs with so many, and the error on
shapes that are held back is the same with 34."""
BEGIN = {
    "tflops_per_sm": 7.0,
    "gb_per_s_and_sm": 90.0,
    "tile_us": 2.0,
    "latency_us": 3.0,
    "gb_per_s": 3600.0,
    "split_us": 1.0,
    "each_split_us": 1.0,
    "idle_gain": 0.3,
    "smoothing": 0.7,
    "sharpness": 4.0,
    "badly_chosen_factor": 1.0,
}
"""The values from which a fit begins; rates of fp8 operands are twice as high."""
MOST = {"idle_gain": 0.6, "smoothing": 0.95, "sharpness": 8.0, "tflops_per_sm": 30.0}
LEAST = {"split_us": 0.05, "each_split_us": 0.05, "idle_gain": 0.001, "smoothing": 0.01}
"""The bounds of what the times say little of."""
MOST_ERROR = 0.3
"""The error of a prediction, as a logarithm, from which on a larger one counts no more: the library
takes up to twice as long as its tiles say where it chooses badly, which no constant of tiles is to
explain."""
BANDS = ((64, 256), (257, 1024), (1025, 8192))
QUANTILES = (0.03, 0.5, 0.97)


class Roof(NamedTuple):
    """What the library's matmul took, of one shape."""

    problem: Problem
    us: float
    is_held: bool


def roofs(entries: Iterable[Entry]) -> dict[Cell, list[Roof]]:
    """The times of both ops' matmuls, which are all rows' on one GPU. A shape that was measured
    several times has the median, and is held back where one of them was."""
    found: dict[Cell, dict[Problem, list[Roof]]] = {}
    for entry in entries:
        product, us = product_of(entry), entry["roof_us"]
        p = product.problem
        one = Problem(p.m, p.n, p.k, format=p.format, gpu=FITTED)
        cell = Cell(p.gpu, p.world_size, formats.of(p.format).kind)
        if us > 0:
            roof = Roof(one, us, product.is_held)
            found.setdefault(cell, {}).setdefault(one, []).append(roof)
    return {
        cell: [
            Roof(p, statistics.median(r.us for r in of), any(r.is_held for r in of))
            for p, of in by_problem.items()
        ]
        for cell, by_problem in found.items()
    }


def ratios(of: Sequence[Roof], predict: Callable[[Problem], float]) -> list[float]:
    """The measured times ÷ the predicted ones."""
    return [roof.us / predict(roof.problem) for roof in of]


class Fit:
    """The library's constants so far, given as FITTED's."""

    def __init__(self, base: Constants, fitted_to: Sequence[Roof]) -> None:
        self._base, self._fitted_to = base, fitted_to
        self.tiles = [
            (rows, columns)
            for rows in ROWS
            for columns in COLUMNS
            if rows * columns <= MOST_ELEMENTS
        ]
        twice = 2.0 if base.matmul_rate_factor > 1 else 1.0
        rates = {"tflops_per_sm": twice * BEGIN["tflops_per_sm"]}
        self.now: dict[str, float] = {**BEGIN, **rates}

    def loss(self, now: dict[str, float], tiles: Sequence[tuple[int, int]]) -> float:
        gpu_constants.give(FITTED, replace(self._base, library=now, library_tiles=tiles))
        errors = [abs(math.log(one)) for one in ratios(self._fitted_to, cost_model.matmul_us)]
        return statistics.fmean(min(error, MOST_ERROR) ** 1.5 for error in errors)

    def descend(self, steps: Sequence[float] = STEPS) -> None:
        """Each constant by itself, in smaller and smaller steps, while that helps."""
        best = self.loss(self.now, self.tiles)
        for step in steps:
            for _ in range(MOST_STEPS):
                before = best
                for name, factor in [(n, f) for n in BEGIN for f in (1 + step, 1 / (1 + step))]:
                    if name == "badly_chosen_factor":
                        continue
                    value = self.now[name] * factor
                    value = min(MOST.get(name, math.inf), max(LEAST.get(name, 0.0), value))
                    tried = {**self.now, name: value}
                    found = self.loss(tried, self.tiles)
                    if found < best - 1e-7:
                        best, self.now = found, tried
                if best == before:
                    break

    def drop_tiles(self) -> None:
        """Leave out one tile after the other, each time the one that matters least."""
        while len(self.tiles) > KEPT_TILES:
            rest = [[t for t in self.tiles if t != tile] for tile in self.tiles]
            self.tiles = min(rest, key=lambda tiles: self.loss(self.now, tiles))

    def finish(self) -> Constants:
        """The mean of what badly chosen kernels take longer is what is to be expected of them."""
        chosen = {**self.now, "badly_chosen_factor": 1.0}
        self.loss(chosen, self.tiles)
        longer = ratios(badly_chosen(self._fitted_to), cost_model.matmul_us)
        if longer:
            chosen["badly_chosen_factor"] = max(1.0, statistics.fmean(longer))
        self.now = {name: float(rounded(value)) for name, value in chosen.items()}
        self.loss(self.now, self.tiles)
        return cost_model.constants(FITTED)


def badly_chosen(of: Sequence[Roof]) -> list[Roof]:
    """The products for which the library may choose a bad kernel."""
    return [
        roof
        for roof in of
        if is_badly_chosen(roof.problem.m) and not cost_model.is_b_in_l2(roof.problem)
    ]


def show(label: str, of: Sequence[Roof], predict: Callable[[Problem], float]) -> None:
    """Print how far off the predictions are, in bands of rows."""
    for lowest, highest in BANDS:
        found = [roof for roof in of if lowest <= roof.problem.m <= highest]
        if len(found) < 2:
            continue
        logs = sorted(map(math.log, ratios(found, predict)))
        at = [math.exp(logs[min(len(logs) - 1, int(q * len(logs)))]) for q in QUANTILES]
        told = " ".join(f"{ratio:.3f}" for ratio in at)
        print(
            f"  {label}, {lowest} to {highest} rows, {len(found)} shapes: spread "
            f"{statistics.pstdev(logs):.3f}; 3%, median, 97%: {told}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of the library's matmul.")
    parser.add_argument("paths", type=Path, nargs="+", help="files of benchmarks/plans.py")
    parser.add_argument("--write", action="store_true", help="keep the constants")
    arguments = parser.parse_args()
    entries = [entry for path in arguments.paths for entry in read(path)]
    for cell, found in roofs(entries).items():
        fitted_to = [roof for roof in found if not roof.is_held]
        held = [roof for roof in found if roof.is_held]
        print(f"{cell.gpu}, {cell.world_size} ranks, {cell.kind}: measured ÷ predicted")
        base = gpu_constants.constants_of_kind(cell.gpu, cell.kind, cell.world_size)
        one = Fit(replace(base, gpu=FITTED, formats={}, of_ranks={}), fitted_to)
        one.descend()
        one.drop_tiles()
        one.descend(STEPS[1:])
        fitted = one.finish()
        for which, of in (("fit", fitted_to), ("held", held)):
            show(f"{which}, roof", of, cost_model.roof_us)
            show(f"{which}, tiles", of, cost_model.matmul_us)
        print(json.dumps({"library": fitted.library, "library_tiles": fitted.library_tiles}))
        if arguments.write:
            write(cell, fitted)


def write(cell: Cell, fitted: Constants) -> None:
    """Put them into the GPU's file."""
    path = Path(tables.__file__).parent / f"{cell.gpu}.json"
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    of_ranks = written.setdefault("of_ranks", {}).setdefault(str(cell.world_size), {})
    of_kind = of_ranks.setdefault(cell.kind, {})
    of_kind |= {"library": fitted.library, "library_tiles": fitted.library_tiles}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
