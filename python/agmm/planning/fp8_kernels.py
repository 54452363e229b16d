"""Which kernel an fp8 product gets where no table says it (`Planner`): the one whose whole waves
should take the least time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from agmm import _core
from agmm._core import MAX_CLUSTER_SPLITS, Accumulation
from agmm.planning import cost_model
from agmm.planning.cost_model import clusters_at_once
from agmm.planning.legality import copy_transports
from agmm.planning.plans import (
    ALL_GATHER_MATMUL,
    MATMUL_REDUCE_SCATTER,
    KernelConfig,
    Plan,
    Problem,
)
from agmm.runtime import kernels as built_kernels


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
_SWAPPED_TILES = {(64, 128): _Tile(9.25, 5.75)}
"""Of swapped kernels: 7 shapes of at most 768 rows, with scales of whole tensors."""
_OTHER_TILE = _Tile(11.0, 5.0)
"""Between those."""
_SPLIT_US = 1.0
"""Of a tile whose K is split between the CTAs of a cluster."""

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
    op = MATMUL_REDUCE_SCATTER if scatters else ALL_GATHER_MATMUL
    return tuple(map(KernelConfig.of, built_kernels.built(op, dtype, accumulation.name)))


def of_problem(problem: Problem) -> tuple[KernelConfig, ...]:
    """The kernels of this build that serve a problem with an ``accumulation``: between ranks by
    push, since nothing else moves fp8 operands."""
    accumulation = Accumulation.__members__[problem.accumulation]
    kernels = built(problem.dtype, accumulation, scatters=problem.op == MATMUL_REDUCE_SCATTER)
    if problem.world_size == 1:
        return kernels
    return tuple(kernel for kernel in kernels if "push" in copy_transports(problem, kernel))


def predicted(problem: Problem) -> tuple[KernelConfig, ...]:
    """Those that `choose` may take where no table says anything: swapped ones were timed alone, not
    behind a gather between ranks."""
    kernels = of_problem(problem)
    return tuple(kernel for kernel in kernels if problem.world_size == 1 or not kernel.swapped)


def size_of(problem: Problem) -> tuple[int, int, int, int]:
    """M, N, K and the multiprocessors."""
    sm_count = problem.sm_count or cost_model.constants(problem.gpu).sm_count
    return problem.m, problem.n, problem.k, sm_count


def usual_plans(problem: Problem) -> list[Plan]:
    """Each of `of_problem` in its usual order, K whole and in as many parts as `choose` says."""
    configs = (
        config
        for kernel in of_problem(problem)
        for config in (usual_order(kernel, problem.m), choose((kernel,), *size_of(problem)))
    )
    return [Plan("push", config) for config in dict.fromkeys(configs)]


def choose(kernels: Sequence[KernelConfig], m: int, n: int, k: int, sm_count: int) -> KernelConfig:
    """One of them with an order of tiles and parts of K, for [m, k] @ [k, n]; ``kernels`` are not
    none."""
    candidates = (each for kernel in kernels for each in with_splits(kernel, m, n, k, sm_count))
    return usual_order(min(candidates, key=lambda kernel: _waves_us(kernel, m, n, k, sm_count)), m)


def with_splits(
    kernel: KernelConfig, m: int, n: int, k: int, sm_count: int
) -> Iterator[KernelConfig]:
    """The kernel with K in each number of parts that a cluster may have, all tiles in one wave."""
    most = 1
    if kernel.splits_in_cluster:
        fit = sm_count // max(1, _tiles(kernel, m, n))
        most = max(1, min(fit, -(-k // kernel.tile_k), MAX_CLUSTER_SPLITS))
    for splits in range(1, most + 1):
        yield replace(kernel, splits=splits)


def fits(kernel: KernelConfig, m: int, n: int, k: int, sm_count: int) -> bool:
    """Whether a cluster may have as many parts of K as it says."""
    configs = with_splits(kernel, m, n, k, sm_count)
    return not kernel.splits_in_cluster or any(kernel.splits == c.splits for c in configs)


def _tiles(kernel: KernelConfig, m: int, n: int) -> int:
    """In clusters, where kernels have some."""
    rows = kernel.tile_m * kernel.cluster_m
    columns = kernel.tile_n * kernel.cluster_n
    return -(-m // rows) * -(-n // columns)


def _waves_us(kernel: KernelConfig, m: int, n: int, k: int, sm_count: int) -> float:
    ctas = kernel.cluster_m * kernel.cluster_n * kernel.splits
    waves = -(-_tiles(kernel, m, n) // max(1, clusters_at_once(sm_count, ctas)))
    tiles = _SWAPPED_TILES if kernel.swapped else _TILES
    tile = tiles.get((kernel.tile_m, kernel.tile_n), _OTHER_TILE)
    tile_us = 2e-6 * kernel.tile_m * kernel.tile_n * k / kernel.splits / tile.tflops_per_sm
    tile_us += tile.overhead_us + (_SPLIT_US if kernel.splits > 1 else 0.0)
    return waves * tile_us


def usual_order(kernel: KernelConfig, m: int) -> KernelConfig:
    """As `heuristics.usual_order` has it for operands of 16 bits."""
    raster, max_swizzle = "along_n", 8
    if kernel.schedule == "pingpong":
        has_few_rows = -(-m // kernel.tile_m) <= _FEW_ROWS_OF_TILES
        raster, max_swizzle = "along_m", 1 if has_few_rows else 4
    return replace(kernel, raster=raster, max_swizzle=max_swizzle, across=False)
