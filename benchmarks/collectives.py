"""`agmm.collectives` beside the backend's: NCCL on GPUs, gloo on CPU processes.

    torchrun --nproc-per-node 2 benchmarks/collectives.py
    torchrun --nproc-per-node 2 benchmarks/collectives.py --sizes 8192,1048576 --json out.json
    torchrun --nproc-per-node 2 benchmarks/collectives.py --sizes 16777216,67108864 --beside

A size is that of each rank's tensor, in bytes. "nothing" is the time of no work at all between the
same events, which the others contain. "copies" are those of low_contention=True. With --beside
matmuls run on another stream meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from agmm import collectives
from agmm.bench.launcher import choose, rank_pool, torchrun_world_size
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import SAMPLES, pick_device, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.planning.cost_model.collectives import MOST_BYTES
from agmm.testing.reference import relative_error

SIZES = "8192,65536,262144,1048576,4194304,10485760,16777216"
NOTHING = "nothing"


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure(size: int, samples: int, device: torch.device) -> dict[str, float]:
    """Median µs by name, each sample the maximum over the ranks. Collective.

    Raises:
        SystemExit: agmm's sum or gather is wrong.
    """
    world_size = dist.get_world_size()
    dtype = _dtype(device)
    x = torch.randn(max(1, size // dtype.itemsize), device=device).to(dtype)
    gathered = torch.empty(world_size * x.numel(), dtype=dtype, device=device)
    summed = torch.zeros_like(x)
    dist.all_gather_into_tensor(gathered, x)
    total = gathered.double().view(world_size, -1).sum(0)
    if relative_error(collectives.all_reduce(x), total) > 2e-2:
        raise SystemExit(f"all_reduce of {size} bytes: found a wrong sum")
    if not torch.equal(collectives.all_gather(x), gathered):
        raise SystemExit(f"all_gather of {size} bytes: found wrong values")
    ways: dict[str, Callable[[], Any]] = {
        NOTHING: lambda: None,
        "all_reduce, agmm": lambda: collectives.all_reduce(x),
        "all_reduce, backend": lambda: dist.all_reduce(summed),
        "all_gather, agmm": lambda: collectives.all_gather(x),
        "all_gather, backend": lambda: dist.all_gather_into_tensor(gathered, x),
    }
    if device.type == "cuda":
        ways["all_gather, copies"] = lambda: collectives.all_gather(x, low_contention=True)
    return _timed(ways, samples, device)


def measure_beside(size: int, samples: int, device: torch.device) -> dict[str, float]:
    """The times of gathers beside three matmuls of 8192 x 8192 x 8192, and of these alone."""
    x = torch.randn(max(1, size // 2), device=device).bfloat16()
    gathered = x.new_empty(dist.get_world_size() * x.numel())
    A = torch.randn(8192, 8192, device=device).bfloat16()
    side = torch.cuda.Stream()

    def matmuls() -> None:
        for _ in range(3):
            A @ A

    def beside(gather: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                gather()
            matmuls()
            torch.cuda.current_stream().wait_stream(side)

        return both

    by_agmm = partial(collectives.all_gather, x, out=gathered)
    by_copies = partial(by_agmm, low_contention=True)
    by_backend = partial(dist.all_gather_into_tensor, gathered, x)
    ways: dict[str, Callable[[], Any]] = {
        "matmuls": matmuls,
        "copies": by_copies,
        "backend": by_backend,
        "copies beside": beside(by_copies),
        "backend beside": beside(by_backend),
    }
    if x.nbytes * dist.get_world_size() <= MOST_BYTES:
        ways["agmm's kernel beside"] = beside(by_agmm)
    return _timed(ways, samples, device)


def _timed(
    ways: dict[str, Callable[[], Any]], samples: int, device: torch.device
) -> dict[str, float]:
    timed = time_ways(ways, samples=samples, group=dist.group.WORLD, device=device)
    return {name: statistics.median(values) for name, values in timed.items()}


def _report(
    times: dict[int, dict[str, float]], samples: int, device: torch.device
) -> dict[str, Any]:
    dtype, world_size = _dtype(device), dist.get_world_size()
    report = new_report(
        Options(device=device.type, world_size=world_size, samples=samples, dtype=dtype)
    )
    report["settings"]["op"] = "collectives"
    for size, by_name in times.items():
        ways = {name: {"median_us": us} for name, us in by_name.items()}
        report["shapes"].append({"bytes": size, "ways": ways})
    return report


def main(
    sizes: Annotated[str, typer.Option(help="Bytes of each rank's tensor.")] = SIZES,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    beside: Annotated[bool, typer.Option(help="Gathers beside matmuls; on GPUs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time all_reduce and all_gather of agmm and of the backend, in one run. Under torchrun."""
    world_size = torchrun_world_size()
    if world_size is None:
        raise SystemExit("found no torchrun; torchrun --nproc-per-node 2 benchmarks/collectives.py")
    device_type, _ = choose("auto", world_size)
    on_gpus = device_type == "cuda"
    with rank_pool(device_type, world_size):
        device = pick_device()
        if beside and not on_gpus:
            raise SystemExit("beside: found CPU ranks, wanted GPUs")
        one = measure_beside if beside else measure
        times = {size: one(size, samples, device) for size in map(int, sizes.split(","))}
        if dist.get_rank() == 0:
            name = torch.cuda.get_device_name() if on_gpus else "CPU"
            table = plain_table(f"{dist.get_world_size()} ranks on {name}, µs")
            table.add_column("bytes of a rank", justify="right")
            for way in next(iter(times.values())):
                table.add_column(way, justify="right")
            for size, by_way in times.items():
                table.add_row(str(size), *(f"{us:.1f}" for us in by_way.values()))
            console().print(table)
            if json_path is not None:
                write_json(_report(times, samples, device), json_path)


if __name__ == "__main__":
    typer.run(main)
