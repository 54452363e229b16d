"""Which kernel an fp8 product gets where no table says it (`Planner`). There is no cost model for
fp8: it goes by whole waves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from agmm import _core
from agmm._core import Accumulation
from agmm.planning.plans import MATMUL_REDUCE_SCATTER, KernelConfig, Plan, Problem

_NARROW = 1.1
"""How much longer a tile takes for its size where it is narrower than 256 columns: it reads more
from shared memory for each product. An estimate."""

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


def choose(kernels: Sequence[KernelConfig], m: int, n: int, sm_count: int) -> KernelConfig:
    """One of them with an order of tiles, for a product [m, n]; ``kernels`` are not none."""
    return usual_order(min(kernels, key=lambda kernel: _time(kernel, m, n, sm_count)), m)


def _time(kernel: KernelConfig, m: int, n: int, sm_count: int) -> float:
    ctas = kernel.cluster_m * kernel.cluster_n
    rows = kernel.tile_m * kernel.cluster_m
    columns = kernel.tile_n * kernel.cluster_n
    clusters = -(-m // rows) * -(-n // columns)
    waves = -(-clusters // max(1, sm_count // ctas))
    size = kernel.tile_m * kernel.tile_n
    return waves * size * (1 if kernel.tile_n >= 256 else _NARROW)


def usual_order(kernel: KernelConfig, m: int) -> KernelConfig:
    """As `heuristics.usual_order` has it for operands of 16 bits."""
    raster, max_swizzle = "along_n", 8
    if kernel.schedule == "pingpong":
        has_few_rows = -(-m // kernel.tile_m) <= _FEW_ROWS_OF_TILES
        raster, max_swizzle = "along_m", 1 if has_few_rows else 4
    return KernelConfig.parse(f"{kernel.kernel}/swizzle{max_swizzle}/{raster}")
