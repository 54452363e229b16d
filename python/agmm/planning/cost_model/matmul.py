"""The cost of a matmul by itself: the library's, and the tiles of a kernel of the build."""

from __future__ import annotations

from typing import NamedTuple

from agmm import _core
from agmm.planning import formats
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES, Constants, constants_for
from agmm.planning.cost_model.library_matmul import is_badly_chosen, tiled_us
from agmm.planning.cost_model.streaming import Stream
from agmm.planning.problems import PLAIN, KernelConfig, Problem

clusters_at_once = _core.clusters_at_once
"""The number of clusters of so many CTAs that are computed at once; none of more than 8."""


def sms_of(problem: Problem) -> int:
    """The number of multiprocessors that compute the problem."""
    return problem.sm_count or constants_for(problem).sm_count


class Tiling:
    """The tiling that a kernel, with its splits of K, makes of all problems that differ in M
    alone."""

    __slots__ = (
        "across",
        "block_rows",
        "blocks_in_row",
        "busy_us",
        "ctas",
        "fixed_us",
        "hidden_us",
        "least_split_us",
        "most_rows_of_splits",
        "schedule",
        "split_us",
        "stream",
        "tile_m",
        "workers",
    )

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        c = constants_for(problem)
        sms = sms_of(problem)
        self.tile_m = config.tile_m
        self.across = config.across
        self.block_rows = config.tile_m * config.cluster_m
        self.blocks_in_row = -(-problem.n // (config.tile_n * config.cluster_n)) * config.splits
        self.ctas = config.cluster_m * config.cluster_n
        """The number of CTAs of a cluster."""
        together = config.splits if config.splits_in_cluster else 1
        self.workers = max(1, clusters_at_once(sms, self.ctas * together)) * together
        """The number of clusters that are computed at once."""
        self.most_rows_of_splits = self.workers // (2 * self.blocks_in_row) * self.block_rows
        """The most rows of A whose clusters are computed at once with K in twice as many splits."""
        self.schedule = config.schedule
        self.stream: Stream | None = None
        """What a streaming kernel reads; it has no times of tiles."""
        if config.is_streaming:
            self.stream = Stream(problem, config)
            self.across = True
            return
        kernel = config.kernel
        rate = c.of_kernel(c.tflops_per_sm, config, c.other_tflops_per_sm)
        busy_us = 2e-6 * config.tile_m * config.tile_n * problem.k / config.splits / rate
        if problem.b_layout == "row":
            busy_us *= c.row_major_factor.get(kernel, 1.0)
        if problem.world_size > 1:
            busy_us *= c.gathered_factor.get(kernel, c.other_gathered_factor)
        self.busy_us = busy_us
        """The time of a tile's main loop when all multiprocessors have one."""
        self.fixed_us = c.overhead_us(config)
        overlap = c.gathered_overlap
        if problem.world_size == 1:
            overlap = c.pingpong_overlap if config.schedule == "pingpong" else 0.0
        self.hidden_us = overlap * self.fixed_us
        """The time of each tile but one that another warpgroup hides, or another tile."""
        if config.splits_in_cluster:
            once_us, each_us = c.cluster_split_us
        else:
            once_us, each_us = 0.0, c.split_us
        self.split_us = once_us + each_us * config.splits if config.splits > 1 else 0.0
        # A tile in n splits takes busy / n * (1 - gain) + fixed + n * split; this is the time at
        # the best n of all numbers.
        parts_us = 2 * (max(0.0, 1 - c.idle_gain) * busy_us * each_us) ** 0.5
        self.least_split_us = self.fixed_us - self.hidden_us + once_us + parts_us
        """The least time of a tile whose K is split."""

    def free_sms(self, blocks: int) -> int:
        """Multiprocessors beside so many clusters of tiles, in whole clusters."""
        return max(0, self.workers - blocks) * self.ctas


class Load(NamedTuple):
    """The load that the tiles of a matmul put on the GPU, however the rows come."""

    tile_us: float
    """The mean time of a tile over the waves."""
    blocks: int
    """The number of clusters of tiles, or of splits of them."""
    waves: int
    memory_us: float
    lost_us: float
    """The time that is lost to the falling clock."""


def roofline_us(arithmetic_us: float, memory_us: float) -> float:
    """The time of what needs both: the longer of the two, and up to a fifth more where they are
    alike."""
    return float((arithmetic_us**4 + memory_us**4) ** 0.25)


def is_b_in_l2(problem: Problem) -> bool:
    """Whether B stays in the L2 cache from one chunk's tiles to the next one's."""
    element_bytes = formats.of(problem.format).element_bytes
    return problem.n * problem.k * element_bytes <= constants_for(problem).l2_mb * 1e6


def lost_clock_us(c: Constants, busy_us: float, schedule: str) -> float:
    """The time that a matmul loses to the falling clock if it would compute for ``busy_us`` at its
    first clock."""
    return (c.falling_clock[schedule] - 1) * max(0.0, busy_us - c.steady_clock_us)


def matmul_memory_us(problem: Problem, readings_of_b: int = 1) -> float:
    """Time of the memory traffic of a matmul on the gathered A."""
    c = constants_for(problem)
    m, n, k = problem.m, problem.n, problem.k
    read = (m * k + n * k * readings_of_b) * formats.of(problem.format).element_bytes
    return (read + m * n * ELEMENT_BYTES) / (c.matmul_gb_per_s * 1e3)


def pushed_us(problem: Problem) -> float:
    """Time in which a push carries as many bytes as A has."""
    nbytes = problem.m * formats.of(problem.format).row_bytes(problem.k)
    return nbytes / (constants_for(problem).push_gb_per_s * 1e3)


def arithmetic_us(problem: Problem) -> float:
    """Time of the library's arithmetic on the gathered A."""
    c = constants_for(problem)
    tflops = c.matmul_tflops * c.matmul_rate_factor
    return 2e-6 * problem.m * problem.n * problem.k / tflops


def behind_us(problem: Problem) -> float:
    """Predicted time in µs of torch's ops behind the library's matmul, where agmm's kernel has an
    epilogue of its own: of one pass over products and results, the least that it can be."""
    if problem.epilogue == PLAIN:
        return 0.0
    c = constants_for(problem)
    out = problem.n // 2 if problem.epilogue.startswith("gate") else problem.n
    passed = problem.m * (problem.n + out) * ELEMENT_BYTES
    return c.launch_us + passed / (c.memory_gb_per_s * 1e3)


def matmul_us(problem: Problem) -> float:
    """Predicted time of the library's matmul on the gathered A (the roof), in µs."""
    c = constants_for(problem)
    if not c.library:
        return roof_us(problem)
    element_bytes = formats.of(problem.format).element_bytes
    busy_us = tiled_us(c, (problem.m, problem.n, problem.k), element_bytes)
    if is_badly_chosen(problem.m) and not is_b_in_l2(problem):
        busy_us *= c.library["badly_chosen_factor"]
    read_us = matmul_memory_us(problem) * c.matmul_gb_per_s / c.library["gb_per_s"]
    return _launched_us(c, busy_us, c.library["latency_us"] + read_us)


def roof_us(problem: Problem) -> float:
    """Predicted time in µs of a matmul that loses nothing to its tiles."""
    c = constants_for(problem)
    memory_us = c.matmul_latency_us + matmul_memory_us(problem)
    return _launched_us(c, arithmetic_us(problem), memory_us)


def _launched_us(c: Constants, busy_us: float, memory_us: float) -> float:
    us = roofline_us(busy_us, memory_us)
    return c.launch_us + us + lost_clock_us(c, us, "library")
