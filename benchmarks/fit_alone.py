"""The cost model's constants of the matmul alone, for the card at hand: every kernel of the build
beside torch.mm on the shapes of `benchmarks/alone.py`, then a fit.

    python -m benchmarks.fit_alone --json sweep.json --write
    python -m benchmarks.fit_alone --from sweep.json

`--write` puts them where plans are made with them: `tables/<gpu>.json` of the agmm that is
imported. What one GPU cannot tell (links, gathers, scatters) stays as the file has it, or as that
of the GPU whose constants stand in. All ranks of a group need the same file.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from agmm.bench.timer import time_ways
from agmm.cli.terminal import console
from agmm.errors import InvalidArgument
from agmm.ops import async_input_mm
from agmm.planning import call_plans, cost_model, heuristics, legality, tables
from agmm.planning.cost_model import At, Constants, Tiling, gpu_constants
from agmm.planning.plans import KernelConfig, Problem
from agmm.testing.cases import make_operands
from benchmarks.alone import BANDS, CHUNKS, PIVOT, cases

ROOF = "torch.mm"
SPIN_US = 200.0
STEPS = (0.15, 0.05, 0.02)
MOST_ERROR, MOST_LOST = 0.3, 0.5
"""Of a prediction's logarithm, and of a choice's: more counts no more."""
NEAR = 6.0
"""How fast the errors of kernels that are slower than the best count less."""
ALIKE = 0.02
"""Predictions that differ by so much share a choice e to 1."""
STAYS = 0.003
"""What a constant's change counts, times the square of its logarithm."""
FITTED = "fitted"  # a GPU's name
Sweep = dict[str, Any]


def sweep(count: int, seed: int, samples: int, limit_s: float) -> Sweep:
    """Times every kernel in its usual order, with K in every legal number of parts."""
    device = torch.device("cuda", torch.cuda.current_device())
    signals = torch.ones(CHUNKS, dtype=torch.int32, device=device).view(torch.uint32)
    kernels = [kernel for kernel in call_plans.kernels() if not kernel.timed]
    found: Sweep = {"gpu": torch.cuda.get_device_name(), "shapes": []}
    begin = time.monotonic()
    for case in cases(count, seed):
        if time.monotonic() - begin > limit_s:
            break
        operands = make_operands(case.shape, 0, 1, dtype=torch.bfloat16, device=device)
        A, B = operands.A, operands.B
        if case.b_layout == "row":
            B = B.contiguous()
        m, n, k = case.shape.M, case.shape.N, case.shape.K
        problem = Problem(m, n, k, b_layout=case.b_layout)
        ways: dict[str, Callable[[], Any]] = {ROOF: partial(torch.mm, A, B)}
        for kernel in kernels:
            order = _ordered(problem, heuristics.usual_order(problem, kernel))
            for splits in legality.legal_splits(problem, kernel)[: heuristics.MAX_SPLITS]:
                config = replace(order, splits=splits)
                ways[replace(kernel, splits=splits).name] = partial(
                    async_input_mm.on_cuda, A, B, signals, PIVOT, config=config
                )
        timed = time_ways(ways, samples=samples, warmup=1, spin_us=SPIN_US, device=device)
        us = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        found["shapes"].append({"M": m, "N": n, "K": k, "b_layout": case.b_layout, "us": us})
    return found


def _ordered(problem: Problem, kernel: KernelConfig) -> KernelConfig:
    """As `_async_input_mm` orders the tiles of chunks."""
    return replace(kernel, across=heuristics.reads_b_across(problem, kernel, CHUNKS))


@dataclass(frozen=True)
class Call:
    """One of a product's, by a kernel, with its logarithms of measured times."""

    problem: Problem
    splits: int
    product: int
    us: float
    """Its logarithm, as that of the fastest call of its product."""
    best_us: float

    @property
    def weight(self) -> float:
        """Of its error: nobody chooses a kernel that takes half as long again."""
        return math.exp(-NEAR * math.expm1(self.us - self.best_us))


class Fit:
    """Constants by coordinate descent on what a choice by them loses, in the mean of the products:
    the kernels that are predicted alike count by how alike they are, so that small steps show. The
    errors of predictions, and what changes, count a little."""

    def __init__(self, found: Sweep, start: Constants) -> None:
        self.start = self.now = start
        self.calls: dict[KernelConfig, list[Call]] = {}
        self.roofs: list[tuple[Problem, float]] = []
        for i, shape in enumerate(found["shapes"]):
            problem = Problem(
                shape["M"], shape["N"], shape["K"], b_layout=shape["b_layout"], gpu=FITTED
            )
            us = {name: math.log(value) for name, value in shape["us"].items()}
            self.roofs.append((problem, us.pop(ROOF)))
            for name, value in us.items():
                config = KernelConfig.parse(name)
                call = Call(problem, config.splits, i, value, min(us.values()))
                self.calls.setdefault(KernelConfig.parse(config.kernel), []).append(call)
        gpu_constants.give(FITTED, start)
        self._predicted = {kernel: self._predict(kernel) for kernel in self.calls}

    def _predict(self, kernel: KernelConfig) -> list[float]:
        return [math.log(predicted_us(c.problem, kernel, c.splits)) for c in self.calls[kernel]]

    def loss(self) -> float:
        products: list[list[tuple[float, float]]] = [[] for _ in self.roofs]
        errors = weights = 0.0
        for kernel, predicted in self._predicted.items():
            for call, us in zip(self.calls[kernel], predicted, strict=True):
                products[call.product].append((us, min(call.us - call.best_us, MOST_LOST)))
                errors += call.weight * min(abs(us - call.us), MOST_ERROR) ** 2
                weights += call.weight
        lost = 0.0
        for calls in products:
            least = min(us for us, _ in calls)
            shares = [math.exp((least - us) / ALIKE) for us, _ in calls]
            lost += sum(share * each for share, (_, each) in zip(shares, calls, strict=True)) / sum(
                shares
            )
        return lost / len(products) + errors / weights

    def _descend(
        self,
        value: float,
        put: Callable[[float], Constants],
        kernels: Iterable[KernelConfig],
        usual: float,
    ) -> None:
        def at(tried: float) -> float:
            gpu_constants.give(FITTED, put(tried))
            self._predicted.update({kernel: self._predict(kernel) for kernel in kernels})
            return self.loss() + STAYS * math.log(tried / usual) ** 2

        kernels = list(kernels)
        best = at(value)
        for step in STEPS:
            for _ in range(4):
                tried = min((value * (1 + step), value / (1 + step)), key=at)
                if (reached := at(tried)) >= best - 1e-7:
                    break
                value, best = tried, reached
        at(value)
        self.now = put(value)

    def _kernel(self, kernel: KernelConfig) -> None:
        for name, usual in (
            ("tflops_per_sm", self.start.other_tflops_per_sm),
            ("tile_overhead_us", self.start.tile_overhead_us[kernel.schedule]),
            ("row_major_factor", 1.0),
        ):
            base, values = self.now, getattr(self.now, name)

            def put(
                value: float, name: str = name, base: Constants = base, values: Any = values
            ) -> Constants:
                return changed(base, name, {**values, kernel.kernel: value})

            first = getattr(self.start, name).get(kernel.kernel, usual)
            self._descend(values.get(kernel.kernel, usual), put, [kernel], first)

    def _of_cluster(self, place: int, kernels: Iterable[KernelConfig]) -> None:
        base = self.now

        def put(value: float) -> Constants:
            both = list(base.cluster_split_us)
            both[place] = value
            return replace(base, cluster_split_us=(both[0], both[1]))

        both, first = base.cluster_split_us, self.start.cluster_split_us
        self._descend(both[place], put, kernels, first[place])

    def _roof(self, name: str) -> None:
        """The library's, whose calls are not chosen among: on the squared errors."""

        def at(value: float) -> float:
            gpu_constants.give(FITTED, changed(self.now, name, value))
            return statistics.fmean(
                min(abs(math.log(cost_model.matmul_us(problem)) - us), MOST_ERROR) ** 2
                for problem, us in self.roofs
            )

        value = getattr(self.now, name)
        for step in STEPS:
            for _ in range(12):
                tried = min((value * (1 + step), value / (1 + step)), key=at)
                if at(tried) >= at(value):
                    break
                value = tried
        self.now = changed(self.now, name, value)

    def run(self, rounds: int = 4) -> Constants:
        splitting = [kernel for kernel in self.calls if kernel.can_split]
        for _ in track(range(rounds), "fitting", console=console()):
            for kernel in self.calls:
                self._kernel(kernel)
            base = self.now
            self._descend(
                base.split_us,
                lambda value, base=base: replace(base, split_us=value),  # type: ignore[misc]
                [kernel for kernel in splitting if not kernel.splits_in_cluster],
                self.start.split_us,
            )
            for place in (0, 1):
                self._of_cluster(place, [k for k in splitting if k.splits_in_cluster])
        for name in ("matmul_tflops", "matmul_latency_us", "matmul_tflops"):
            self._roof(name)
        gpu_constants.give(FITTED, self.now)
        return self.now


def changed(constants: Constants, name: str, value: Any) -> Constants:
    change: dict[str, Any] = {name: value}
    return replace(constants, **change)


def predicted_us(problem: Problem, kernel: KernelConfig, splits: int) -> float:
    config = _ordered(problem, replace(kernel, splits=splits))
    at, tiling = At(problem), Tiling(problem, config)
    return at.fused_us(tiling, at.load(tiling), "push")


def regret(found: Sweep) -> list[list[str]]:
    """By rows: the chosen and the best kernel ÷ torch.mm, geometric means."""
    table = []
    for lowest, highest in BANDS:
        chosen, best = [], []
        for shape in found["shapes"]:
            if not lowest <= shape["M"] <= highest:
                continue
            problem = Problem(
                shape["M"], shape["N"], shape["K"], b_layout=shape["b_layout"], gpu=FITTED
            )
            configs = {n: KernelConfig.parse(n) for n in shape["us"] if n != ROOF}
            name = min(configs, key=lambda n: predicted_us(problem, configs[n], configs[n].splits))
            roof = shape["us"][ROOF]
            chosen.append(shape["us"][name] / roof)
            best.append(min(shape["us"][n] for n in configs) / roof)
        if chosen:
            means = (statistics.geometric_mean(chosen), statistics.geometric_mean(best))
            row = [f"{lowest} to {highest}", str(len(chosen)), *(f"{v:.3f}" for v in means)]
            table.append(row)
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
    limit_s: Annotated[float, typer.Option(help="Begin no shape later than so.")] = math.inf,
    from_path: Annotated[
        Path | None, typer.Option("--from", help="A sweep of this; nothing is measured.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
    writes: Annotated[bool, typer.Option("--write", help="Keep the constants.")] = False,
) -> None:
    """Time every kernel alone on one GPU, and fit the cost model's constants to that."""
    if from_path is not None:
        found = json.loads(from_path.read_text(encoding="utf-8"))
    else:
        found = sweep(count, seed, samples, limit_s)
    if json_path is not None:
        json_path.write_text(json.dumps(found), encoding="utf-8")
    if not found["shapes"]:
        raise InvalidArgument("sweep: found no shapes, wanted some")
    gpu = tables.gpu_name(found["gpu"])
    fit = Fit(found, cost_model.constants(gpu))
    before = regret(found)
    constants = replace(fit.run(), gpu=gpu)
    console().print("rows, calls, chosen and best kernel ÷ torch.mm; then by the constants so far")
    for row, old in zip(regret(found), before, strict=True):
        console().print("  ".join([*row, old[2]]))
    if writes:
        folder = Path(tables.__file__).parent
        place = folder / f"{gpu}.json"
        place.write_text(json.dumps(rounded(asdict(constants)), indent=2) + "\n", encoding="utf-8")
        console().print(f"written to {place}")


if __name__ == "__main__":
    typer.run(main)
