"""The cost of a call by NCCL and the library's matmul, and by torch's fused op."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from agmm.planning import formats
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES, Constants, constants_for
from agmm.planning.cost_model.matmul import (
    arithmetic_us,
    behind_us,
    lost_clock_us,
    matmul_memory_us,
    matmul_us,
    roofline_us,
)
from agmm.planning.problems import Problem

GATHER_ROOM = 1.7
"""How many times as long as the gather a product has to take to hide it: see
`is_gather_by_copies`."""


def all_gather_us(problem: Problem) -> float:
    """Predicted time of the library's all-gathers of A, and of its scales where it has some, in
    µs."""
    c = constants_for(problem)
    rows = (problem.world_size - 1) * (problem.m // problem.world_size)
    row_sizes = formats.of(problem.format).gathers(problem.k)
    return sum(library_all_gather_us(c, rows * size) for size in row_sizes)


def library_all_gather_us(c: Constants, received: float) -> float:
    """Predicted time in µs of NCCL's all-gather, of which a rank receives so many bytes."""
    if received < c.small_gather_mb * 1e6:
        return c.small_gather_us + received / (c.small_gather_gb_per_s * 1e3)
    return c.all_gather_us + received / (c.all_gather_gb_per_s * 1e3)


def unfused_us(problem: Problem, alone_us: float | None = None) -> float:
    """Predicted time of all-gather, then matmul, in µs, and of an activation behind it.
    ``alone_us`` is the matmul's where it is known."""
    us = matmul_us(problem) if alone_us is None else alone_us
    return all_gather_us(problem) + us + behind_us(problem)


def _scattered_bytes(problem: Problem) -> float:
    """The bytes that a rank sends of its partial sums, and receives."""
    return (1 - 1 / problem.world_size) * problem.m * problem.n * ELEMENT_BYTES


def matmul_reduce_scatter_us(problem: Problem) -> float:
    """Predicted time of the matmul, then NCCL's reduce-scatter of its rows, in µs. m, n and k are
    those of the matmul that each rank makes."""
    sent = _scattered_bytes(problem)
    return matmul_us(problem) + library_reduce_scatter_us(constants_for(problem), sent)


def library_reduce_scatter_us(c: Constants, sent: float) -> float:
    """Predicted time in µs of NCCL's reduce-scatter, of which a rank sends so many bytes."""
    small_us = c.small_reduce_scatter_us + sent / (c.small_reduce_scatter_gb_per_s * 1e3)
    return min(small_us, c.reduce_scatter_us + sent / (c.reduce_scatter_gb_per_s * 1e3))


def fused_matmul_reduce_scatter_us(problem: Problem) -> float:
    """Predicted time in µs of torch's ``symm_mem.fused_matmul_reduce_scatter``.

    It multiplies the rows for one rank after the other, copies each product when it is there beside
    the next one, and sums up what it has received. So the time is that of the products, or of the
    first one and the copies, and of the sum.
    """
    c = constants_for(problem)
    ranks = problem.world_size
    shard = replace(problem, m=problem.m // ranks)
    # The products run one after the other: the latency of the next one is hidden, and the clock
    # falls over all.
    shard_us = roofline_us(arithmetic_us(shard), matmul_memory_us(shard))
    products_us = ranks * shard_us
    products_us += lost_clock_us(c, products_us, "library")
    copies_us = _scattered_bytes(problem) / (c.fused_reduce_scatter_gb_per_s * 1e3)
    summed = (1 + 1 / ranks) * problem.m * problem.n * ELEMENT_BYTES
    barriers_us = c.fused_reduce_scatter_us + c.fused_reduce_scatter_us_per_rank * ranks
    return (
        c.launch_us
        + barriers_us
        + max(products_us, shard_us + copies_us)
        + summed / (c.memory_gb_per_s * 1e3)
    )


@lru_cache(maxsize=4096)
def is_reduce_scatter_fused(problem: Problem) -> bool:
    """Whether torch's fused op is to be taken for a matmul whose rows are scattered.

    It makes 17 launches from Python with 4 ranks, and has to save ``fused_reduce_scatter_gain_us``
    on the GPU for the host's time. It is so in CUDA graphs too, so that the calls before a capture
    make the workspace that torch's op needs.
    """
    saved_us = matmul_reduce_scatter_us(problem) - fused_matmul_reduce_scatter_us(problem)
    return saved_us > constants_for(problem).fused_reduce_scatter_gain_us


def is_gather_by_copies(problem: Problem, *, is_scatter_by_torch: bool) -> bool:
    """Whether copy engines should gather the rows of a backward beside the product that is
    scattered, rather than NCCL, whose kernel takes multiprocessors from the product.

    Args:
        problem: the product ``dout @ B`` on one rank; the gathered tensor is as large.
        is_scatter_by_torch: by torch's fused op, which copies over the same links. Both are hidden
            where the product takes `GATHER_ROOM` times as long as the gather. Beside a kernel of
            agmm's NCCL's takes more time from it (16384 x 8192 x 2560 on 4 H200: 1.96 ms for 1.31).
            Where NCCL scatters, its gather has to be over before.
    """
    if not is_scatter_by_torch:
        return True
    gathered = replace(problem, k=problem.n)  # a tensor of the size of the product
    return matmul_us(problem) > GATHER_ROOM * all_gather_us(gathered)
