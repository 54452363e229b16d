"""What a matmul + reduce-scatter costs whose kernel sends tiles to their owners."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from agmm import _core
from agmm.planning.cost_model.collectives import fastest_us
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES, constants
from agmm.planning.cost_model.matmul import lost_clock_us, matmul_us
from agmm.planning.plans import KernelConfig, Problem


def scatter_tiles(problem: Problem, kernel: KernelConfig) -> int:
    """Tiles that a rank sends to another in a launch."""
    part = _core.scatter_part_bytes(problem.m, problem.n, problem.world_size, kernel.core)
    return part // (kernel.tile_m * kernel.tile_n * ELEMENT_BYTES)


def scatter_blocks(problem: Problem, kernel: KernelConfig) -> tuple[int, int, int]:
    """Clusters of tiles of a rank's rows, of all ranks' rows, and how many are computed at once.

    Every rank's rows are padded to whole blocks of tiles.
    """
    c = constants(problem.gpu)
    block_m, block_n = kernel.tile_m * kernel.cluster_m, kernel.tile_n * kernel.cluster_n
    own = ceil(problem.m // problem.world_size / block_m) * ceil(problem.n / block_n)
    at_once = (problem.sm_count or c.sm_count) // (kernel.cluster_m * kernel.cluster_n)
    return own, own * problem.world_size, at_once


def tile_push_scatter_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs. m, n and k are those of the matmul that each rank makes.

    The time is that of the waves of tiles, and of the tiles of others' rows in the last wave on
    their way, which own tiles of that wave await; or that of the links, where they are slower. A
    tile whose K is split takes a part of its time, and that of leaving sums or adding them up
    (not measured here: as in an all-gather -> matmul).
    """
    c = constants(problem.gpu)
    own, blocks, at_once = scatter_blocks(problem, kernel)
    waves = ceil(blocks / at_once)
    us_per_k, overhead_us = c.scatter_tile_us.get(
        kernel.kernel,
        (2e-6 * kernel.tile_m * kernel.tile_n / c.other_tflops_per_sm, _OTHER_OVERHEAD_US),
    )
    tile_us = overhead_us + us_per_k * problem.k / kernel.splits
    if kernel.splits > 1:
        tile_us += c.split_us * kernel.splits
    block_elements = kernel.tile_m * kernel.cluster_m * kernel.tile_n * kernel.cluster_n
    block_us = block_elements * ELEMENT_BYTES / (c.scatter_gb_per_s * 1e3)
    sent_last = max(0, blocks - (waves - 1) * at_once - own)
    multiplied_us = waves * tile_us + sent_last * block_us
    linked_us = tile_us + (blocks - own) * block_us
    multiplied_us += lost_clock_us(c, multiplied_us, kernel.schedule)
    return c.scatter_us + max(multiplied_us, linked_us)


def matmul_all_reduce_us(problem: Problem) -> float:
    """Predicted time of the matmul, then an all-reduce, by agmm or NCCL. Not measured."""
    nbytes = problem.m * problem.n * ELEMENT_BYTES
    return matmul_us(problem) + fastest_us("all_reduce", nbytes, problem)


@lru_cache(maxsize=4096)
def is_all_reduce_scattered(problem: Problem, kernel: KernelConfig) -> bool:
    """Whether a matmul + all-reduce is to be a scatter by this kernel and an all-gather of the
    result, rather than a matmul and an all-reduce: where it is predicted to save a tenth, since
    nobody has measured them beside each other. m is a multiple of the ranks."""
    gather_us = fastest_us("all_gather", problem.m * problem.n * ELEMENT_BYTES, problem)
    scattered_us = tile_push_scatter_us(problem, kernel) + gather_us
    return scattered_us < _ALL_REDUCE_GAIN * matmul_all_reduce_us(problem)


_ALL_REDUCE_GAIN = 0.9
_OTHER_OVERHEAD_US = 4.0
"""Of a kernel without constants: as the slowest of those that have some."""
