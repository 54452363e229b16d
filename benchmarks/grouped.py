"""The matmul of rows that are grouped by expert, alone on one GPU: agmm's kernel beside
`torch._grouped_mm`, on the same rows, which lie by expert already.

The sizes are those of a rank of four: a fourth of the experts of Mixtral 8x7B, Qwen3-30B-A3B and
DeepSeek-V3, whole, with both projections. Each takes at most a minute in all.

    python benchmarks/grouped.py --json grouped.json
    python benchmarks/grouped.py --gate
    python benchmarks/grouped.py --kernels --rows 2048 --models mixtral-8x7b --zipf
    python benchmarks/grouped.py --scaling block

With --gate the first projection is gate and up with silu, beside two products and ops of torch.
With --kernels each kernel of the build is timed too. With --scaling operands are in fp8, and
torch's product is `torch._scaled_grouped_mm`, which has scales of rows alone.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from agmm.bench.machine import machine_facts
from agmm.bench.moe_presets import MOE_MODELS
from agmm.bench.timer import time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import grouped_kernel
from agmm.ops.grouped_scaled_products import ScaledWeight, described, is_left_to_torch
from agmm.planning.kernel_table import GROUPED
from agmm.runtime import kernels
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import BY_NAME, scale_shape

TORCH, OURS = "torch", "agmm"
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
ROWS = (128, 512, 2048, 8192, 16384)
RANKS = 4
MOST_ERROR = 2**-7
"""The largest norm of a difference from torch's result, relative to its: a few roundings."""
MOST_ERROR_OF_FP8 = 2**-6
"""The largest norm of a difference of a product in fp8 from the dequantised one, relative to it."""
ACTIVATION = Epilogue("silu_mul")
E4M3 = torch.float8_e4m3fn


class Projection(NamedTuple):
    """One weight of a rank's experts, or gate and up."""

    name: str
    experts: int
    n: int
    k: int
    weights: int = 1


def projections(model: str, *, gate: bool) -> list[Projection]:
    hidden, inner, experts, _ = MOE_MODELS[model]
    own = experts // RANKS
    first = "gate and up" if gate else "up"
    return [
        Projection(f"{model} {first}", own, inner, hidden, 1 + int(gate)),
        Projection(f"{model} down", own, hidden, inner),
    ]


def counts_of(rows: int, experts: int, *, zipf: bool) -> list[int]:
    """How many rows each expert has: as many as the others, or by Zipf's law, a row each at
    least where there are so many."""
    shares = [1 / (i + 1) if zipf else 1.0 for i in range(experts)]
    ends = [round(rows * sum(shares[: i + 1]) / sum(shares)) for i in range(experts)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def measure(
    given: Projection, weights: list[torch.Tensor], counts: list[int], options: dict[str, Any]
) -> dict[str, Any]:
    """The times of each way of a projection of so many rows for each expert."""
    rows = torch.randn(sum(counts), given.k, device="cuda").bfloat16()
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    activation = ACTIVATION if given.weights > 1 else None
    none = [None] * given.weights

    def by_torch() -> torch.Tensor:
        found = [torch._grouped_mm(rows, one, offs=offsets[1:]) for one in weights]
        return found[0] if activation is None else activation(found)[0]

    ways: dict[str, Callable[[], torch.Tensor]] = {TORCH: by_torch}
    chosen = grouped_kernel.config_of(rows, weights, activation)
    if chosen is not None:
        ways[OURS] = partial(grouped_kernel.run, chosen, rows, weights, none, offsets, activation)
    if options["kernels"]:
        epilogue = "gate" if activation else kernels.PLAIN
        for kernel in kernels.built(GROUPED, "bfloat16", epilogue=epilogue):
            ways[kernel.name] = partial(
                grouped_kernel.run, kernel, rows, weights, none, offsets, activation
            )
    wanted = by_torch().float()
    wrong = [
        name
        for name, call in ways.items()
        if not (call().float() - wanted).norm() <= MOST_ERROR * wanted.norm()
    ]
    del wanted
    timed = time_ways(ways, samples=options["samples"], device=rows.device)
    us = {name: round(statistics.median(values), 2) for name, values in timed.items()}
    flops = 2 * given.weights * sum(counts) * given.n * given.k
    return {
        **given._asdict(),
        "rows": sum(counts),
        "counts": counts,
        "kernel": None if chosen is None else chosen.name,
        "us": us,
        "tflops": {name: round(flops / one / 1e6, 1) for name, one in us.items()},
        "wrong": wrong,
    }


def weight_of(given: Projection, scaling: str) -> ScaledWeight:
    """A weight of the projection with scales near 1."""
    held = torch.randn(given.experts, given.n, given.k, device="cuda", dtype=torch.bfloat16)
    values = held.to(E4M3).mT
    kind = BY_NAME[scaling]
    scale = torch.rand(scale_shape(values.shape, kind.b), device="cuda") + 0.5
    return ScaledWeight(values, scale, None, kind, torch.bfloat16, True)


def measure_fp8(weight: ScaledWeight, given: Projection, counts: list[int], samples: int) -> Any:
    """The times of each way of a projection of so many rows for each expert."""
    kind = weight.scaling
    values = torch.randn(sum(counts), given.k, device="cuda").to(E4M3)
    rows = Scaled(
        values, torch.rand(scale_shape(values.shape, kind.a), device="cuda") + 0.5, kind.a
    )
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    of_rows = torch.ones(len(values), device="cuda")
    of_columns = torch.ones(given.experts, given.n, device="cuda")

    def by_torch() -> torch.Tensor:
        ends, out = offsets[1:], torch.bfloat16
        return torch._scaled_grouped_mm(
            *(values, weight.values, of_rows, of_columns),
            offs=ends,
            out_dtype=out,
            use_fast_accum=True,
        )

    ways: dict[str, Callable[[], torch.Tensor]] = {TORCH: by_torch}
    call = described(rows, [weight], None)
    wrong = []
    if call is not None:
        scales = grouped_kernel.scales_of_rows(rows.scale)
        ways[OURS] = lambda: grouped_kernel.launch(call, values, offsets, scales=scales)
        begin, out = 0, ways[OURS]().double()
        for expert, count in enumerate(counts[:2]):
            part = slice(begin, begin + count)
            begin += count
            exact = rows.rows(part).dequantised().double()
            exact = exact @ weight.of_expert(expert).B.dequantised().double()
            if not (out[part] - exact).norm() <= MOST_ERROR_OF_FP8 * exact.norm():
                wrong = [OURS]
        del out
    timed = time_ways(ways, samples=samples, device=values.device)
    us = {name: round(statistics.median(found), 2) for name, found in timed.items()}
    flops = 2 * sum(counts) * given.n * given.k
    return {
        **given._asdict(),
        "rows": sum(counts),
        "counts": counts,
        "taken": TORCH if call is None or is_left_to_torch(values, weight) else OURS,
        "kernel": None if call is None else call.arguments[0].name,
        "us": us,
        "tflops": {name: round(flops / one / 1e6, 1) for name, one in us.items()},
        "wrong": wrong,
    }


def best(entry: dict[str, Any]) -> tuple[str, float]:
    """The kernel that took the least time, and its time."""
    found = {name: us for name, us in entry["us"].items() if name != TORCH}
    name = min(found, key=found.__getitem__)
    return name, found[name]


def show(report: dict[str, Any]) -> None:
    """Prints the time of agmm's kernel ÷ torch's, and the mean of all."""
    entries = [entry for entry in report["cases"] if OURS in entry["us"]]
    if report["kernels"]:
        for entry in report["cases"]:
            name, us = best(entry)
            console().print(
                f"{entry['name']}, {entry['rows']} rows: {name} {us:.1f} us, "
                f"torch {entry['us'][TORCH]:.1f}"
            )
    table = plain_table("agmm ÷ torch, in brackets agmm's TFLOPS; t where calls take torch's")
    for heading in ("experts x N x K", "projection", *map(str, report["rows"])):
        table.add_column(heading)
    for name in dict.fromkeys(entry["name"] for entry in entries):
        some = {entry["rows"]: entry for entry in entries if entry["name"] == name}
        first = next(iter(some.values()))
        cells = [
            f"{some[rows]['us'][OURS] / some[rows]['us'][TORCH]:.3f} "
            f"({some[rows]['tflops'][OURS]:.0f})"
            f"{' t' if some[rows].get('taken') == TORCH else ''}"
            if rows in some
            else "–"
            for rows in report["rows"]
        ]
        table.add_row(f"{first['experts']} x {first['n']} x {first['k']}", name, *cells)
    means = []
    for rows in report["rows"]:
        ratios = [e["us"][OURS] / e["us"][TORCH] for e in entries if e["rows"] == rows]
        means.append(f"{statistics.geometric_mean(ratios):.3f}" if ratios else "–")
    table.add_row("", "geometric mean", *means)
    console().print(table)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    rows: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated.")] = None,
    b_layout: Annotated[str, typer.Option(help="column or row.")] = "column",
    zipf: Annotated[bool, typer.Option("--zipf", help="Experts by Zipf's law.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Gate and up with silu.")] = False,
    every: Annotated[bool, typer.Option("--kernels", help="Time every kernel, too.")] = False,
    scaling: Annotated[str, typer.Option(help="rowwise or block, for fp8.")] = "",
    samples: Annotated[int, typer.Option(min=1)] = 9,
    limit_s: Annotated[float, typer.Option(help="Begin no weight later than so.")] = 50.0,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time grouped matmuls beside torch's on one GPU."""
    if b_layout not in ("column", "row"):
        raise typer.BadParameter(f"found {b_layout!r}, wanted column or row")
    if scaling not in ("", "rowwise", "block"):
        raise typer.BadParameter(f"found {scaling!r}, wanted rowwise or block")
    if scaling and (gate or every or b_layout != "column"):
        raise typer.BadParameter(
            "found --scaling with --gate, --kernels or --b-layout, wanted it alone"
        )
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    begin = time.monotonic()
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "b_layout": b_layout,
        "scaling": scaling or None,
        "routing": "zipf" if zipf else "even",
        "rows": list(rows or ROWS),
        "kernels": every,
        "cases": [],
    }
    options = {"kernels": every, "samples": samples}
    for given in [one for model in models.split(",") for one in projections(model, gate=gate)]:
        if time.monotonic() - begin > limit_s:
            console(stderr=True).print(f"stopped before {given.name}, at {limit_s:g} s")
            break
        if scaling:
            weight = weight_of(given, scaling)
            for of_rows in report["rows"]:
                counts = counts_of(of_rows, given.experts, zipf=zipf)
                report["cases"].append(measure_fp8(weight, given, counts, samples))
            continue
        weights = []
        for _ in range(given.weights):
            shape = (given.n, given.k) if b_layout == "column" else (given.k, given.n)
            held = torch.randn(given.experts, *shape, device="cuda", dtype=torch.bfloat16)
            held /= given.k**0.5
            weights.append(held.transpose(1, 2) if b_layout == "column" else held)
        for of_rows in report["rows"]:
            counts = counts_of(of_rows, given.experts, zipf=zipf)
            report["cases"].append(measure(given, weights, counts, options))
    show(report)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [entry for entry in report["cases"] if entry["wrong"]]
    for entry in wrong:
        console().print(f"wrong: {entry['name']}, {entry['rows']}: {', '.join(entry['wrong'])}")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
