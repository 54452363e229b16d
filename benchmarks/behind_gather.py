"""The matmul behind agmm's gather, on one GPU: the library's, the best few of agmm's kernels, and
the one that the plan for several ranks takes, of drawn shapes whose A the gather kernel can carry.

What the gather itself takes is the same for all of them and is left out, so no peer is needed.

    python -m benchmarks.behind_gather
    python -m benchmarks.behind_gather --seed 7 --ranks 2 --json behind_gather.json

It prints, for each format, by how much longer than the fastest of all of them each choice takes:
the geometric mean, the 97th percentile and the largest. Below stand the worst shapes of the plan,
with what was predicted.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from agmm.bench.candidates import candidates
from agmm.bench.timer import time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import async_input_mm, async_input_scaled_mm, scaled_products
from agmm.planning import call_plans, legality, tables
from agmm.planning.built_kernels import kernels_of
from agmm.planning.cost_model import behind_gather, margin_of, matmul_us
from agmm.planning.op_plans import rated_us
from agmm.planning.plans import GATHERED, GATHERED_TO_KERNEL, UNFUSED, Plan
from agmm.planning.predictions import predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.planning.shapes import Shape
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import BY_NAME
from benchmarks.measured_plans import NAMES
from benchmarks.plans import FORMATS, Cell, drawn

LIBRARY, BEST, MODELS, PLANNED = "library", "best kernel", "kernel of the model", "plan"
CHOICES = (LIBRARY, BEST, MODELS, PLANNED)
HELD_SEED = 2_000_000
"""The seed of shapes that no constants were fitted to, nor judged by."""
SPIN_US = 200.0
"""The time in which the GPU is busy while a host enqueues a call."""
WORST = 5


class Figures(NamedTuple):
    """Times of a choice ÷ those of the fastest of all."""

    mean: float
    percentile_97: float
    largest: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Figures:
        ordered = sorted(ratios)
        place = math.ceil(0.97 * len(ordered)) - 1
        return cls(statistics.geometric_mean(ordered), ordered[place], ordered[-1])


def shapes(name: str, seed: int, ranks: int, gpu: str) -> Iterator[Problem]:
    """Yield problems of a format whose rows agmm's gather can carry, without an end."""
    for shape in drawn(Cell(ALL_GATHER_MATMUL, name), seed, ranks):
        problem = Problem(*shape, format=NAMES[name], world_size=ranks, gpu=gpu)
        if legality.why_illegal(problem, GATHERED, ()) is None:
            yield problem


def plans_of(problem: Problem) -> list[Plan]:
    """The plans that gather first: by the library, or for fp8 by the kernel of one rank's planner,
    and by the best few kernels."""
    kernels = kernels_of(problem.op, problem.format)
    found = candidates(problem, kernels, UNFUSED)
    return [GATHERED, *(plan for plan in found if plan.family == GATHERED_TO_KERNEL)]


def chosen(problem: Problem, plans: Sequence[Plan]) -> Plan:
    """The one that is rated as the fastest, as a planner without tables rates them. It takes no
    kernel where nobody has compared such plans."""
    if margin_of(problem, GATHERED_TO_KERNEL) is None:
        return GATHERED
    return min(plans, key=lambda plan: rated_us(problem, plan, predict_us(problem, plan) or 0.0))


def operands(shape: Shape, name: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A and B by column, and scales of their rows and columns where they are fp8."""
    draw = torch.Generator(device).manual_seed(0)
    dtype, _ = FORMATS[name]
    A = torch.randn(shape.M, shape.K, generator=draw, device=device).to(dtype)
    B = torch.randn(shape.N, shape.K, generator=draw, device=device).to(dtype).t()
    if name == "bf16":
        return A, B
    scales = (
        torch.rand(size, generator=draw, device=device) + 0.5
        for size in ((shape.M, 1), (1, shape.N))
    )
    return A, B, *scales


def calls(name: str, given: tuple[torch.Tensor, ...]) -> tuple[Callable[[], Any], Any]:
    """The library's call, and a function that makes that of a kernel, or for None of the planner's
    kernel."""
    if name == "bf16":
        A, B = given
        return partial(torch.mm, A, B), lambda kernel: async_input_mm.on_cuda(
            A, B, None, 0, config=kernel
        )
    A, B, scale_a, scale_b = given
    kind = BY_NAME["rowwise"]
    scales = [
        scaled_products.as_torch_wants_it(one)
        for one in (Scaled(A, scale_a, kind.a), Scaled(B, scale_b, kind.b))
    ]
    by_library = partial(
        torch.ops.aten._scaled_mm.default, A, B, *scales, None, None, torch.bfloat16, True
    )
    return by_library, lambda kernel: async_input_scaled_mm.on_cuda(
        (A, B, scale_a, scale_b), None, 0, fast_accum=True, config=kernel
    )


def measure(problem: Problem, name: str, samples: int, device: torch.device) -> dict[str, Any]:
    """The times of the library and of all kernels, and which the plan takes."""
    plans = plans_of(problem)
    shape = Shape(problem.m, problem.n, problem.k)
    by_library, by_kernel = calls(name, operands(shape, name, device))
    ways: dict[str, Callable[[], Any]] = {LIBRARY: by_library}
    kernels: dict[Plan, str] = {}
    for plan in plans:
        if plan.kernel is not None:
            kernels[plan] = plan.kernel.name
            ways[plan.kernel.name] = partial(by_kernel, plan.kernel)
    model = _of_the_model(problem)
    ways.setdefault(model.name, partial(by_kernel, model))
    timed = time_ways(ways, samples=samples, warmup=2, spin_us=SPIN_US, device=device)
    us = {way: round(statistics.median(values), 2) for way, values in timed.items()}
    plan = chosen(problem, plans)
    taken = kernels.get(plan, LIBRARY if name == "bf16" else model.name)
    return {
        "format": name,
        "M": problem.m,
        "N": problem.n,
        "K": problem.k,
        "us": us,
        LIBRARY: us[LIBRARY],
        BEST: min(each for way, each in us.items() if way != LIBRARY),
        MODELS: us[model.name],
        PLANNED: us[taken],
        "taken": taken,
        "predicted": round(matmul_us(problem), 1),
    }


def _of_the_model(problem: Problem) -> KernelConfig:
    """The kernel that a planner of one rank without tables takes."""
    alone = behind_gather(problem)
    found = call_plans.planner(None, torch.device("cuda", torch.cuda.current_device()))
    kernel = found.fused_plan(replace(alone, sm_count=0)).kernel
    assert kernel is not None  # of a build with kernels
    return kernel


def show(entries: Sequence[dict[str, Any]]) -> None:
    for name in FORMATS:
        of_format = [entry for entry in entries if entry["format"] == name]
        if not of_format:
            continue
        table = plain_table(f"{name}, {len(of_format)} shapes: time ÷ that of the fastest")
        for heading in ("choice", "mean", "97%", "largest"):
            table.add_column(heading)
        for choice in CHOICES:
            ratios = [entry[choice] / min(entry["us"].values()) for entry in of_format]
            table.add_row(choice, *(f"{each:.3f}" for each in Figures.of(ratios)))
        console().print(table)
        of_format.sort(key=lambda entry: min(entry["us"].values()) / entry[PLANNED])
        for entry in of_format[:WORST]:
            shape = f"{entry['M']}x{entry['N']}x{entry['K']}"
            console().print(
                f"{shape}: {entry['taken']} {entry[PLANNED]} µs, library {entry[LIBRARY]} "
                f"(predicted {entry['predicted']}), best kernel {entry[BEST]}"
            )


def main(
    count: Annotated[int, typer.Option(min=1, help="Shapes of each format.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the shapes.")] = HELD_SEED,
    ranks: Annotated[int, typer.Option(min=2, help="Of the plan.")] = 2,
    samples: Annotated[int, typer.Option(min=1)] = 7,
    limit_s: Annotated[float, typer.Option(help="Begin no shape later than so.")] = 140.0,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time the matmul behind a gather by the library and by agmm's kernels on one GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = tables.gpu_name(torch.cuda.get_device_name(device))
    begin, entries = time.monotonic(), list[dict[str, Any]]()
    for i, name in enumerate(FORMATS, 1):
        for problem in itertools.islice(shapes(name, seed, ranks, gpu), count):
            if time.monotonic() - begin > limit_s * i / len(FORMATS):
                break
            entries.append(measure(problem, name, samples, device))
    show(entries)
    if json_path is not None:
        json_path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
