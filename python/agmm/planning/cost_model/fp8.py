"""What a call on fp8 operands should cost: the models of operands of 16 bits with other rates."""

from __future__ import annotations

from agmm.planning.cost_model.gpu_constants import Constants, constants
from agmm.planning.cost_model.libraries import library_all_gather_us, library_reduce_scatter_us
from agmm.planning.cost_model.matmul import arithmetic_us, lost_clock_us, roofline_us
from agmm.planning.plans import MATMUL_REDUCE_SCATTER, Problem

RATE = 1.8
"""Of fp8 arithmetic beside that of 16 bits: `torch._scaled_mm` with row-wise scales beside
`torch.mm`, on H100."""

KERNEL_RATIO = 1.02
"""A fused kernel's time beside `torch._scaled_mm`'s: row-wise, the worse of the two shapes that
were measured on H100."""

_SCALE_BYTES = 4  # float32
_OUT_BYTES = 2  # bfloat16


def scales_of_row(k: int, scaling: str) -> int:
    """How many scales travel with a row of A."""
    return -(-k // 128) if scaling.startswith("block") else 1  # `scaling.BLOCK`


def matmul_us(problem: Problem) -> float:
    """Predicted time of ``torch._scaled_mm`` on the gathered A, in µs."""
    c, (m, n, k) = constants(problem.gpu), problem[:3]
    memory_us = (m * k + n * k + m * n * _OUT_BYTES) / (c.matmul_gb_per_s * 1e3)
    us = roofline_us(arithmetic_us(problem) / RATE, c.matmul_latency_us + memory_us)
    return c.launch_us + us + lost_clock_us(c, us, "library")


def _sent_to_each(problem: Problem, scaling: str) -> float:
    """Bytes of a rank's shard and its scales, or of its rows of the sum."""
    rows = problem.m // problem.world_size
    if problem.op == MATMUL_REDUCE_SCATTER:
        return rows * problem.n * _OUT_BYTES
    return rows * (problem.k + _SCALE_BYTES * scales_of_row(problem.k, scaling))


def unfused_us(problem: Problem, scaling: str) -> float:
    """Predicted time of NCCL's collective and ``torch._scaled_mm``, one after the other, in µs."""
    c = constants(problem.gpu)
    if problem.world_size == 1:
        return matmul_us(problem)
    nbytes = (problem.world_size - 1) * _sent_to_each(problem, scaling)
    if problem.op == MATMUL_REDUCE_SCATTER:
        return matmul_us(problem) + library_reduce_scatter_us(c, nbytes)
    return matmul_us(problem) + library_all_gather_us(c, nbytes)


def fused_us(problem: Problem, scaling: str) -> float:
    """Predicted time of agmm's call by push, in µs: each chunk's part of the matmul begins when the
    one before is done and the chunk has arrived; of a scatter, the chunk goes when it is computed.
    Not measured between GPUs."""
    c = constants(problem.gpu)
    chunk_us = (matmul_us(problem) - c.launch_us) * KERNEL_RATIO / problem.world_size
    link_us = _link_us(c, problem, scaling)
    done_us = arrived_us = 0.0
    for i in range(problem.world_size):
        if problem.op == MATMUL_REDUCE_SCATTER:
            done_us += chunk_us
            if i + 1 < problem.world_size:
                arrived_us = max(arrived_us, done_us) + link_us
        else:
            arrived_us += link_us if i else 0.0
            done_us = max(done_us, arrived_us) + chunk_us
    return c.launch_us + max(done_us, arrived_us)


def _link_us(c: Constants, problem: Problem, scaling: str) -> float:
    """From the begin of one chunk's way to that of the next."""
    rate = c.scatter_gb_per_s if problem.op == MATMUL_REDUCE_SCATTER else c.push_gb_per_s
    return c.copy_overhead_us + _sent_to_each(problem, scaling) / (rate * 1e3)
