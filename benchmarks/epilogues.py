"""Matmuls with an activation in the kernel, on one GPU: beside the matmul alone, and beside a
matmul with torch's compiled activation behind it.

All rows of A are there from the start. A gated activation has two weights of N columns; the matmul
alone then has 2 N columns, in one weight.

    python benchmarks/epilogues.py
    python benchmarks/epilogues.py --shapes 4096x3584x8192 --activations silu_mul --kernels
    python benchmarks/epilogues.py --json epilogues.json
    python benchmarks/epilogues.py --gradients --activations silu_mul,gelu_tanh_mul,silu

With --kernels each kernel that has the activation is timed too, in its usual order. With
--gradients it is the gradient through the activation that is timed, of M x N products that are
there, beside torch's ops, eager and compiled, and beside its bytes at the rate of `copy_`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agmm.bench.measure import release_memory
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import SAMPLES, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops import activation_gradients, async_input_mm
from agmm.planning import call_plans, heuristics
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import Shape
from agmm.runtime import cuda_activations
from agmm.runtime.cuda_activations import Cast
from agmm.runtime.epilogues import ACTIVATIONS, Epilogue
from agmm.runtime.scaling import ALL, BLOCK

FUSED, ALONE, ROOF, COMPILED = "agmm fused", "agmm matmul", "torch.mm", "torch.mm + compiled"
KERNEL, EAGER, TRACED, COPY = "agmm", "torch", "torch compiled", "copy"
CASTS = {"rowwise": (1, ALL), "block": (1, BLOCK)}
"""The kinds of scales with which the kernel quantises the gradients of a gate too."""
SHAPES = [Shape(m, 3584, 8192) for m in (128, 512, 2048, 4096, 8192)]
"""The shapes of gate and up of a model with 8192 hidden features, one half of 7168 on two ranks."""
MOST_ERROR = 2**-7
"""The largest norm of a difference from the unfused way, relative to the result's: a few roundings
of bfloat16."""


def measure(
    shape: Shape, activation: str, samples: int, *, column_major: bool, every_kernel: bool
) -> dict[str, dict[str, Any]]:
    """The times of each way of one shape and activation, by name."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    epilogue = Epilogue(activation)
    count = 2 if epilogue.is_gated else 1
    a = torch.randn(shape.M, shape.K, device=device, dtype=dtype)
    both = torch.randn(count * shape.N, shape.K, device=device, dtype=dtype) / shape.K**0.5
    bs = [weight.t() for weight in both.split(shape.N)]
    whole = both.t()
    if not column_major:
        bs, whole = [b.contiguous() for b in bs], whole.contiguous()

    def unfused() -> torch.Tensor:
        return epilogue(list(torch.mm(a, whole).split(shape.N, dim=1)))[0]

    behind = torch.compile(lambda products: epilogue(list(products.split(shape.N, dim=1)))[0])

    def compiled() -> torch.Tensor:
        found: torch.Tensor = behind(torch.mm(a, whole))
        return found

    by_kernel, alone = async_input_mm.activated_on_cuda, async_input_mm.on_cuda
    ways: dict[str, Callable[[], Any]] = {
        FUSED: partial(by_kernel, a, bs, None, 0, epilogue),
        ALONE: partial(alone, a, whole, None, 0),
        ROOF: partial(torch.mm, a, whole),
        COMPILED: compiled,
    }
    if every_kernel:
        layout = "column" if column_major else "row"
        problem = call_plans.problem_of(
            (shape.M, count * shape.N, shape.K), dtype, device, column_major=column_major
        )
        for kernel in kernels_of(ALL_GATHER_MATMUL, "bfloat16", epilogue.kernel, layout):
            config = heuristics.usual_order(problem, kernel)
            ways[config.name] = partial(by_kernel, a, bs, None, 0, epilogue, config=config)
            ways[f"{config.name} alone"] = partial(alone, a, whole, None, 0, config=config)
    wanted = unfused().double()
    error = ((ways[FUSED]().double() - wanted).norm() / wanted.norm()).item()
    if not error <= MOST_ERROR:
        raise SystemExit(f"{activation} {shape}: found a relative error of {error:.3g}")
    release_memory(device)
    return {
        name: {"median_us": statistics.median(us), "samples_us": [round(one, 3) for one in us]}
        for name, us in time_ways(ways, samples=samples, device=device).items()
    }


def gradient_ways(
    shape: Shape, activation: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What makes the gradients of products, by name, and the bytes that each has to move; ``copy``
    moves as many as the kernel."""
    epilogue = Epilogue(activation)
    count = 2 if epilogue.is_gated else 1
    of_out, *products = (
        torch.randn(shape.M, shape.N, device="cuda", dtype=torch.bfloat16) for _ in range(count + 1)
    )
    matrix = 2.0 * shape.M * shape.N
    whole = (2 * count + 1) * matrix
    source = torch.empty(int(whole) // 4, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def by_torch(of_out: torch.Tensor, *products: torch.Tensor) -> list[torch.Tensor | None]:
        return epilogue.gradients([of_out], products)

    kernel = partial(cuda_activations.gradients, activation, of_out, products)
    compiled = partial(torch.compile(by_torch), of_out, *products)
    ways: dict[str, Callable[[], Any]] = {
        KERNEL: kernel,
        EAGER: partial(by_torch, of_out, *products),
    }
    ways |= {TRACED: compiled, COPY: lambda: target.copy_(source)}
    moved = dict.fromkeys(ways, whole)
    for name, tile in CASTS.items() if epilogue.is_gated else ():
        cast = Cast(tile, torch.float8_e4m3fn, power_of_2=True)
        ways[f"{KERNEL} + {name}"] = partial(
            activation_gradients.joint_gradients, activation, of_out, products, cast
        )
        moved[f"{KERNEL} + {name}"] = whole + matrix
    found, wanted = kernel(), epilogue.gradients([of_out], products)
    if found is None:
        raise SystemExit(f"{activation} {shape}: found no kernel of this build, wanted one")
    for one, other in zip(found, wanted, strict=True):
        assert other is not None
        error = ((one.double() - other.double()).norm() / other.double().norm()).item()
        if not error <= MOST_ERROR:
            raise SystemExit(f"{activation} {shape}: found a relative error of {error:.3g}")
    return ways, moved


def time_gradients(names: list[str], shapes: list[Shape], samples: int) -> None:
    """Print how long the gradient of each activation takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    table = plain_table("Gradients through activations")
    for heading in ("activation", "M x N", "way", "µs", "÷ its bytes", "÷ agmm"):
        table.add_column(heading, justify="right" if "µ" in heading else "left", no_wrap=True)
    for name in names:
        for shape in shapes:
            ways, moved = gradient_ways(shape, name)
            release_memory(device)
            us = {
                way: statistics.median(found)
                for way, found in time_ways(ways, samples=samples, device=device).items()
            }
            for way, found in us.items():
                by_bytes = found / (us[COPY] * moved[way] / moved[COPY])
                row = name, f"{shape.M} x {shape.N}", way, f"{found:.1f}", f"{by_bytes:.2f}"
                table.add_row(*row, f"{found / us[KERNEL]:.2f}")
    console().print(table)


def main(
    shapes: Annotated[
        str | None, typer.Option(help="MxNxK, comma-separated; N of a weight.")
    ] = None,
    activations: Annotated[str, typer.Option(help="Comma-separated.")] = "silu_mul,gelu",
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    row_major: Annotated[bool, typer.Option("--row-major", help="The layout of B.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time every kernel, too.")] = False,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Time the gradients of products instead.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time matmuls with an activation in the kernel."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    names = activations.split(",")
    for name in names:
        if name not in ACTIVATIONS:
            wanted = ", ".join(ACTIVATIONS)
            raise typer.BadParameter(
                f"found {name}, wanted some of {wanted}", param_hint="--activations"
            )
    chosen = SHAPES if shapes is None else [Shape.parse(one) for one in shapes.split(",")]
    if gradients:
        time_gradients(names, chosen, samples)
        return
    report = new_report(replace(Options(world_size=1, samples=samples).resolved(), ways=None))
    table = plain_table("Activations in the kernel")
    for heading in ("activation", "M x N x K", "way", "µs", "÷ matmul", "compiled ÷"):
        table.add_column(heading, justify="left" if "µ" not in heading else "right", no_wrap=True)
    for name in names:
        for shape in chosen:
            found = measure(shape, name, samples, column_major=not row_major, every_kernel=kernels)
            sizes = {"M": shape.M, "N": shape.N, "K": shape.K}
            report["shapes"].append({**sizes, "activation": name, "ways": found})
            alone, compiled = found[ALONE]["median_us"], found[COMPILED]["median_us"]
            for way, result in found.items():
                us = result["median_us"]
                ratios = f"{us / alone:.3f}", f"{compiled / us:.3f}"
                table.add_row(name, str(shape), way, f"{us:.1f}", *ratios)
    console().print(table)
    if json_path is not None:
        write_json(report, json_path)


if __name__ == "__main__":
    typer.run(main)
