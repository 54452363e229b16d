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
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

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
STEPS = (0.2, 0.05, 0.01)
MOST_ERROR = 0.3
"""Of a prediction's logarithm: larger ones count no more."""
FIRST_CALL_US = 6.0
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
            order = heuristics.usual_order(problem, kernel)
            for splits in legality.legal_splits(problem, kernel)[: heuristics.MAX_SPLITS]:
                config = replace(order, splits=splits)
                ways[replace(kernel, splits=splits).name] = partial(
                    async_input_mm.on_cuda, A, B, signals, PIVOT, config=config
                )
        timed = time_ways(ways, samples=samples, warmup=1, spin_us=SPIN_US, device=device)
        us = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        found["shapes"].append({"M": m, "N": n, "K": k, "b_layout": case.b_layout, "us": us})
    return found


class Fit:
    """Constants by coordinate descent on the squared logarithms of predicted ÷ measured."""

    def __init__(self, found: Sweep, start: Constants) -> None:
        self.now = start
        self.calls: dict[KernelConfig, list[tuple[Problem, int, float]]] = {}
        self.roofs: list[tuple[Problem, float]] = []
        for shape in found["shapes"]:
            problem = Problem(
                shape["M"], shape["N"], shape["K"], b_layout=shape["b_layout"], gpu=FITTED
            )
            for name, us in shape["us"].items():
                if name == ROOF:
                    self.roofs.append((problem, us))
                    continue
                config = KernelConfig.parse(name)
                calls = self.calls.setdefault(KernelConfig.parse(config.kernel), [])
                calls.append((problem, config.splits, us))
        self._give(start)

    def _give(self, constants: Constants) -> None:
        gpu_constants.give(FITTED, constants)
        self.now = constants

    def loss(self, kernels: list[KernelConfig], *, split: bool = False) -> float:
        """Of the kernels, each as much as another, with K split or whole."""
        total = 0.0
        for kernel in kernels:
            errors = [
                min(abs(math.log(predicted_us(problem, kernel, splits) / us)), MOST_ERROR) ** 2
                for problem, splits, us in self.calls[kernel]
                if (splits > 1) == split
            ]
            total += statistics.fmean(errors) if errors else 0.0
        return total / max(1, len(kernels))

    def roof_loss(self) -> float:
        return statistics.fmean(
            min(abs(math.log(cost_model.matmul_us(problem) / us)), MOST_ERROR) ** 2
            for problem, us in self.roofs
        )

    def _descend(
        self, value: float, put: Callable[[float], Constants], loss: Callable[[], float]
    ) -> None:
        def at(tried: float) -> float:
            self._give(put(tried))
            return loss()

        best = at(value)
        for step in STEPS:
            for _ in range(12):
                tried = min((value * (1 + step), value / (1 + step)), key=at)
                if (reached := at(tried)) >= best - 1e-9:
                    break
                value, best = tried, reached
        self._give(put(value))

    def _scalar(self, name: str, loss: Callable[[], float]) -> None:
        base = self.now
        self._descend(getattr(base, name), lambda value: changed(base, name, value), loss)

    def kernel(self, kernel: KernelConfig) -> None:
        for name, usual in (
            ("tflops_per_sm", self.now.other_tflops_per_sm),
            ("tile_overhead_us", self.now.tile_overhead_us[kernel.schedule]),
            ("row_major_factor", 1.0),
        ):
            base, values = self.now, getattr(self.now, name)

            def put(
                value: float, name: str = name, base: Constants = base, values: Any = values
            ) -> Constants:
                return changed(base, name, {**values, kernel.kernel: value})

            self._descend(values.get(kernel.kernel, usual), put, lambda: self.loss([kernel]))

    def _of_cluster(self, place: int, loss: Callable[[], float]) -> None:
        base = self.now

        def put(value: float) -> Constants:
            both = list(base.cluster_split_us)
            both[place] = value
            return replace(base, cluster_split_us=(both[0], both[1]))

        self._descend(base.cluster_split_us[place], put, loss)

    def run(self, rounds: int = 3) -> Constants:
        kernels = list(self.calls)
        # What every call has in common cannot be told from the kernels' own in small steps.
        self._give(replace(self.now, call_us=FIRST_CALL_US))
        for _ in range(rounds):
            for kernel in kernels:
                self.kernel(kernel)
            for name in ("call_us", "matmul_gb_per_s", "idle_gain"):
                self._scalar(name, lambda: self.loss(kernels))
        splitting = [kernel for kernel in kernels if kernel.can_split]
        clusters = [kernel for kernel in splitting if kernel.splits_in_cluster]
        others = [kernel for kernel in splitting if not kernel.splits_in_cluster]
        self._scalar("split_us", lambda: self.loss(others, split=True))
        for place in (0, 1, 0, 1):
            self._of_cluster(place, lambda: self.loss(clusters, split=True))
        for name in ("matmul_tflops", "matmul_latency_us", "matmul_tflops"):
            self._scalar(name, self.roof_loss)
        return self.now


def changed(constants: Constants, name: str, value: Any) -> Constants:
    change: dict[str, Any] = {name: value}
    return replace(constants, **change)


def predicted_us(problem: Problem, kernel: KernelConfig, splits: int) -> float:
    at, tiling = At(problem), Tiling(problem, replace(kernel, splits=splits))
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
