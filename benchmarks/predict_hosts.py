"""What is predicted of calls of groups that span hosts, on paper, as a table in Markdown. Needs no
GPU.

    python benchmarks/predict_hosts.py
    python benchmarks/predict_hosts.py --gpu l40s --hosts 4 --ranks 16 --gb-per-s 12.5 \\
        --op matmul_reduce_scatter --shapes 8192x8192x1792

M counts the rows of all ranks, N the columns of the result, K those of A on one rank. By default
there are two hosts of eight GPUs, of which each sends 400 Gb/s to the other host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from agmm.bench.presets import parse_shapes
from agmm.cli.gpu_names import find_gpu
from agmm.planning.cost_model.cards import (
    CARDS,
    Card,
    between_hosts_us,
    unfused_between_hosts_us,
)
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
)
from agmm.planning.shapes import Shape

NETWORK_GB_PER_S = 50.0
"""What 400 Gb/s are."""
HOPPERS = {"nvidia-h200": Card("nvidia-h200", 989, 1979, 4800, 450, "NVIDIA's data sheet")}
"""Cards whose matmuls between hosts are the library's, as those of others, by their data sheets."""
_UP = [Shape(8192, 3584, 8192), Shape(16384, 3584, 8192), Shape(65536, 3584, 8192)]
_DOWN = [Shape(8192, 8192, 1792), Shape(16384, 8192, 1792), Shape(65536, 8192, 1792)]
SHAPES = {
    ALL_GATHER_MATMUL: _UP,
    MATMUL_REDUCE_SCATTER: _DOWN,
    MATMUL_ALL_REDUCE: _DOWN[1:2],
}
"""An MLP of 8,192 and 28,672 features over 16 ranks, gate and up in one product."""
HEADINGS = ("GPU", "op", "shape", "matmul alone", "unfused", "messages", "÷ unfused")


def row(card: Card, problem: Problem, hosts: int, gb_per_s: float) -> str:
    """A row of the table, with times in ms."""
    size = problem.m, problem.n, problem.k
    unfused = unfused_between_hosts_us(card, problem, hosts, gb_per_s)
    messages = between_hosts_us(card, problem, hosts, gb_per_s)
    times = [f"{us / 1e3:.2f}" for us in (card.matmul_us(*size), unfused, messages)]
    what = problem.op.replace("_", "-").removeprefix("matmul-").removesuffix("-matmul")
    name = card.name.removeprefix("nvidia-").split("-")[0].upper()
    shape = " x ".join(map(str, size))
    return f"| {' | '.join([name, what, shape, *times, f'{messages / unfused:.2f}'])} |"


def rows() -> Iterator[str]:
    """The rows of the table of docs/howto/several-hosts.md."""
    for card in (CARDS["nvidia-a100-sxm4-80gb"], *HOPPERS.values()):
        for op, shapes in SHAPES.items():
            for shape in shapes:
                problem = Problem(*shape, op=op, world_size=16)
                yield row(card, problem, 2, NETWORK_GB_PER_S)


def main(
    shapes: Annotated[str | None, typer.Option(help="MxNxK, comma-separated.")] = None,
    op: Annotated[str, typer.Option(help="The op of --shapes.")] = ALL_GATHER_MATMUL,
    gpu: Annotated[str | None, typer.Option(help="As for agmm explain.")] = None,
    hosts: Annotated[int, typer.Option(help="The number of hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="The number of ranks on all hosts.")] = 16,
    gb_per_s: Annotated[
        float, typer.Option(help="What each rank sends to other hosts.")
    ] = NETWORK_GB_PER_S,
) -> None:
    """Predict calls by messages beside the group's backend and the library."""
    found = [*rows()]
    if shapes is not None or gpu is not None:
        name = find_gpu(gpu or "a100")
        cards = CARDS | HOPPERS
        if name not in cards:
            raise typer.BadParameter(f"found {name}, wanted one of {', '.join(cards)}")
        if op not in SHAPES:
            raise typer.BadParameter(f"--op: found {op}, wanted one of {', '.join(SHAPES)}")
        if ranks % hosts:
            raise typer.BadParameter(f"--ranks: found {ranks}, wanted a multiple of {hosts} hosts")
        chosen = SHAPES[op] if shapes is None else parse_shapes(shapes, "--shapes")
        problems = [Problem(*shape, op=op, world_size=ranks) for shape in chosen]
        found = [row(cards[name], problem, hosts, gb_per_s) for problem in problems]
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    print("\n".join(found))


if __name__ == "__main__":
    typer.run(main)
