"""The cost model's constants of the matmul alone, for the card at hand: every kernel of the build
beside torch.mm on the shapes of `benchmarks/alone.py`, then a fit.

    python -m benchmarks.fit_alone --json sweep.json --write
    python -m benchmarks.fit_alone --from sweep.json --judge other.json

`--write` puts them where plans are made with them: `tables/<gpu>.json` of the agmm that is
imported. What one GPU cannot tell (links, gathers, scatters), how its clock falls in long calls and
the size of its L2 cache stay as the file has them, or as those of the GPU whose constants stand in.
`--judge` takes a sweep by another `--seed`, to see what the constants are worth on other products.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import track

from agmm.bench.timer import time_ways
from agmm.cli.terminal import console
from agmm.errors import InvalidArgument
from agmm.ops import async_input_mm
from agmm.planning import call_plans, cost_model, heuristics, legality, tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.cost_model import At, Constants, Tiling
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.testing.cases import make_operands
from benchmarks.alone import BANDS, CHUNKS, PIVOT, cases
from benchmarks.descent import (
    FITTED,
    MOST_ERROR,
    MOST_STEPS,
    STEPS,
    Call,
    Descent,
    changed,
    rounded,
)

ROOF = "torch.mm"
SPIN_US = 200.0
ROWS_THAT_COUNT = 1.03
"""A row-major B that takes less longer is left out of the constants."""
FITTED_NAMES = (
    "tflops_per_sm, tile_overhead_us, pingpong_overlap, row_major_factor, split_us, "
    "cluster_split_us, matmul_gb_per_s, idle_gain, matmul_tflops and matmul_latency_us"
)
Sweep = dict[str, Any]


def sweep(count: int, seed: int, samples: int, limit_s: float) -> Sweep:
    """Times every kernel in its usual order, with K in every legal number of parts."""
    device = torch.device("cuda", torch.cuda.current_device())
    signals = torch.ones(CHUNKS, dtype=torch.int32, device=device).view(torch.uint32)
    kernels = kernels_of(ALL_GATHER_MATMUL, "bfloat16")
    found: Sweep = {
        "gpu": torch.cuda.get_device_name(),
        "sm_count": call_plans.device_facts(device)[1],
        "shapes": [],
    }
    begin = time.monotonic()
    for case in cases(count, seed):
        if time.monotonic() - begin > limit_s:
            break
        operands = make_operands(case.shape, 0, 1, dtype=torch.bfloat16, device=device)
        A, B = operands.A, operands.B
        if case.b_layout == "row":
            B = B.contiguous()
        m, n, k = case.shape.M, case.shape.N, case.shape.K
        problem = call_plans.problem_of(
            (m, n, k), torch.bfloat16, device, column_major=case.b_layout == "column"
        )
        ways: dict[str, Callable[[], Any]] = {ROOF: partial(torch.mm, A, B)}
        for kernel in kernels:
            usual = heuristics.usual_order(problem, kernel)
            order = heuristics.across_chunks(problem, usual, CHUNKS)
            for splits in legality.legal_splits(problem, kernel)[: heuristics.MAX_SPLITS]:
                config = replace(order, splits=splits)
                ways[replace(kernel, splits=splits).name] = partial(
                    async_input_mm.on_cuda, A, B, signals, PIVOT, config=config
                )
        timed = time_ways(ways, samples=samples, warmup=1, spin_us=SPIN_US, device=device)
        us = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        found["shapes"].append({"M": m, "N": n, "K": k, "b_layout": case.b_layout, "us": us})
    return found


class Fit(Descent[KernelConfig]):
    """The constants of the matmul alone, fitted to a sweep; splits of K are how a call is made."""

    def __init__(self, found: Sweep, start: Constants) -> None:
        calls: dict[KernelConfig, list[Call]] = {}
        self.roofs: list[tuple[Problem, float]] = []
        for product, shape in enumerate(found["shapes"]):
            problem, us = _problem(shape), dict(shape["us"])
            self.roofs.append((problem, math.log(us.pop(ROOF))))
            best_us = min(us.values())
            for name, value in us.items():
                config = KernelConfig.parse(name)
                if config.is_streaming:  # whose constants are none of tiles
                    continue
                call = Call.of(problem, product, value, best_us, config.splits)
                calls.setdefault(KernelConfig.parse(config.kernel), []).append(call)
        super().__init__(
            replace(start, sm_count=found.get("sm_count", start.sm_count)),
            calls,
            len(self.roofs),
            lambda kernel, of: [predicted_us(c.problem, kernel, c.how) for c in of],
        )

    def _of_cluster(self, place: int, kernels: Sequence[KernelConfig]) -> None:
        base = self.now

        def put(value: float) -> Constants:
            once, each = base.cluster_split_us
            return replace(base, cluster_split_us=(once, value) if place else (value, each))

        self.descend(lambda constants: constants.cluster_split_us[place], put, kernels)

    def round(self) -> None:
        """Each constant once."""
        for kernel in self.calls:
            of, one = kernel.kernel, [kernel]
            self.in_dict("tflops_per_sm", of, one, self.start.other_tflops_per_sm)
            usual_us = self.start.tile_overhead_us[kernel.schedule]
            self.in_dict("tile_overhead_us", of, one, usual_us)
            self.in_dict("row_major_factor", of, one, 1.0)
        splitting = [kernel for kernel in self.calls if kernel.can_split]
        clusters = [kernel for kernel in splitting if kernel.splits_in_cluster]
        self.scalar("split_us", [kernel for kernel in splitting if kernel not in clusters])
        for place in (0, 1):
            self._of_cluster(place, clusters)
        for name in ("matmul_gb_per_s", "idle_gain"):
            self.scalar(name, list(self.calls))
        pingpong = [kernel for kernel in self.calls if kernel.schedule == "pingpong"]
        self.scalar("pingpong_overlap", pingpong, most=1.0)

    def finish(self) -> Constants:
        """What the library takes, on the squared errors, since it is not chosen by its constants;
        returns all constants."""
        factors = self.now.row_major_factor.items()
        kept = {name: factor for name, factor in factors if factor > ROWS_THAT_COUNT}
        self.give(replace(self.now, row_major_factor=kept))
        for name in ("matmul_tflops", "matmul_latency_us", "matmul_tflops"):
            self._roof(name)
        return self.now

    def _roof(self, name: str) -> None:
        base = self.now

        def at(value: float) -> float:
            self.give(changed(base, name, value))
            return statistics.fmean(
                min(abs(math.log(cost_model.matmul_us(problem)) - log_us), MOST_ERROR) ** 2
                for problem, log_us in self.roofs
            )

        value = getattr(base, name)
        best = at(value)
        for step in STEPS:
            for _ in range(3 * MOST_STEPS):
                reached, tried = min((at(v), v) for v in (value * (1 + step), value / (1 + step)))
                if reached >= best:
                    break
                best, value = reached, tried
        at(value)


def _problem(shape: dict[str, Any]) -> Problem:
    return Problem(shape["M"], shape["N"], shape["K"], b_layout=shape["b_layout"], gpu=FITTED)


def predicted_us(problem: Problem, kernel: KernelConfig, splits: int) -> float:
    at, tiling = At(problem), Tiling(problem, replace(kernel, splits=splits))
    return at.fused_us(tiling, at.load(tiling), is_pull=False)


class Regret(NamedTuple):
    """Geometric means of time ÷ torch.mm over the products of a band of rows."""

    lowest: int
    highest: int
    products: int
    chosen: float
    """By the constants that FITTED has."""
    best: float


def regret(found: Sweep) -> list[Regret]:
    table = []
    for lowest, highest in BANDS:
        chosen, best = [], []
        for shape in found["shapes"]:
            if not lowest <= shape["M"] <= highest:
                continue
            problem, us = _problem(shape), dict(shape["us"])
            roof = us.pop(ROOF)
            configs = {name: KernelConfig.parse(name) for name in us}
            name = min(us, key=lambda n: predicted_us(problem, configs[n], configs[n].splits))
            chosen.append(us[name] / roof)
            best.append(min(us.values()) / roof)
        if chosen:
            means = statistics.geometric_mean(chosen), statistics.geometric_mean(best)
            table.append(Regret(lowest, highest, len(chosen), *means))
    return table


def main(
    count: Annotated[int, typer.Option(min=1, help="Shapes, each with both layouts.")] = 120,
    seed: Annotated[int, typer.Option(help="Of the shapes.")] = 0,
    samples: Annotated[int, typer.Option(min=1)] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Of the fit.")] = 4,
    limit_s: Annotated[float, typer.Option(help="Begin no shape later than so.")] = math.inf,
    from_path: Annotated[
        Path | None, typer.Option("--from", help="A sweep of this; nothing is measured.")
    ] = None,
    judge_path: Annotated[
        Path | None, typer.Option("--judge", help="A sweep of this to choose for, not to fit to.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
    writes: Annotated[bool, typer.Option("--write", help="Keep the constants.")] = False,
) -> None:
    """Time every kernel alone on one GPU, and fit the cost model's constants to that."""
    found = sweep(count, seed, samples, limit_s) if from_path is None else _read(from_path)
    if json_path is not None:
        json_path.write_text(json.dumps(found), encoding="utf-8")
    judged = found if judge_path is None else _read(judge_path)
    for name, each in (("sweep", found), ("--judge", judged)):
        if not each["shapes"]:
            raise InvalidArgument(f"{name}: found no shapes, wanted some")
    gpu = tables.gpu_name(found["gpu"])
    fit = Fit(found, cost_model.constants(gpu))
    before = regret(judged)
    for _ in track(range(rounds), "fitting", console=console(stderr=True)):
        fit.round()
    constants = replace(fit.finish(), gpu=gpu)
    console().print("rows, products, chosen ÷ torch.mm so far and now, best ÷ torch.mm")
    for old, new in zip(before, regret(judged), strict=True):
        console().print(
            f"{new.lowest} to {new.highest}  {new.products}  "
            f"{old.chosen:.3f}  {new.chosen:.3f}  {new.best:.3f}"
        )
    if writes:
        place = Path(tables.__file__).parent / f"{gpu}.json"
        sources = (
            f"{FITTED_NAMES}: by benchmarks/fit_alone.py, to {len(found['shapes'])} products on "
            f"one {found['gpu']}. All else as before: {constants.sources}"
        )
        kept = rounded(asdict(replace(constants, sources=sources)))
        place.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        console().print(f"written to {place}")


def _read(path: Path) -> Sweep:
    found: Sweep = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    typer.run(main)
