"""`agmm.matmul_all_reduce` beside the matmul alone and a matmul with the backend's all-reduce.

    torchrun --nproc-per-node 4 benchmarks/all_reduce.py
    torchrun --nproc-per-node 2 benchmarks/all_reduce.py --shapes 64x8192x2048 --json out.json

M counts the rows of A and of the result, N its columns, K those of A on one rank.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import agmm
from agmm.bench.launcher import choose, rank_pool, torchrun_world_size
from agmm.bench.options import Options
from agmm.bench.presets import parse_shapes
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import pick_device, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.planning.shapes import Shape
from agmm.testing.reference import relative_error

SHAPES = ",".join(
    f"{m}x8192x{k}" for k in (2048, 4096, 7168) for m in (16, 64, 256, 512, 1024, 2048, 4096, 8192)
)
SAMPLES = 12
WAYS = "roof", "unfused", "agmm"


def measure(shape: Shape, samples: int, device: torch.device) -> dict[str, dict[str, float]]:
    """What a report has of each way. Collective.

    Raises:
        SystemExit: agmm's sum is wrong.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    A = torch.randn(shape.M, shape.K, device=device).to(dtype)
    B = torch.randn(shape.N, shape.K, device=device).to(dtype).t()
    exact = A.double() @ B.double()
    dist.all_reduce(exact)
    error = relative_error(agmm.matmul_all_reduce(A, B), exact)
    if error > 2e-2:
        raise SystemExit(f"{shape}: found a sum with a relative error of {error:.3g}")

    def unfused() -> torch.Tensor:
        out = A @ B
        dist.all_reduce(out)
        return out

    timed = time_ways(
        {"roof": lambda: A @ B, "unfused": unfused, "agmm": lambda: agmm.matmul_all_reduce(A, B)},
        samples=samples,
        group=dist.group.WORLD,
        device=device,
    )
    us = {way: statistics.median(timed[way]) for way in WAYS}
    found = {way: {"median_us": us[way], "ratio_to_roof": us[way] / us["roof"]} for way in WAYS}
    found["agmm"]["relative_error"] = error
    return found


def _report(found: dict[Shape, Any], samples: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = Options(
        device=device.type, world_size=dist.get_world_size(), samples=samples, dtype=dtype
    )
    report = new_report(options)
    report["settings"]["op"] = "matmul_all_reduce"
    for shape, ways in found.items():
        report["shapes"].append({"M": shape.M, "N": shape.N, "K": shape.K, "ways": ways})
    return report


def main(
    shapes: Annotated[str, typer.Option(help="MxNxK, comma-separated.")] = SHAPES,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time a matmul + all-reduce by agmm and by the backend, in one run. Under torchrun."""
    world_size = torchrun_world_size()
    if world_size is None:
        raise SystemExit("found no torchrun; torchrun --nproc-per-node 2 benchmarks/all_reduce.py")
    device_type, _ = choose("auto", world_size)
    on_gpus = device_type == "cuda"
    with rank_pool(device_type, world_size):
        device = pick_device()
        found = {
            shape: measure(shape, samples, device) for shape in parse_shapes(shapes, "--shapes")
        }
        if dist.get_rank() == 0:
            name = torch.cuda.get_device_name() if on_gpus else "CPU"
            table = plain_table(f"{dist.get_world_size()} ranks on {name}, µs")
            for title in ("shape", "matmul alone", "matmul, backend", "agmm", "backend ÷ agmm"):
                table.add_column(title, justify="right")
            for shape, ways in found.items():
                us = [ways[way]["median_us"] for way in WAYS]
                table.add_row(str(shape), *(f"{one:.1f}" for one in us), f"{us[1] / us[2]:.2f}")
            console().print(table)
            if json_path is not None:
                write_json(_report(found, samples, device), json_path)


if __name__ == "__main__":
    typer.run(main)
