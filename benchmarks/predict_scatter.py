"""What the cost model predicts of matmul + reduce-scatter, as tables in Markdown. Needs no GPU.

    python benchmarks/predict_scatter.py
    python benchmarks/predict_scatter.py --ranks 2,4 --gpu h200 --shapes 4096x8192x2048

M counts the rows of all ranks, N the columns of the result, K those of A on one rank. agmm is its
fastest kernel, whatever the plan; a time in bold is the shortest of the three.
"""

from __future__ import annotations

from typing import Annotated

import typer

from agmm.bench.presets import parse_shapes
from agmm.cli.gpu_names import find_gpu
from agmm.planning import cost_model
from agmm.planning.problems import MATMUL_REDUCE_SCATTER, Problem
from agmm.planning.shapes import Shape

SHAPES = [
    Shape(m, 8192, k) for k in (2048, 2560, 7168) for m in (512, 1024, 2048, 4096, 8192, 16384)
]
HEADINGS = ("M × N × K", "matmul alone", "agmm", "÷ matmul", "NCCL + cuBLAS", "torch's op")


def row(shape: Shape, ranks: int, gpu: str) -> list[str]:
    problem = Problem(*shape, world_size=ranks, gpu=gpu, op=MATMUL_REDUCE_SCATTER)
    kernels = cost_model.default_kernels(MATMUL_REDUCE_SCATTER, "bfloat16")
    roof = cost_model.matmul_us(problem)
    agmm = min(cost_model.tile_push_scatter_us(problem, kernel) for kernel in kernels)
    others = [
        cost_model.matmul_reduce_scatter_us(problem),
        cost_model.fused_matmul_reduce_scatter_us(problem),
    ]
    best = min(agmm, *others)
    told = [f"**{us:.0f}**" if us == best else f"{us:.0f}" for us in (agmm, *others)]
    name = " × ".join(map(str, shape))
    return [name, f"{roof:.0f}", told[0], f"{agmm / roof:.2f}", *told[1:]]


def main(
    shapes: Annotated[str | None, typer.Option(help="MxNxK, comma-separated.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "4,8",
    gpu: Annotated[str, typer.Option(help="As for agmm explain.")] = "h200",
) -> None:
    """Predict matmul + reduce-scatter beside NCCL + cuBLAS and torch's op."""
    chosen = SHAPES if shapes is None else parse_shapes(shapes, "--shapes")
    for count in map(int, ranks.split(",")):
        print(f"{count} ranks, predicted µs:\n")
        print("| " + " | ".join(HEADINGS) + " |")
        print("|" + "---|" * len(HEADINGS))
        for shape in chosen:
            print("| " + " | ".join(row(shape, count, find_gpu(gpu))) + " |")
        print()


if __name__ == "__main__":
    typer.run(main)
