"""Which kernel an fp8 product gets where no table says it (`Planner`): the one whose whole waves
should take the least time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from agmm import _core
from agmm._core import Accumulation
from agmm.planning.plans import MATMUL_REDUCE_SCATTER, KernelConfig, Plan, Problem


class _Tile(NamedTuple):
    tflops_per_sm: float
    overhead_us: float


_TILES = {
    (128, 256): _Tile(13.0, 6.5),
    (128, 224): _Tile(12.5, 6.5),
    (256, 160): _Tile(12.75, 6.75),
    (256, 128): _Tile(12.75, 6.5),
    (128, 160): _Tile(11.5, 4.0),
    (128, 128): _Tile(11.5, 4.25),
    (64, 128): _Tile(7.75, 2.5),
    (64, 64): _Tile(5.0, 2.25),
}
"""Fitted to `benchmarks/gemm.py --fp8` on one H100: 19 shapes, with scales of rows and of whole
tensors. Of tiles that accumulate slowly or scale blocks it is the ratio that counts."""
_OTHER_TILE = _Tile(11.0, 5.0)
"""Between those."""

_FEW_ROWS_OF_TILES = 8
"""Up to so many a swizzle gains nothing, as with operands of 16 bits. Not measured for fp8."""


@cache
def are_built() -> bool:
    """Whether this build has any."""
    return any(facts.is_fp8 for facts in _core.kernel_facts())


@cache
def served_by(dtype: str, accumulation: Accumulation, *, scatters: bool = False) -> Accumulation:
    """That by which the kernels of `built` serve it: where none accumulates fast, slowly, which is
    only more exact."""
    if accumulation == Accumulation.fast and not built(dtype, accumulation, scatters=scatters):
        return Accumulation.slow
    return accumulation


@cache
def built(
    dtype: str, accumulation: Accumulation, *, scatters: bool = False
) -> tuple[KernelConfig, ...]:
    """The kernels of this build for a dtype of `_core.DType`; ``scatters``: those of matmul +
    reduce-scatter."""
    facts = _core.scatter_kernel_facts() if scatters else _core.kernel_facts()
    return tuple(
        KernelConfig.parse(f.kernel)
        for f in facts
        if f.is_fp8 and (f.dtype.name, f.accumulation) == (dtype, accumulation)
    )


def of_problem(problem: Problem) -> tuple[KernelConfig, ...]:
    """The kernels of this build for a problem with an ``accumulation``."""
    accumulation = Accumulation.__members__[problem.accumulation]
    scatters = problem.op == MATMUL_REDUCE_SCATTER
    return built(problem.dtype, accumulation, scatters=scatters)


def usual_plans(problem: Problem) -> list[Plan]:
    """Each of those in its usual order."""
    return [Plan("push", usual_order(kernel, problem.m)) for kernel in of_problem(problem)]


def choose(kernels: Sequence[KernelConfig], m: int, n: int, k: int, sm_count: int) -> KernelConfig:
    """One of them with an order of tiles, for [m, k] @ [k, n]; ``kernels`` are not none."""
    return usual_order(min(kernels, key=lambda kernel: _waves_us(kernel, m, n, k, sm_count)), m)


def _waves_us(kernel: KernelConfig, m: int, n: int, k: int, sm_count: int) -> float:
    ctas = kernel.cluster_m * kernel.cluster_n
    rows = kernel.tile_m * kernel.cluster_m
    columns = kernel.tile_n * kernel.cluster_n
    clusters = -(-m // rows) * -(-n // columns)
    waves = -(-clusters // max(1, sm_count // ctas))
    tile = _TILES.get((kernel.tile_m, kernel.tile_n), _OTHER_TILE)
    tile_us = 2e-6 * kernel.tile_m * kernel.tile_n * k / tile.tflops_per_sm
    return waves * (tile_us + tile.overhead_us)


def usual_order(kernel: KernelConfig, m: int) -> KernelConfig:
    """As `heuristics.usual_order` has it for operands of 16 bits."""
    raster, max_swizzle = "along_n", 8
    if kernel.schedule == "pingpong":
        has_few_rows = -(-m // kernel.tile_m) <= _FEW_ROWS_OF_TILES
        raster, max_swizzle = "along_m", 1 if has_few_rows else 4
    return KernelConfig.parse(f"{kernel.kernel}/swizzle{max_swizzle}/{raster}")
