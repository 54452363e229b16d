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
from dataclasses import asdict, dataclass, replace
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
from agmm.planning.cost_model import At, Constants, Tiling, gpu_constants
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.testing.cases import make_operands
from benchmarks.alone import BANDS, CHUNKS, PIVOT, cases

ROOF = "torch.mm"
SPIN_US = 200.0
STEPS, MOST_STEPS = (0.15, 0.05, 0.02), 4
MOST_ERROR, MOST_LOST = 0.3, 0.5
"""The largest error of a prediction's logarithm, and of a choice's, that counts: more counts no
more."""
NEAR = 6.0
"""How fast the errors of kernels that are slower than the best count less."""
ALIKE = 0.02
"""Predictions that differ by so much share a choice e to 1."""
STAYS = 0.003
"""What a constant's change counts, times the square of its logarithm."""
ROWS_THAT_COUNT = 1.03
"""A row-major B that takes less longer is left out of the constants."""
FITTED = "fitted"  # a GPU's name
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


@dataclass(frozen=True)
class Call:
    """A product's, by a kernel."""

    problem: Problem
    splits: int
    product: int
    log_us: float
    """The logarithm of its time."""
    lost: float
    """What it takes more than the product's fastest call, as a logarithm."""
    weight: float
    """The weight of its error: nobody chooses a kernel that takes half as long again."""


class Fit:
    """Constants by coordinate descent on what a choice by them loses, in the mean of the products:
    the kernels that are predicted alike count by how alike they are, so that small steps show. The
    errors of predictions, and what changes, count a little.

    The constants so far are those given as FITTED's, also between the steps.
    """

    def __init__(self, found: Sweep, start: Constants) -> None:
        self.start = self.now = replace(start, sm_count=found.get("sm_count", start.sm_count))
        self.calls: dict[KernelConfig, list[Call]] = {}
        self.roofs: list[tuple[Problem, float]] = []
        for product, shape in enumerate(found["shapes"]):
            problem = _problem(shape)
            log_us = {name: math.log(us) for name, us in shape["us"].items()}
            self.roofs.append((problem, log_us.pop(ROOF)))
            best = min(log_us.values())
            for name, value in log_us.items():
                config = KernelConfig.parse(name)
                if config.is_streaming:  # whose constants are none of tiles
                    continue
                lost = value - best
                call = Call(
                    problem,
                    config.splits,
                    product,
                    value,
                    min(lost, MOST_LOST),
                    math.exp(-NEAR * math.expm1(lost)),
                )
                self.calls.setdefault(KernelConfig.parse(config.kernel), []).append(call)
        self._give(self.start)
        self._predicted = {kernel: self._predict(kernel) for kernel in self.calls}

    def _give(self, constants: Constants) -> None:
        gpu_constants.give(FITTED, constants)
        self.now = constants

    def _predict(self, kernel: KernelConfig) -> list[float]:
        return [math.log(predicted_us(c.problem, kernel, c.splits)) for c in self.calls[kernel]]

    def loss(self) -> float:
        products: list[list[tuple[float, float]]] = [[] for _ in self.roofs]
        errors = weights = 0.0
        for kernel, predicted in self._predicted.items():
            for call, log_us in zip(self.calls[kernel], predicted, strict=True):
                products[call.product].append((log_us, call.lost))
                errors += call.weight * min(abs(log_us - call.log_us), MOST_ERROR) ** 2
                weights += call.weight
        lost = 0.0
        for calls in products:
            least = min(log_us for log_us, _ in calls)
            shares = [math.exp((least - log_us) / ALIKE) for log_us, _ in calls]
            total = sum(share * each for share, (_, each) in zip(shares, calls, strict=True))
            lost += total / sum(shares)
        return lost / len(products) + errors / weights

    def _descend(
        self,
        get: Callable[[Constants], float],
        put: Callable[[float], Constants],
        kernels: Sequence[KernelConfig],
    ) -> None:
        """`put` makes what the constants are with another value; `kernels`: that it matters to."""
        usual = get(self.start)

        def at(tried: float) -> float:
            self._give(put(tried))
            self._predicted.update({kernel: self._predict(kernel) for kernel in kernels})
            return self.loss() + STAYS * math.log(tried / usual) ** 2

        value = get(self.now)
        best = at(value)
        for step in STEPS:
            for _ in range(MOST_STEPS):
                reached, tried = min((at(v), v) for v in (value * (1 + step), value / (1 + step)))
                if reached >= best - 1e-7:
                    break
                best, value = reached, tried
        at(value)

    def _of_kernel(self, name: str, kernel: KernelConfig, usual: float) -> None:
        base, of = self.now, kernel.kernel
        self._descend(
            lambda constants: float(getattr(constants, name).get(of, usual)),
            lambda value: changed(base, name, {**getattr(base, name), of: value}),
            [kernel],
        )

    def _scalar(self, name: str, kernels: Sequence[KernelConfig], most: float = math.inf) -> None:
        base = self.now
        self._descend(
            lambda constants: float(getattr(constants, name)),
            lambda value: changed(base, name, min(value, most)),
            kernels,
        )

    def _of_cluster(self, place: int, kernels: Sequence[KernelConfig]) -> None:
        base = self.now

        def put(value: float) -> Constants:
            once, each = base.cluster_split_us
            return replace(base, cluster_split_us=(once, value) if place else (value, each))

        self._descend(lambda constants: constants.cluster_split_us[place], put, kernels)

    def round(self) -> None:
        """Each constant once."""
        for kernel in self.calls:
            self._of_kernel("tflops_per_sm", kernel, self.start.other_tflops_per_sm)
            usual_us = self.start.tile_overhead_us[kernel.schedule]
            self._of_kernel("tile_overhead_us", kernel, usual_us)
            self._of_kernel("row_major_factor", kernel, 1.0)
        splitting = [kernel for kernel in self.calls if kernel.can_split]
        clusters = [kernel for kernel in splitting if kernel.splits_in_cluster]
        self._scalar("split_us", [kernel for kernel in splitting if kernel not in clusters])
        for place in (0, 1):
            self._of_cluster(place, clusters)
        for name in ("matmul_gb_per_s", "idle_gain"):
            self._scalar(name, list(self.calls))
        pingpong = [kernel for kernel in self.calls if kernel.schedule == "pingpong"]
        self._scalar("pingpong_overlap", pingpong, most=1.0)

    def finish(self) -> Constants:
        """What the library takes, on the squared errors, since it is not chosen by its constants;
        returns all constants."""
        factors = self.now.row_major_factor.items()
        kept = {name: factor for name, factor in factors if factor > ROWS_THAT_COUNT}
        self._give(replace(self.now, row_major_factor=kept))
        for name in ("matmul_tflops", "matmul_latency_us", "matmul_tflops"):
            self._roof(name)
        return self.now

    def _roof(self, name: str) -> None:
        base = self.now

        def at(value: float) -> float:
            self._give(changed(base, name, value))
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


def changed(constants: Constants, name: str, value: Any) -> Constants:
    change: dict[str, Any] = {name: value}
    return replace(constants, **change)


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


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.3g}") if value < 100 else round(value)
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


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
