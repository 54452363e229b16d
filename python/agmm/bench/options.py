"""The options of a benchmark: what it is to run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agmm.bench import collective_ways, moe_presets, moe_scaled_ways, norm_ways
from agmm.bench.scaled_ways import check_scaling, ways_of
from agmm.bench.timer import SAMPLES, SPIN_US, WARMUP
from agmm.bench.units import size
from agmm.bench.ways import select_ways
from agmm.errors import InvalidArgument
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    COLLECTIVES,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MOE,
    NORMED,
    UNDIVIDED,
)
from agmm.planning.shapes import AnyShape, Shape
from agmm.runtime.scaled import FP8
from agmm.testing.cases import (
    ALL_REDUCE_BENCH_SHAPES,
    BENCH_SHAPES,
    CPU_BENCH_SHAPES,
    SCATTER_BENCH_SHAPES,
)

DEFAULT_WORLD_SIZE = 4  # as in the figures that the project started from

_ON_GPUS = {
    ALL_GATHER_MATMUL: BENCH_SHAPES,
    MATMUL_REDUCE_SCATTER: SCATTER_BENCH_SHAPES,
    MATMUL_ALL_REDUCE: ALL_REDUCE_BENCH_SHAPES,
    NORMED: norm_ways.GPU_SHAPES,
}
LIMIT_S = 120.0
"""The default of the time that one call of a way may take."""


@dataclass(frozen=True)
class Options:
    """What to run. Where `shapes` or `ways` is None, all of the device's defaults are; spin in
    µs."""

    device: str = "cuda"
    world_size: int = DEFAULT_WORLD_SIZE
    shapes: Sequence[AnyShape] | None = None
    ways: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    samples: int = SAMPLES
    warmup: int = WARMUP
    spin_us: float = SPIN_US
    seed: int = 0
    limit_s: float = LIMIT_S
    """The time that one call of a way may take; then its ranks are ended, and the way has no
    time."""
    op: str = ALL_GATHER_MATMUL
    scaling: str | None = None
    """The kind of scales of fp8 operands; row-wise where none is given."""

    def resolved(self) -> Options:
        """Return these options with every default filled in. Raises InvalidArgument for what cannot
        run."""
        shapes = self.shapes
        if self.op == MOE:
            mixtures = moe_presets.checked(shapes, self.device, self.world_size)
            if self.dtype in FP8:
                moe_scaled_ways.check(self.dtype, self.scaling, mixtures)
            shapes = mixtures
        if shapes is None:
            shapes = _default_shapes(self.op, self.device)
        for shape in shapes:
            if shape.M % self.world_size and self.op not in UNDIVIDED:
                raise InvalidArgument(
                    f"shape: found {shape}, wanted an M that is a multiple of the world size, "
                    f"{self.world_size}"
                )
        dtype = self.dtype
        if dtype is None:
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        if self.op in (NORMED, *COLLECTIVES) and dtype in FP8:
            raise InvalidArgument(f"dtype: found {dtype} with {self.op}, wanted one without scales")
        plain = [shape for shape in shapes if isinstance(shape, Shape)]
        scaling = check_scaling(dtype, self.scaling, plain)
        if scaling is not None and self.op == MATMUL_ALL_REDUCE:
            raise InvalidArgument(
                f"dtype: found {dtype} with {self.op}, wanted one without scales: of fp8 "
                "`agmm bench` times the other ops"
            )
        ways = tuple(select_ways(self.ways, self.device, self.op, ways_of(self.op, scaling)))
        if self.device == "cpu":
            check_memory(shapes, dtype, self.world_size)
        return replace(self, shapes=tuple(shapes), ways=ways, dtype=dtype, scaling=scaling)


def _default_shapes(op: str, device: str) -> Sequence[AnyShape]:
    """The shapes that are measured where none is named."""
    if op in COLLECTIVES:
        return collective_ways.GPU_SHAPES if device == "cuda" else collective_ways.CPU_SHAPES
    return _ON_GPUS[op] if device == "cuda" else CPU_BENCH_SHAPES


def check_memory(shapes: Sequence[AnyShape], dtype: torch.dtype, world_size: int) -> None:
    """Raises InvalidArgument where the operands and the product of the CPU ranks, all on this host,
    do not fit into what is free: Linux would end a process rather than refuse."""
    free = _free_memory()
    for shape in shapes:
        elements = shape.elements(world_size)
        # The CPU multiplies fp8 operands in float32.
        itemsize = torch.float32.itemsize if dtype in FP8 else dtype.itemsize
        needed = world_size * elements * itemsize
        if free is not None and needed > free:
            raise InvalidArgument(
                f"shape: found {shape}, of which {world_size} ranks need {size(needed)}, wanted "
                f"at most {size(free)}, the memory that is free here"
            )


def _free_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
