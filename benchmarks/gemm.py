"""The matmul alone on one GPU: every built kernel, raster and swizzle beside torch.mm, and if
asked for with K in several parts.

All signals are set beforehand, so this is the time of a gather that costs nothing. It is how a
kernel is chosen per shape.

    python benchmarks/gemm.py
    python benchmarks/gemm.py --shapes 1024x3584x8192 --kernels pingpong --json gemm.json
    python benchmarks/gemm.py --shapes 64x7168x8192 --kernels swapped --usual-order --splits 8
    python benchmarks/gemm.py --fp8 rowwise
    python benchmarks/gemm.py --fp8 block

With --fp8 it is the kernels of e4m3 operands beside torch._scaled_mm with the same scales: fast
accumulation, and with --slow-accum the slow one, which block scales always have.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agmm.bench.measure import release_memory
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import SAMPLES, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import async_input_mm, async_input_scaled_mm, scaled_products
from agmm.planning import call_plans, formats, heuristics
from agmm.planning.built_kernels import kernels_of
from agmm.planning.legality import legal_splits
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.planning.shapes import Shape
from agmm.runtime import cuda_scaled, kernels
from agmm.runtime import scaling as scalings
from agmm.runtime.scaled import Scaled, Weight
from agmm.testing.cases import BENCH_SHAPES, make_operands
from agmm.testing.reference import allowed_error, gathered_product, relative_error

ROOF = "torch.mm"
SCALED_ROOF = "torch._scaled_mm"
E4M3 = torch.float8_e4m3fn
SCALINGS = {name.replace(" ", "_"): name for name in scalings.BY_NAME}
"""The kinds of scales of `agmm.runtime.scaling`, as one types them."""


class BLayout(Enum):
    COLUMN = "column"
    ROW = "row"


def orders(
    problem: Problem, usual: KernelConfig, chunks: int, is_usual_order: bool
) -> list[KernelConfig]:
    """A kernel with every raster and swizzle, and across the chunks where calls go so, or in the
    order of a call alone."""
    of_call = heuristics.across_chunks(problem, usual, chunks)
    if is_usual_order:
        return [of_call]
    return [*heuristics.orders(usual), *([of_call] if of_call.across else [])]


def named(config: KernelConfig) -> str:
    parts = f" split {config.splits}" if config.splits > 1 else ""
    across = " across" if config.across else ""
    return f"{config.kernel}{parts} {config.raster} swizzle {config.max_swizzle}{across}"


def configs(
    problem: Problem, substring: str, chunks: int, most_splits: int, is_usual_order: bool
) -> Iterator[tuple[str, KernelConfig]]:
    """Every built kernel whose name holds `substring`, in its `orders`, and in every legal number
    of parts of K up to `most_splits`, named."""
    for built in kernels.built(ALL_GATHER_MATMUL):
        kernel = KernelConfig.of(built)
        if substring not in kernel.kernel:
            continue
        usual = heuristics.usual_order(problem, kernel)
        ordered = orders(problem, usual, chunks, is_usual_order)
        for splits in legal_splits(problem, kernel)[:most_splits]:
            for order in ordered:
                config = replace(order, splits=splits)
                yield named(config), config


def measure(
    shape: Shape,
    chunks: int,
    pivot: int,
    samples: int,
    *,
    substring: str,
    b_layout: BLayout,
    most_splits: int,
    is_usual_order: bool,
) -> dict[str, dict[str, Any]]:
    """Checks and times every config on one shape; by name, fastest first."""
    device = torch.device("cuda", torch.cuda.current_device())
    operands = make_operands(shape, 0, 1, dtype=torch.bfloat16, device=device)
    A, B = operands.A, operands.B
    is_column_major = b_layout is BLayout.COLUMN
    if not is_column_major:
        B = B.contiguous()
    problem = call_plans.problem_of(
        (shape.M, shape.N, shape.K), A.dtype, device, column_major=is_column_major
    )
    signals = torch.ones(chunks, dtype=torch.int32, device=device).view(torch.uint32)
    out = torch.empty(shape.M, shape.N, dtype=A.dtype, device=device)
    reference = gathered_product(A, B)
    allowed = allowed_error(relative_error(torch.mm(A, B), reference))
    calls: dict[str, Callable[[], Any]] = {ROOF: lambda: torch.mm(A, B, out=out)}
    results: dict[str, dict[str, Any]] = {ROOF: {"reason": None}}
    for name, config in configs(problem, substring, chunks, most_splits, is_usual_order):
        call = _call(A, B, signals, pivot, config)
        reason = None
        try:
            error = relative_error(call(), reference)
            if error > allowed:
                reason = f"relative error {error:.3g}, allowed {allowed:.3g}"
        except Exception as e:
            reason = str(e).splitlines()[0]
        results[name] = {"reason": reason}
        if reason is None:
            calls[name] = call
    del reference
    return _timed(shape, calls, results, ROOF, samples)


def measure_scaled(
    shape: Shape,
    chunks: int,
    pivot: int,
    substring: str,
    samples: int,
    scaling: str,
    fast_accum: bool,
    most_splits: int,
) -> dict[str, dict[str, Any]]:
    """The times of the fp8 kernels. K is split in the usual order alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(0)
    A = torch.randn(shape.M, shape.K, generator=draw, device=device).to(E4M3)
    B = torch.randn(shape.N, shape.K, generator=draw, device=device).to(E4M3).t()
    kind = scalings.BY_NAME[scaling]
    fast_accum = fast_accum and kind.a[1] == scalings.ALL
    scale_a, scale_b = (
        torch.rand(scalings.scale_shape(of.shape, tile), generator=draw, device=device) + 0.5
        for of, tile in ((A, kind.a), (B, kind.b))
    )
    signals = torch.ones(chunks, dtype=torch.int32, device=device).view(torch.uint32)
    out = torch.empty(shape.M, shape.N, dtype=torch.bfloat16, device=device)
    operand, weight = (Scaled(A, scale_a, kind.a), Scaled(B, scale_b, kind.b))
    roof_scales = [scaled_products.as_torch_wants_it(each) for each in (operand, weight)]

    def by_torch() -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten._scaled_mm.out(
            A, B, *roof_scales, None, None, torch.bfloat16, fast_accum, out=out
        )
        return found

    def call_of(config: KernelConfig) -> Callable[[], torch.Tensor]:
        return lambda: async_input_scaled_mm.on_cuda(
            (A, B, scale_a, scale_b), signals, pivot, fast_accum=fast_accum, config=config
        )

    try:
        by_torch()
    except (RuntimeError, ValueError) as refusal:  # it takes fewer sizes than the kernels
        return {SCALED_ROOF: {"reason": str(refusal).splitlines()[0]}}
    reference = gathered_product(
        A.double() * operand.spread().double(), B.double() * weight.spread().double()
    )
    allowed = allowed_error(relative_error(by_torch(), reference))
    calls: dict[str, Callable[[], Any]] = {SCALED_ROOF: by_torch}
    results: dict[str, dict[str, Any]] = {SCALED_ROOF: {"reason": None}}
    accumulation = cuda_scaled.accumulation_of(
        operand, Weight(weight, None, None, torch.bfloat16, fast_accum)
    )
    assert accumulation is not None
    name = formats.fp8_name("float8_e4m3fn_float8_e4m3fn", accumulation.name)
    problem = call_plans.problem_of((shape.M, shape.N, shape.K), name, device)
    for kernel in kernels_of(problem.op, problem.format):
        if substring not in kernel.kernel:
            continue
        order = heuristics.usual_order(problem, kernel)
        usual = [replace(order, splits=splits) for splits in legal_splits(problem, kernel)]
        # A streaming kernel has an order of its own.
        ordered = orders(problem, usual[0], chunks, is_usual_order=kernel.is_streaming)
        for config in (*ordered, *usual[1:most_splits]):
            name = named(config)
            error = relative_error(call_of(config)(), reference)
            reason = None
            if error > allowed:
                reason = f"relative error {error:.3g}, allowed {allowed:.3g}"
            else:
                calls[name] = call_of(config)
            results[name] = {"reason": reason}
    del reference
    return _timed(shape, calls, results, SCALED_ROOF, samples)


def _timed(
    shape: Shape,
    calls: dict[str, Callable[[], Any]],
    results: dict[str, dict[str, Any]],
    roof_name: str,
    samples: int,
) -> dict[str, dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    release_memory(device)
    timed = time_ways(calls, samples=samples, device=device)
    roof = statistics.median(timed[roof_name])
    for name, values in timed.items():
        median = statistics.median(values)
        results[name] |= {
            "median_us": median,
            "tflops": shape.flops(1) / median / 1e6,
            "ratio_to_mm": median / roof,
            "samples_us": [round(v, 3) for v in values],
        }
    return dict(sorted(results.items(), key=lambda item: item[1].get("median_us", float("inf"))))


def _call(
    A: torch.Tensor, B: torch.Tensor, signals: torch.Tensor, pivot: int, config: KernelConfig
) -> Callable[[], torch.Tensor]:
    return lambda: async_input_mm.on_cuda(A, B, signals, pivot, config=config)


def main(
    shapes: Annotated[str | None, typer.Option(help="MxNxK, comma-separated.")] = None,
    kernels: Annotated[str, typer.Option(help="Only kernels whose name holds this.")] = "",
    chunks: Annotated[int, typer.Option(min=1, help="Row chunks of A.")] = 4,
    pivot: Annotated[int, typer.Option(min=0, help="The first chunk.")] = 1,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    b_layout: Annotated[BLayout, typer.Option(help="Of B.")] = BLayout.COLUMN,
    splits: Annotated[int, typer.Option(min=1, help="K in up to so many parts.")] = 1,
    usual_order: Annotated[
        bool,
        typer.Option("--usual-order", help="Only the usual raster and swizzle."),
    ] = False,
    best: Annotated[int, typer.Option(min=1, help="Rows to print per shape.")] = 12,
    fp8: Annotated[str | None, typer.Option(help=f"Scales: {', '.join(SCALINGS)}.")] = None,
    slow_accum: Annotated[bool, typer.Option(help="Of fp8: accumulate slowly.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time every built kernel, raster and swizzle beside torch.mm on one GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    if fp8 is not None and fp8 not in SCALINGS:
        raise typer.BadParameter(
            f"found {fp8}, wanted one of {', '.join(SCALINGS)}", param_hint="--fp8"
        )
    roof_name = ROOF if fp8 is None else SCALED_ROOF
    chosen = BENCH_SHAPES if shapes is None else [Shape.parse(s) for s in shapes.split(",")]
    stdout, stderr = console(), console(stderr=True)
    report = new_report(replace(Options(world_size=1, samples=samples).resolved(), ways=None))
    for i, shape in enumerate(chosen, 1):
        stderr.print(f"[{i}/{len(chosen)}] {shape}")
        if fp8 is None:
            results = measure(
                shape,
                chunks,
                pivot,
                samples,
                substring=kernels,
                b_layout=b_layout,
                most_splits=splits,
                is_usual_order=usual_order,
            )
        else:
            results = measure_scaled(
                shape, chunks, pivot, kernels, samples, SCALINGS[fp8], not slow_accum, splits
            )
        report["shapes"].append({"M": shape.M, "N": shape.N, "K": shape.K, "ways": results})
        table = plain_table(f"M x N x K = {shape.M} x {shape.N} x {shape.K}")
        table.add_column("kernel", no_wrap=True)
        for heading in ("µs", "TFLOPS", f"÷ {roof_name}"):
            table.add_column(heading, justify="right")
        timed = [(n, r) for n, r in results.items() if "median_us" in r]
        shown = timed[:best] + [(n, r) for n, r in timed[best:] if n == roof_name]
        for name, r in shown:
            table.add_row(
                name, f"{r['median_us']:.1f}", f"{r['tflops']:.0f}", f"{r['ratio_to_mm']:.3f}"
            )
        stdout.print(table)
        for name, r in results.items():
            if r["reason"] is not None:
                stdout.print(f"{name}: {r['reason']}", markup=False)
    if json_path is not None:
        write_json(report, json_path)
        stderr.print(f"wrote {json_path}")


if __name__ == "__main__":
    typer.run(main)
