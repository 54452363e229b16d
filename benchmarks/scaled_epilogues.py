"""Gates of fp8 products in the kernel, on one GPU: beside the matmul of both weights alone, and
beside ``torch._scaled_mm`` with torch's compiled gate and quantisation behind it.

All rows of A are there from the start. The result is bfloat16, or fp8 with scales of 1 x 128.

    python benchmarks/scaled_epilogues.py
    python benchmarks/scaled_epilogues.py --shapes 4096x3584x8192 --slow
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from agmm.bench.measure import release_memory
from agmm.bench.timer import SAMPLES, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import async_input_scaled_mm, fp8_operands
from agmm.ops.quantize import quantised, quantised_by_torch
from agmm.planning import formats
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import Shape
from agmm.runtime.cuda_calls import OutScales, Up
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaling import ALL, BLOCK

FUSED, QUANTISED, ALONE = "agmm gate", "agmm gate, fp8", "agmm matmul"
COMPILED, COMPILED_FP8 = "_scaled_mm + compiled", "_scaled_mm + compiled, fp8"
SHAPES = [Shape(m, 3584, 8192) for m in (512, 1024, 2048, 4096, 8192)]
"""The shapes of gate and up of a model with 8192 hidden features, one half of 7168 on two ranks."""
MOST_ERROR = 2**-5
"""The largest norm of a difference from torch's way, relative to the result's: half a step of e4m3
is 2**-4 of a number at most."""


def ways_of(shape: Shape, fast: bool) -> dict[str, Callable[[], Any]]:
    """The ways by name, on operands with row-wise scales."""
    a = torch.randn(shape.M, shape.K, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(2 * shape.N, shape.K, device="cuda", dtype=torch.bfloat16) / shape.K**0.5
    A, scale_a = quantised(a, (1, ALL))
    B, scale_b = quantised(both.t(), (ALL, 1))
    Bs, scale_bs = B.split(shape.N, 1), [one.contiguous() for one in scale_b.split(shape.N, 1)]
    more: Any = [None] * 2, [None] * 2, [torch.bfloat16] * 2, [fast] * 2
    tile, weights = fp8_operands.Fp8Weights(Bs, scale_bs, *more).described(A, scale_a)
    rows = fp8_operands.rows_of(A, scale_a, tile, 0)
    up = Up(Bs[1], None, scale_bs[1])
    quantising = Epilogue("silu_mul", quantize_out="block")
    form = formats.fp8_name("float8_e4m3fn_float8_e4m3fn", "fast" if fast else "slow")
    ready = None
    if kernels_of(ALL_GATHER_MATMUL, form, quantising.kernel):
        ready = fp8_operands.ready_matmul_of(rows, weights[0], epilogue=quantising, up=up.B)

    def fused() -> torch.Tensor:
        return async_input_scaled_mm.activated_on_cuda(rows, weights, None, 0, Epilogue("silu_mul"))

    def in_fp8() -> tuple[torch.Tensor, torch.Tensor]:
        if ready is None:  # a build without such a kernel, as the default one
            return quantised(fused(), (1, BLOCK))
        scales = OutScales.of(A, (shape.M, shape.N), None)
        given: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_bs[0], "up": up}
        return ready(A, Bs[0], None, **given, out_scales=scales), scales.written

    def gate(products: torch.Tensor) -> torch.Tensor:
        return Epilogue("silu_mul")(list(products.split(shape.N, 1)))[0]

    def gate_fp8(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantised_by_torch(gate(products), (1, BLOCK), A.dtype, None, False)

    compiled, compiled_fp8 = torch.compile(gate), torch.compile(gate_fp8)

    def by_torch() -> torch.Tensor:
        return torch._scaled_mm(
            *(A, B, scale_a, scale_b), out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return {
        FUSED: fused,
        QUANTISED: in_fp8,
        ALONE: lambda: async_input_scaled_mm.on_cuda(
            (A, B, scale_a, scale_b), None, 0, fast_accum=fast
        ),
        COMPILED: lambda: compiled(by_torch()),
        COMPILED_FP8: lambda: compiled_fp8(by_torch()),
    }


def check(ways: dict[str, Callable[[], Any]], shape: Shape) -> None:
    """Compares both results of the kernels with torch's."""
    wanted = ways[COMPILED]().double()
    values, scales = ways[QUANTISED]()
    spread = scales.repeat_interleave(BLOCK, 1)[:, : shape.N]
    for name, found in ((FUSED, ways[FUSED]()), (QUANTISED, values.float() * spread)):
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        if not error <= MOST_ERROR:
            raise SystemExit(f"{name} {shape}: found a relative error of {error:.3g}")


def main(
    shapes: Annotated[
        str | None, typer.Option(help="MxNxK, comma-separated; N of a weight.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    slow: Annotated[bool, typer.Option("--slow", help="Accumulate exactly.")] = False,
) -> None:
    """Time gates of fp8 products in the kernel."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    chosen = SHAPES if shapes is None else [Shape.parse(one) for one in shapes.split(",")]
    device = torch.device("cuda", torch.cuda.current_device())
    table = plain_table("Gates of fp8 products")
    columns = "gate ÷ matmul", "fp8 ÷ matmul", "compiled ÷ gate", "compiled ÷ fp8"
    for heading in ("M x N x K", "matmul µs", *columns):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape in chosen:
        ways = ways_of(shape, not slow)
        check(ways, shape)
        release_memory(device)
        us = {
            name: statistics.median(found)
            for name, found in time_ways(ways, samples=samples, device=device).items()
        }
        pairs = (FUSED, ALONE), (QUANTISED, ALONE), (COMPILED, FUSED), (COMPILED_FP8, QUANTISED)
        ratios = (f"{us[first] / us[second]:.3f}" for first, second in pairs)
        table.add_row(str(shape), f"{us[ALONE]:.1f}", *ratios)
    console().print(table)


if __name__ == "__main__":
    typer.run(main)
