"""The matmul of few rows alone on one GPU: the kernel that a call would get, and each streaming
kernel, beside torch.mm and beside what reading the weight takes.

The shapes are projections of models at tensor parallelism 1, 2 and 4, with 1, 8, 32 and 64 rows and
L2 cold. What a call takes is its time less that of an empty kernel; what its weight takes is its
bytes at the rate at which `torch.sum` reads 1 GiB.

    python benchmarks/few_rows.py --json few_rows.json
    python benchmarks/few_rows.py --rows 1 --b-layout row --samples 20
"""

from __future__ import annotations

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

from agmm.bench.machine import machine_facts
from agmm.bench.timer import time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import async_input_mm
from agmm.planning import call_plans, heuristics
from agmm.planning.built_kernels import kernels_of
from agmm.planning.legality import legal_splits
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.testing.reference import allowed_error, gathered_product, relative_error

ROOF, OURS, EMPTY, READ = "torch.mm", "agmm", "empty kernel", "sum"
ROWS = (1, 8, 32, 64)
READ_BYTES = 1 << 30
FOLLOWED = "8192 x 2048"
"""The projection whose figure at one row the project follows."""


class Model(NamedTuple):
    """Sizes of a layer, as the models' configurations have them."""

    name: str
    hidden: int
    qkv: int
    heads: int
    """The columns of the output projection's input."""
    ffn: int
    tps: tuple[int, ...] = (1, 2, 4)


MODELS = (
    Model("Llama-3 8B, Mixtral's attention", 4096, 6144, 4096, 14336),
    Model("Llama-3 70B", 8192, 10240, 8192, 28672),
    Model("Qwen2.5 7B", 3584, 4608, 3584, 18944, (1, 2)),
    Model("Qwen3 32B", 5120, 10240, 8192, 25600, (2, 4)),
)
OTHERS = ((1536, 7168), (576, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
"""N and K of DeepSeek-V3's attention and of its shared expert."""


def projections() -> list[tuple[int, int]]:
    """N and K of one rank's projections, each once."""
    found = dict.fromkeys(OTHERS)
    for model in MODELS:
        for tp in model.tps:
            found[model.qkv // tp, model.hidden] = None
            found[model.hidden, model.heads // tp] = None
            found[2 * model.ffn // tp, model.hidden] = None
            found[model.hidden, model.ffn // tp] = None
    return sorted(found)


def configs(m: int, b: torch.Tensor, k: int) -> Iterator[KernelConfig]:
    """The streaming kernels of the build that compute all rows in one tile."""
    n = b.shape[1]
    problem = call_plans.problem_of((m, n, k), b.dtype, b.device, column_major=b.stride(0) == 1)
    for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16"):
        if kernel.is_streaming and kernel.tile_m >= m:
            usual = heuristics.usual_order(problem, kernel)
            for splits in legal_splits(problem, kernel):
                yield replace(usual, splits=splits)


def measure(m: int, b: torch.Tensor, samples: int) -> dict[str, Any]:
    """Checks and times all ways on a weight."""
    k, n = b.shape
    a = torch.randn(m, k, device=b.device).to(b.dtype)
    out = a.new_empty(m, n)
    ways: dict[str, Callable[[], Any]] = {
        EMPTY: lambda: torch.cuda._sleep(0),
        ROOF: lambda: torch.mm(a, b, out=out),
        OURS: lambda: async_input_mm.on_cuda(a, b, None, 0),
    }
    for config in configs(m, b, k):
        ways[config.kernel] = partial(async_input_mm.on_cuda, a, b, None, 0, config=config)
    # A slice of the columns says enough, and fits beside the largest weight in float64.
    some = slice(max(0, n - 4096), n)
    reference = gathered_product(a, b[:, some])
    allowed = allowed_error(relative_error(torch.mm(a, b)[:, some], reference))
    wrong = [
        name
        for name, call in ways.items()
        if name not in (EMPTY, ROOF) and relative_error(call()[:, some], reference) > allowed
    ]
    del reference
    timed = time_ways(ways, samples=samples, device=b.device)
    column_major = b.stride(0) == 1
    problem = call_plans.problem_of((m, n, k), b.dtype, b.device, column_major=column_major)
    planned = call_plans.planner(None, b.device).choose(problem, fused=True)
    return {
        "M": m,
        "N": n,
        "K": k,
        "us": {name: round(statistics.median(values), 2) for name, values in timed.items()},
        "planned": planned.plan.name,
        "predicted_us": planned.predicted_us,
        "wrong": wrong,
    }


def read_gb_per_s(device: torch.device, samples: int) -> float:
    """The rate at which a sum reads memory."""
    data = torch.ones(READ_BYTES // 4, device=device)
    ways = {READ: lambda: data.sum(), EMPTY: lambda: torch.cuda._sleep(0)}
    timed = time_ways(ways, samples=samples, device=device)
    us = statistics.median(timed[READ]) - statistics.median(timed[EMPTY])
    return READ_BYTES / us / 1e3


class Figures(NamedTuple):
    """The figures of one way at one number of rows, or all."""

    to_read: float
    """The time less an empty kernel's ÷ that of reading the weight, geometric mean."""
    worst_to_read: float
    to_roof: float
    """The time ÷ that of torch.mm, geometric mean."""
    worst_to_roof: float


def figures(entries: Sequence[dict[str, Any]], way: str, gb_per_s: float) -> Figures:
    to_read, to_roof = [], []
    for entry in entries:
        us = best_us(entry) if way == "best streaming" else entry["us"][way]
        weight_us = 2 * entry["N"] * entry["K"] / gb_per_s / 1e3
        to_read.append((us - entry["us"][EMPTY]) / weight_us)
        to_roof.append(us / entry["us"][ROOF])
    mean = statistics.geometric_mean
    return Figures(mean(to_read), max(to_read), mean(to_roof), max(to_roof))


def best_us(entry: dict[str, Any]) -> float:
    """The time of the fastest streaming kernel; infinite where there is none."""
    found = [us for name, us in entry["us"].items() if name.endswith("_streaming")]
    return min(found, default=math.inf)


def show(report: dict[str, Any]) -> None:
    """Prints the means and the worst, then each case."""
    entries, rate = report["shapes"], report["read_gb_per_s"]
    out = console()
    out.print(f"read rate {rate:.0f} GB/s, {report['machine'].get('device_name', 'GPU')}")
    table = plain_table("geometric means and worst")
    for heading in ("rows", "way", "÷ read", "worst", "÷ torch.mm", "worst"):
        table.add_column(heading)
    for rows in (*report["rows"], None):
        some = [entry for entry in entries if rows in (entry["M"], None)]
        for way in (ROOF, OURS, "best streaming"):
            if some and not (way == "best streaming" and math.inf in map(best_us, some)):
                cells = [f"{value:.3f}" for value in figures(some, way, rate)]
                table.add_row("all" if rows is None else str(rows), way, *cells)
    out.print(table)
    table = plain_table("µs")
    for heading in ("M x N x K", "empty", "weight", ROOF, OURS, "best streaming", "which"):
        table.add_column(heading)
    for entry in entries:
        us, best = entry["us"], best_us(entry)
        weight_us = 2 * entry["N"] * entry["K"] / rate / 1e3
        which = next((name for name, value in us.items() if value == best), "–")
        shown = (us[EMPTY], weight_us, us[ROOF], us[OURS], best)
        shape = f"{entry['M']} x {entry['N']} x {entry['K']}"
        table.add_row(shape, *(f"{value:.1f}" for value in shown), which)
        if shape == f"1 x {FOLLOWED}":
            out.print(f"{shape}: agmm ÷ torch.mm {us[OURS] / us[ROOF]:.3f}, wanted 0.72")
    out.print(table)


def main(
    rows: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated.")] = None,
    b_layout: Annotated[str, typer.Option(help="column or row.")] = "column",
    samples: Annotated[int, typer.Option(min=1)] = 9,
    limit_s: Annotated[float, typer.Option(help="Begin no weight later than so.")] = 75.0,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time the matmul of few rows beside torch.mm on one GPU."""
    if b_layout not in ("column", "row"):
        raise typer.BadParameter(f"found {b_layout!r}, wanted column or row")
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    begin = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    stderr = console(stderr=True)
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "b_layout": b_layout,
        "rows": list(rows or ROWS),
        "read_gb_per_s": read_gb_per_s(device, samples),
        "shapes": [],
    }
    pairs = projections()
    for i, (n, k) in enumerate(pairs, 1):
        if time.monotonic() - begin > limit_s:
            stderr.print(f"stopped after {i - 1} of {len(pairs)}, at {limit_s:g} s")
            break
        stderr.print(f"[{i}/{len(pairs)}] {n} x {k}")
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) / math.sqrt(k)
        b = weight.t() if b_layout == "column" else weight.t().contiguous()
        report["shapes"] += [measure(m, b, samples) for m in report["rows"]]
    show(report)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [entry for entry in report["shapes"] if entry["wrong"]]
    for entry in wrong:
        shape = f"{entry['M']}x{entry['N']}x{entry['K']}"
        console().print(f"wrong: {shape}: {', '.join(entry['wrong'])}")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
