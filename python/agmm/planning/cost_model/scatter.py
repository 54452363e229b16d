"""The cost of a matmul + reduce-scatter whose kernel sends tiles to their owners, and of the ways
to compute a matmul + all-reduce."""

from __future__ import annotations

from math import ceil

from agmm import _core
from agmm.planning import formats
from agmm.planning.cost_model.collectives import fastest_us
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES, constants_for
from agmm.planning.cost_model.matmul import is_b_in_l2, lost_clock_us, matmul_us, roofline_us
from agmm.planning.problems import KernelConfig, Problem

LINE_BYTES = 128
"""The bytes of a line of the L2 cache on Hopper GPUs (NVIDIA's tuning guide)."""


def scatter_tiles(problem: Problem, kernel: KernelConfig) -> int:
    """The number of tiles that a rank sends to another in a launch."""
    part = _core.scatter_part_bytes(problem.m, problem.n, problem.world_size, kernel.core)
    return part // (kernel.tile_m * kernel.tile_n * ELEMENT_BYTES)


def scatter_blocks(problem: Problem, kernel: KernelConfig) -> tuple[int, int, int]:
    """Return the number of clusters of tiles of a rank's rows, of those of all ranks' rows, and how
    many are computed at once.

    Every rank's rows are padded to whole blocks of tiles.
    """
    c = constants_for(problem)
    block_m, block_n = kernel.tile_m * kernel.cluster_m, kernel.tile_n * kernel.cluster_n
    own = ceil(problem.m // problem.world_size / block_m) * ceil(problem.n / block_n)
    at_once = (problem.sm_count or c.sm_count) // (kernel.cluster_m * kernel.cluster_n)
    return own, own * problem.world_size, at_once


def tile_push_scatter_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs. m, n and k are those of the matmul that each rank makes.

    The time is that of the waves of tiles, and of the tiles of others' rows in the last wave on
    their way, which own tiles of that wave await. Or, where the links are slower, it is theirs, and
    then that of the own tiles but for a wave, which is computed while the last are on their way. It
    is never less than that of reading A and B. A tile whose K is split takes a
    fraction of its time, and that of storing sums or adding them up (which was measured in an
    all-gather -> matmul only).
    """
    c = constants_for(problem)
    own, blocks, at_once = scatter_blocks(problem, kernel)
    waves = ceil(blocks / at_once)
    tile_us, block_us = _tile_us(problem, kernel), _sent_block_us(problem, kernel)
    sent_last = max(0, blocks - (waves - 1) * at_once - own)
    multiplied_us = waves * tile_us + sent_last * block_us
    added_us = c.scatter_add_us * kernel.tile_m * kernel.tile_n / 128**2
    last_own_us = max(0.0, own / at_once - 1.0) * (tile_us + added_us)
    linked_us = tile_us + (blocks - own) * block_us + last_own_us
    multiplied_us += lost_clock_us(c, multiplied_us, kernel.schedule)
    computed_us = max(multiplied_us, linked_us)
    read_us = _read_us(problem)
    if c.scatter_reads_anew:
        return _call_us(problem) + roofline_us(computed_us, c.scatter_latency_us + read_us)
    return _call_us(problem) + max(computed_us, read_us)


def _read_us(problem: Problem) -> float:
    """The time in which A and B are read, B for each rank's rows where the constants say so."""
    c = constants_for(problem)
    is_anew = c.scatter_reads_anew and not is_b_in_l2(problem)
    readings = problem.world_size if is_anew else 1
    element_bytes = formats.of(problem.format).element_bytes
    read_bytes = (problem.m + problem.n * readings) * problem.k * element_bytes
    return read_bytes / (c.matmul_gb_per_s * 1e3)


def _call_us(problem: Problem) -> float:
    c = constants_for(problem)
    return c.scatter_us + c.scatter_us_per_rank * (problem.world_size - 1)


def _tile_us(problem: Problem, kernel: KernelConfig) -> float:
    c = constants_for(problem)
    us_per_k = 2e-6 * kernel.tile_m * kernel.tile_n / c.other_tflops_per_sm
    other = us_per_k, c.other_scatter_overhead_us
    us_per_k, overhead_us = c.of_kernel(c.scatter_tile_us, kernel, other)
    if problem.k * formats.of(problem.format).element_bytes % LINE_BYTES:
        us_per_k *= c.of_kernel(c.unaligned_scatter_factor, kernel, 1.0)
    tile_us = overhead_us + us_per_k * problem.k / kernel.splits
    return tile_us if kernel.splits == 1 else tile_us + c.split_us * kernel.splits


def _sent_block_us(problem: Problem, kernel: KernelConfig) -> float:
    """The time that the links take for a cluster of tiles."""
    elements = kernel.tile_m * kernel.cluster_m * kernel.tile_n * kernel.cluster_n
    c = constants_for(problem)
    rate = c.scatter_gb_per_s * c.of_kernel(c.scatter_rate_factor, kernel, 1.0)
    return elements * ELEMENT_BYTES / (rate * 1e3)


def lagged_all_reduce_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs of a matmul + all-reduce by one kernel, which sends finished tiles a lag
    behind the others.

    The time is that of the waves of tiles, and of each launch's last own tiles on their way to all
    other ranks, where they are copied; or that of the links, where they are slower.
    """
    c = constants_for(problem)
    own, blocks, at_once = scatter_blocks(problem, kernel)
    waves, others = ceil(blocks / at_once), problem.world_size - 1
    tile_us = _tile_us(problem, kernel) + LAGGED_TILE_US
    block_us = _sent_block_us(problem, kernel)
    launches = len(_core.scatter_bands(problem.m, problem.world_size))
    own_last = min(own, blocks - (waves - 1) * at_once)
    # Own tiles of the only wave await what is computed beside them.
    sent_first_us = (blocks - own) * block_us if waves == 1 else 0.0
    tail_us = own_last * others * block_us + _COPIED_TILE_US
    multiplied_us = waves * tile_us + sent_first_us
    multiplied_us += lost_clock_us(c, multiplied_us, kernel.schedule)
    linked_us = tile_us + 2 * (blocks - own) * block_us / LAGGED_RATE
    return _call_us(problem) + max(multiplied_us + launches * tail_us, linked_us + _COPIED_TILE_US)


def scatter_all_reduce_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs of a matmul + reduce-scatter by the kernel, then an all-gather of the
    result, by agmm or NCCL. m is a multiple of the ranks."""
    nbytes = problem.m * problem.n * ELEMENT_BYTES
    return tile_push_scatter_us(problem, kernel) + fastest_us("all_gather", nbytes, problem)


def matmul_all_reduce_us(problem: Problem) -> float:
    """Predicted time of the matmul, then an all-reduce, by agmm or NCCL."""
    nbytes = problem.m * problem.n * ELEMENT_BYTES
    return matmul_us(problem) + fastest_us("all_reduce", nbytes, problem)


LAGGED_TILE_US = 5.0
"""The time that a tile takes beside that of a scatter, from eight calls on 4 H100, 8192 columns,
1024 to 8192 rows, K of 2048 to 7168."""
LAGGED_RATE = 0.84
"""The share of the rate of a scatter that is left where partial sums and finished tiles share the
links, from the same calls."""
_COPIED_TILE_US = 12.0
"""The time in which a warp, which has 2 KB under way, copies a tile of 128 x 128. It is an
estimate."""
