"""`agmm demo`: the fused op on a Llama-70B-shaped projection, checked, timed and drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agmm.bench import benchmarking
from agmm.bench.benchmarking import Options
from agmm.bench.figures import PlotUnavailable
from agmm.bench.timeline import ChunkEvent, draw
from agmm.errors import InvalidArgument
from agmm.testing.cases import Shape, make_operands

WORLD_SIZE = 4
HIDDEN = 8192
TOKENS = 8192
QKV_WIDTH = (64 + 8 + 8) * 128
"""Llama 3 70B: 64 query heads and 8 key and 8 value heads of 128."""
CPU_SCALE = 8
"""On the CPU every dimension is this many times smaller."""

CPU_WAYS = ("roof", "unfused", "agmm")
CUDA_WAYS = ("roof", "unfused", "unfused-graph", "agmm", "agmm-graph")

_ROW_MULTIPLE = {"cuda": 128, "cpu": 1}
_TIMEOUT_S = 120.0
_CALLS_BEFORE_TIMELINE = 3


@dataclass(frozen=True)
class DemoResult:
    """The benchmark report of the one shape, the picture's path, and why there is none."""

    report: dict[str, Any]
    picture: Path | None
    no_picture: str | None

    @property
    def failure(self) -> str | None:
        """Why the demo did not show what it should: an agmm way that failed or was wrong."""
        for name, way in self.report["shapes"][0]["ways"].items():
            if name.startswith("agmm") and way["reason"] is not None:
                return f"{name}: {way['reason']}"
        return None


def choose(device: str, world_size: int | None) -> tuple[str, int]:
    """Device and world size from 'auto', 'cuda' or 'cpu' and a wish: GPUs where at least 2 are.

    Raises InvalidArgument where there are too few GPUs.
    """
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count >= max(2, world_size or 0) else "cpu"
    if device == "cuda":
        if count == 0:
            raise InvalidArgument("device: found cuda, wanted cpu: no GPU is visible here")
        size = min(WORLD_SIZE, count) if world_size is None else world_size
        if size < 1 or size > count:
            raise InvalidArgument(f"world size: found {size}, wanted 1 to {count}, the GPUs here")
        return device, size
    return device, WORLD_SIZE if world_size is None else world_size


def why_cpu(device: str, world_size: int | None) -> str | None:
    """What to say where `choose` takes CPU processes though there are GPUs, else None."""
    count = torch.cuda.device_count()
    if device != "auto" or count == 0 or choose(device, world_size)[0] == "cuda":
        return None
    if world_size is not None and world_size > count:
        return f"{world_size} ranks are more than the {count} GPUs here: on CPU processes"
    return "one GPU is here, and overlap needs 2: on CPU processes"


def projection_shape(device: str, world_size: int) -> Shape:
    """The QKV projection of one tensor-parallel rank, scaled down on the CPU."""
    scale = 1 if device == "cuda" else CPU_SCALE
    multiple = _ROW_MULTIPLE[device]
    rows = max(1, round(TOKENS / scale / world_size / multiple)) * multiple
    width = -(-QKV_WIDTH // scale // world_size // 8) * 8
    return Shape(rows * world_size, width, HIDDEN // scale)


def run(
    device: str,
    world_size: int,
    output: Path,
    *,
    samples: int = 10,
    progress: Callable[[str], None] = lambda line: None,
) -> DemoResult:
    """Starts the ranks, checks and times the ways, and draws rank 0's overlap into `output`."""
    from agmm.testing.ranks import RankPool

    shape = projection_shape(device, world_size)
    ways = CUDA_WAYS if device == "cuda" else CPU_WAYS
    options = Options(
        device=device, world_size=world_size, shapes=(shape,), ways=ways, samples=samples
    ).resolved()
    report = benchmarking.new_report(options)
    where = "GPUs" if device == "cuda" else "CPU processes"
    progress(f"starting {world_size} ranks on {where}")
    with RankPool(world_size, device=device, timeout_s=_TIMEOUT_S) as pool:
        progress(f"checking and timing {shape} (gathered M x N per rank x K)")
        report["shapes"].append(pool.run(benchmarking.measure, shape, options)[0])
        failed = DemoResult(report, None, None).failure
        if failed is not None:
            return DemoResult(report, None, "the op did not run")
        progress("recording one call")
        events = pool.run(record_timeline, shape, options)[0]
    title = f"agmm, rank 0 of {world_size} {where}, {shape.M} x {shape.N} x {shape.K}"
    try:
        draw(events, output, title=title)
    except PlotUnavailable as e:
        return DemoResult(report, None, str(e))
    return DemoResult(report, output, None)


def explain(result: DemoResult) -> list[str]:
    """What the demo showed, in sentences."""
    summary = benchmarking.summarize(result.report["shapes"][0])
    lines = []
    if summary.agmm is not None and summary.best_other_us is not None and summary.roof is not None:
        ratio = summary.best_other_us / summary.agmm
        lines.append(
            f"All results agree with the plain product. agmm took {summary.agmm / summary.roof:.2f}"
            f" times the matmul alone, and {summary.best_other} {ratio:.2f} times as long as agmm."
        )
    if result.report["settings"]["device"] == "cpu":
        cores = result.report["machine"]["host_cores"]
        lines.append(
            f"CPU processes ({result.report['settings']['world_size']} on {cores} cores) show that "
            "the op works, not how fast it is: that takes GPUs."
        )
    if result.picture is not None:
        lines.append(f"The overlap on rank 0 is drawn in {result.picture}")
    elif result.no_picture is not None:
        lines.append(f"No picture: {result.no_picture}")
    return lines


def record_timeline(shape: Shape, options: Options) -> Sequence[ChunkEvent]:
    """One call's times on this rank, by tile on CUDA and by chunk on the CPU. Every rank of the
    default group calls this."""
    group = dist.group.WORLD
    assert group is not None
    assert options.dtype is not None
    device = torch.device(options.device)
    operands = make_operands(
        shape, dist.get_rank(), dist.get_world_size(), dtype=options.dtype, device=device
    )
    if options.device == "cuda":
        from agmm.bench import record

        return record.tiles_on_cuda(operands.A_shard, operands.B, group)
    from agmm.runtime.cpu import CpuWorkspace

    slot_bytes = shape.M * shape.K * options.dtype.itemsize
    workspace = CpuWorkspace.create(group, slot_bytes)
    events: list[dict[str, int]] = []
    for _ in range(_CALLS_BEFORE_TIMELINE):
        events.clear()
        dist.barrier()
        workspace.all_gather_matmul(
            operands.A_shard, [operands.B], [None], return_A=False, timeline=events
        )
    dist.barrier()
    called_ns = next(e["arrived_ns"] for e in events if e["source"] == dist.get_rank())
    for event in events:
        event["called_ns"] = called_ns
    for previous, event in itertools.pairwise(events):
        event["wait_begin_ns"] = previous["end_ns"]
    return events
