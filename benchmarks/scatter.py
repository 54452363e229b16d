"""Matmul + reduce-scatter of one rank, on one GPU: the rank sends to itself what it would send to
the others. Built with -DAGMM_VIRTUAL_LINK=380, what it sends takes as long as over a link of
380 GB/s.

    python benchmarks/scatter.py
    python benchmarks/scatter.py --shapes 1024x8192x2048 --kernels pingpong --json scatter.json
    python benchmarks/scatter.py --fp8 rowwise --shapes 4096x8192x7168,8192x8192x7168

M is that of the gathered rows, K this rank's. The roof is torch.mm of the same product, with --fp8
torch._scaled_mm.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agmm import _core
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import SAMPLES, time_ways
from agmm.bench.way import ROOF
from agmm.cli.terminal import console, plain_table
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import MATMUL_REDUCE_SCATTER, KernelConfig
from agmm.planning.shapes import Shape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
from scatter_stand_in import Alone, Products, empty_out, enqueue, finish
from scatter_stand_in import kernels as of_16_bits

SHAPES = [Shape(m, 8192, k) for k in (2048, 7168) for m in (512, 1024, 2048, 4096, 8192, 16384)]


class Scales(str, Enum):
    rowwise = "rowwise"
    tensorwise = "tensorwise"


E4M3 = "float8_e4m3fn"


def of_fp8() -> Iterable[KernelConfig]:
    """The kernels of two e4m3 operands with fast accumulation."""
    return kernels_of(MATMUL_REDUCE_SCATTER, f"{E4M3}_{E4M3} fast")


def configs(built: Iterable[KernelConfig], substring: str) -> Iterator[KernelConfig]:
    for kernel in built:
        for raster in ("along_m", "along_n"):
            for swizzle in (1, 2, 4, 8):
                config = replace(kernel, max_swizzle=swizzle, raster=raster)
                if substring in config.name:
                    yield config


def measure(shape: Shape, world_size: int, substring: str, samples: int) -> dict[str, float]:
    """Median time in µs of every kernel that holds `substring`, and of torch.mm."""
    needed = max(
        _core.scatter_part_bytes(shape.M, shape.N, world_size, config.core)
        for config in configs(of_16_bits(), substring)
    )
    rank = Alone(world_size, 0, needed)
    A = torch.randn(shape.M, shape.K, device="cuda").bfloat16()
    B = torch.randn(shape.N, shape.K, device="cuda").bfloat16().t()
    what = Products([A], [B])
    product = torch.empty(shape.M, shape.N, dtype=A.dtype, device="cuda")
    out = empty_out(what, world_size)
    expected = rank.expected(what).float()
    calls: dict[str, Callable[[], Any]] = {ROOF: lambda: torch.mm(A, B, out=product)}
    for config in configs(of_16_bits(), substring):
        calls[config.name] = _call(rank, what, out, config)
    return _checked_and_timed(calls, out, expected, shape, samples)


def measure_fp8(
    shape: Shape, scales: Scales, world_size: int, substring: str, samples: int
) -> dict[str, float]:
    """The times of two fp8 operands, beside torch._scaled_mm."""
    of_row = scales == Scales.rowwise
    needed = max(
        _core.scatter_part_bytes(shape.M, shape.N, world_size, config.core)
        for config in configs(of_fp8(), substring)
    )
    rank = Alone(world_size, 0, needed)
    dtype = torch.float8_e4m3fn
    A = torch.randn(shape.M, shape.K, device="cuda").to(dtype)
    B = torch.randn(shape.N, shape.K, device="cuda").to(dtype).t()
    scale_a = torch.rand(shape.M if of_row else 1, 1, device="cuda") + 0.5
    scale_b = torch.rand(1, shape.N if of_row else 1, device="cuda") + 0.5
    out = torch.empty(shape.M // world_size, shape.N, dtype=torch.bfloat16, device="cuda")
    whole = (A.float() * scale_a) @ (B.float() * scale_b)
    chunks = whole.chunk(world_size)
    others = [chunks[-source % world_size] for source in range(1, world_size)]
    like = Products([out], [B])  # finish() takes the result's dtype from it
    expected = finish(chunks[0], others, like).float()

    def scaled_mm() -> torch.Tensor:
        product: torch.Tensor = torch._scaled_mm(
            A, B, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return product

    scaled = _core.Format(
        _core.DType.float8_e4m3fn_float8_e4m3fn,
        scales=_core.ScaleLayout(a_per_row=of_row, b_per_column=of_row),
    )
    addresses = [*(tensor.data_ptr() for tensor in (A, B, scale_a, scale_b)), 0, out.data_ptr()]

    def call(config: KernelConfig) -> Callable[[], object]:
        product = shape.K, shape.K, shape.K
        problem = _core.ScatterProblem(shape.M, shape.N, scaled, [product], config.core)
        return lambda: rank.core.matmul_reduce_scatter(
            problem, addresses, torch.cuda.current_stream().cuda_stream
        )

    calls: dict[str, Callable[[], Any]] = {ROOF: scaled_mm}
    for config in configs(of_fp8(), substring):
        calls[config.name] = call(config)
    return _checked_and_timed(calls, out, expected, shape, samples)


def _checked_and_timed(
    calls: dict[str, Callable[[], Any]],
    out: torch.Tensor,
    expected: torch.Tensor,
    shape: Shape,
    samples: int,
) -> dict[str, float]:
    """Median times in µs. Raises SystemExit where a call but the roof's leaves a wrong ``out``."""
    for name, call in calls.items():
        if name == ROOF:
            continue
        out.fill_(torch.nan)
        call()
        error = float((out.float() - expected).norm() / expected.norm())
        if not error < 4e-3:
            raise SystemExit(f"{shape} {name}: relative error {error}")
    timed = time_ways(calls, samples=samples, device=out.device)
    return {name: statistics.median(values) for name, values in timed.items()}


def _call(
    rank: Alone, what: Products, out: torch.Tensor, config: KernelConfig
) -> Callable[[], None]:
    return lambda: enqueue(rank.core, what, out, config, torch.cuda.current_stream())


def main(
    shapes: Annotated[str | None, typer.Option(help="MxNxK, comma-separated.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to stand in for.")] = 4,
    kernels: Annotated[str, typer.Option(help="Only kernels whose name holds this.")] = "",
    fp8: Annotated[Scales | None, typer.Option(help="e4m3 operands with such scales.")] = None,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    best: Annotated[int, typer.Option(min=1, help="Rows to print per shape.")] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time one rank of matmul + reduce-scatter beside torch.mm on one GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    chosen = SHAPES if shapes is None else [Shape.parse(s) for s in shapes.split(",")]
    stdout = console()
    link = _core.virtual_link_gbs
    report = new_report(
        Options(op=MATMUL_REDUCE_SCATTER, world_size=ranks, samples=samples, dtype=torch.bfloat16)
    )
    report["settings"] |= {"stands_in_for": "rank 0", "virtual_link_gbs": link, "fp8": fp8}
    table = plain_table(f"{ranks} ranks, link: {link or 'none'} GB/s")
    table.add_column("M x N x K", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    for heading in ("µs", f"÷ torch.{'mm' if fp8 is None else '_scaled_mm'}"):
        table.add_column(heading, justify="right")
    for shape in chosen:
        times = (
            measure(shape, ranks, kernels, samples)
            if fp8 is None
            else measure_fp8(shape, fp8, ranks, kernels, samples)
        )
        by_name = {name: {"median_us": us} for name, us in times.items()}
        report["shapes"].append({"M": shape.M, "N": shape.N, "K": shape.K, "ways": by_name})
        for name in [ROOF, *sorted(times.keys() - {ROOF}, key=times.__getitem__)[:best]]:
            ratio = times[name] / times[ROOF]
            table.add_row(str(shape), name, f"{times[name]:.1f}", f"{ratio:.3f}")
    stdout.print(table)
    if json_path is not None:
        write_json(report, json_path)


if __name__ == "__main__":
    typer.run(main)
