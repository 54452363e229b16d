"""The cost of a streaming kernel, which reads B once at the rate of memory."""

from __future__ import annotations

from agmm import _core
from agmm.planning import formats
from agmm.planning.cost_model.gpu_constants import constants_for
from agmm.planning.problems import KernelConfig, Problem

_IN_FLIGHT_BYTES = 96 << 10
"""The bytes of B that a CTA has on its way before A has come: the least of the kernels' rings
(`StreamingKernel::kStages`)."""


class Stream:
    """The bytes that a streaming kernel, with its splits of K, reads for problems that differ in M
    alone."""

    __slots__ = ("_c", "_clusters_at_once", "_config", "_ctas")

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        self._c = constants_for(problem)
        self._config = config
        self._ctas = config.cluster_n * config.splits
        sms = problem.sm_count or self._c.sm_count
        self._clusters_at_once = max(1, _core.clusters_at_once(sms, self._ctas))

    def least_us(self, problem: Problem) -> float:
        """The time in which memory gives B, below which no number of rows takes."""
        c = self._c
        weight_bytes = problem.n * problem.k * formats.of(problem.format).element_bytes
        return c.streaming_us + 1e-3 * weight_bytes / c.streaming_gb_per_s

    def us(self, problem: Problem) -> tuple[float, float]:
        """The time of the kernel without its launch, and what is left of it once A has come, late
        as it may be: the longest of what memory, L2 and one multiprocessor take for their bytes."""
        c, config = self._c, self._config
        element_bytes = formats.of(problem.format).element_bytes
        m, n, k = problem.m, problem.n, problem.k
        tiles_m = -(-m // config.tile_m)
        blocks_n = -(-n // (config.tile_n * config.cluster_n))
        rounds = -(-blocks_n * tiles_m // self._clusters_at_once)
        clusters = -(-blocks_n * tiles_m // rounds)
        weight_bytes = n * k * element_bytes
        l2_bytes = tiles_m * weight_bytes + blocks_n * m * k * element_bytes
        rows = config.tile_n + min(m, config.tile_m)
        sm_bytes = rounds * rows * k * element_bytes / config.splits
        read_us = 1e-3 * max(
            weight_bytes / c.streaming_gb_per_s,
            l2_bytes / c.streaming_l2_gb_per_s,
            sm_bytes / c.streaming_sm_gb_per_s,
        )
        fixed_us = c.streaming_us + (c.streaming_split_us if config.splits > 1 else 0.0)
        if problem.world_size == 1:
            return fixed_us + read_us, fixed_us
        ahead_us = 1e-3 * clusters * self._ctas * _IN_FLIGHT_BYTES / c.streaming_gb_per_s
        return fixed_us + read_us, fixed_us + max(0.0, read_us - ahead_us)
