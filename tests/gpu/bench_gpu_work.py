"""A way of `agmm bench` whose kernel does not end, in ranks on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from agmm.bench import measure
from agmm.bench.options import Options
from agmm.bench.way import Result, Workload
from agmm.bench.ways import WAYS
from agmm.planning.shapes import Shape

NAME = "hangs-on-gpu"
_CYCLES = 10**13
"""Hours."""


def _prepare(p: Workload) -> Callable[[], Result]:
    call = WAYS["roof"].prepare(p)

    def hang() -> Result:
        if dist.get_rank() == 0:
            torch.cuda._sleep(_CYCLES)
        return call()

    return hang


def add_way() -> None:
    way = replace(WAYS["roof"], name=NAME, title=NAME, prepare=_prepare)
    WAYS[NAME] = way


def measure_watched(folder: str, shape: Shape, options: Options) -> dict[str, Any]:
    """Runs `measure.measure_watched` in a rank that has the way too."""
    add_way()
    return measure.measure_watched(folder, shape, options)
