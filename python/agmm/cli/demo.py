"""`agmm demo`: the fused op on a Llama-70B-shaped projection, checked, timed and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agmm.bench import measure, record, reports
from agmm.bench.figures import PlotUnavailable
from agmm.bench.options import Options
from agmm.bench.timeline_picture import draw
from agmm.bench.units import duration
from agmm.bench.way import ROOF
from agmm.bench.ways import ways_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import Shape

WORLD_SIZE = 4
HIDDEN = 8192
TOKENS = 8192
QKV_WIDTH = (64 + 8 + 8) * 128
"""Llama 3 70B: 64 query heads and 8 key and 8 value heads of 128."""
CPU_SCALE = 8
"""On the CPU every dimension is this many times smaller."""

CPU_WAYS = (ROOF, "unfused", "agmm")
CUDA_WAYS = (ROOF, "unfused", "unfused-graph", "agmm", "agmm-graph")

_ROW_MULTIPLE = {"cuda": 128, "cpu": 1}
_TIMEOUT_S = 120.0  # for all of it, which takes some 10 s on 2 cores


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
    report = reports.new_report(options)
    where = "GPUs" if device == "cuda" else "CPU processes"
    progress(f"starting {world_size} ranks on {where}")
    with RankPool(world_size, device=device, timeout_s=_TIMEOUT_S) as pool:
        progress(f"checking and timing {shape} (gathered M x N per rank x K)")
        report["shapes"].append(pool.run(measure.measure, shape, options)[0])
        failed = DemoResult(report, None, None).failure
        if failed is not None:
            return DemoResult(report, None, "the op did not run")
        progress("recording one call")
        events = pool.run(record.record_timeline, shape, options)[0]
    title = f"all_gather_matmul, rank 0 of {world_size} {where}, {shape.M} x {shape.N} x {shape.K}"
    try:
        draw(events, output, title=title)
    except PlotUnavailable as e:
        return DemoResult(report, None, str(e))
    return DemoResult(report, output, None)


def explain(result: DemoResult) -> list[str]:
    """What the demo showed, in sentences."""
    summary = reports.summarize(result.report["shapes"][0])
    lines = []
    best, best_us = summary.best_other, summary.best_other_us
    if summary.agmm and summary.roof and best and best_us:
        lines.append(
            f"All results agree with the plain product. agmm took {duration(summary.agmm)}, the "
            f"matmul alone {duration(summary.roof)}, the fastest other way "
            f"({ways_of(ALL_GATHER_MATMUL)[best].title}) {duration(best_us)}."
        )
    if result.report["settings"]["device"] == "cpu":
        cores = result.report["machine"]["host_cores"]
        lines.append(
            f"CPU processes ({result.report['settings']['world_size']} on {cores} cores) show that "
            "the op works, not how fast it is: that takes GPUs."
        )
    if result.picture is not None:
        lines.append(
            f"When each chunk came to rank 0 and was computed is drawn in {result.picture}. Time 0 "
            "is rank 0's call; ranks that called before it have sent their chunks by then."
        )
    elif result.no_picture is not None:
        lines.append(f"No picture: {result.no_picture}")
    return lines
