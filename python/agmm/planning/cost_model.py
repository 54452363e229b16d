"""What a call should cost, in a few lines. Pure Python, needs no GPU and no torch.

Fused: tiles run in waves over the multiprocessors, each for the time that its kernel needs per
tile, in the order in which the persistent kernel takes them; the chunks of the ring come one after
the other, and no tile starts before its chunk has arrived; memory traffic is longer than that with
few rows. Unfused: a latency, the bytes over the rate of the collective, and the matmul alone. The
matmul alone: arithmetic at the library's rate, or a latency and the memory traffic where that is
longer. A matmul that computes for long loses its clock.

The constants of a GPU stand in ``tables/<gpu>.json``, with where they come from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from math import inf
from operator import sub
from pathlib import Path
from typing import NamedTuple

from agmm.planning.plans import DEFAULT_GPU, KernelConfig, Problem

_FOLDER = Path(__file__).parent / "tables"
ELEMENT_BYTES = 2
MERGED_BYTES = 12288
"""SM push sends parts together up to this size (``_core.SM_PUSH_HEAD_ITEM_BYTES``, which this
module can do without)."""
GATHER_ROOM = 1.7
"""See `is_gather_by_copies`."""


@dataclass(frozen=True)
class Constants:
    """The constants of one GPU. Rates are sustained; GB/s are received bytes per rank."""

    gpu: str
    sm_count: int
    launch_us: float
    tflops_per_sm: dict[str, float]
    """Of one multiprocessor inside the main loop, by kernel."""
    row_major_factor: dict[str, float]
    """How much longer a tile takes with a row-major B, by kernel, where that is above 3%: of a
    tile whose width is no multiple of 64 columns, TMA loads it in narrow pieces."""
    other_tflops_per_sm: float
    """Of a kernel that is not in ``tflops_per_sm``."""
    tile_overhead_us: dict[str, float]
    """Between the main loops of two tiles, by schedule."""
    idle_gain: float
    """How much less time the main loop of a tile takes in one wave, times the share of the
    multiprocessors that have none: the clock is higher, and nobody takes its loads."""
    steady_clock_us: float
    """For so long a matmul keeps its clock."""
    falling_clock: dict[str, float]
    """How many times as long what is left then takes, by schedule, and for the library's matmul."""
    split_us: float
    """Of each part when K is split: leaving its sums, or adding up another's."""
    copy_overhead_us: float
    """Of one copy-engine copy and its signal."""
    push_gb_per_s: float
    pull_gb_per_s: float
    staging_gb_per_s: float
    """Of the copy of A_shard that pull makes."""
    sm_push_us: float
    """Until the first chunk of an SM push has arrived."""
    sm_push_straddling_us: float
    """What such a call of one wave, with more than a row of blocks, takes longer where a shard ends
    inside a tile, which waits for two ranks."""
    sm_push_disturbance: float
    """How much of the time of sending the matmul loses by it."""
    sm_push_cta_disturbance: float
    """The same where CTAs of their own send."""
    sm_push_gb_per_s: float
    """Sent by one rank, to all peers, at most."""
    sm_push_gb_per_s_and_cta: float
    """What a CTA with a tile can send beside it, its fences apart."""
    sm_push_fence_us: float
    """Between what such a CTA sends and its signal."""
    sm_push_gb_per_s_and_own_cta: float
    """What a CTA that does nothing else can send."""
    sm_push_one_peer_factor: float
    """How much longer a MB takes where there is one peer, so that a fence is for one of them."""
    all_gather_us: float
    all_gather_gb_per_s: float
    small_gather_us: float
    small_gather_gb_per_s: float
    small_gather_mb: float
    """A gather that receives less than so much has a shorter latency and a lower rate."""
    reduce_scatter_us: float
    reduce_scatter_gb_per_s: float
    """Of NCCL's, after the matmul. Sent by one rank."""
    fused_reduce_scatter_us: float
    fused_reduce_scatter_us_per_rank: float
    """What torch's fused op takes beside its matmuls, copies and sum: its barriers."""
    fused_reduce_scatter_gb_per_s: float
    """Of its copies."""
    fused_reduce_scatter_gain_us: float
    """What it has to save for its host time."""
    matmul_tflops: float
    memory_gb_per_s: float
    matmul_gb_per_s: float
    """Of the same memory, what a matmul gets."""
    matmul_latency_us: float
    """What the library's adds to its memory traffic."""
    l2_mb: float
    """What stays in the L2 cache from one chunk's tiles to the next one's."""
    sources: str


@cache
def known_gpus() -> tuple[str, ...]:
    """The GPUs that have constants."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.json") if "tflops_per_sm" in p.read_text()))


@cache
def constants(gpu: str) -> Constants:
    """The constants of ``gpu``, or those of `DEFAULT_GPU` where it has none (see ``.gpu``)."""
    name = gpu if gpu in known_gpus() else DEFAULT_GPU
    return Constants(**json.loads((_FOLDER / f"{name}.json").read_text()))


def default_kernels(gpu: str) -> tuple[KernelConfig, ...]:
    """The kernels of a default build, as the GPU's constants name them."""
    c = constants(gpu)
    return tuple(KernelConfig.parse(name) for name in c.tflops_per_sm)


class Tiling:
    """What a kernel, with its splits of K, makes of all problems that differ in M alone."""

    __slots__ = (
        "block_rows",
        "blocks_in_row",
        "busy_us",
        "ctas",
        "fixed_us",
        "least_split_us",
        "schedule",
        "split_us",
        "tile_m",
        "workers",
    )

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        c = constants(problem.gpu)
        sms = problem.sm_count or c.sm_count
        self.tile_m = config.tile_m
        self.block_rows = config.tile_m * config.cluster_m
        self.blocks_in_row = -(-problem.n // (config.tile_n * config.cluster_n)) * config.splits
        self.ctas = config.cluster_m * config.cluster_n
        """Of a cluster."""
        self.workers = sms // self.ctas
        """Clusters that are computed at once."""
        kernel = config.kernel
        rate = c.tflops_per_sm.get(kernel, c.other_tflops_per_sm)
        busy_us = 2e-6 * config.tile_m * config.tile_n * problem.k / config.splits / rate
        if problem.b_layout == "row":
            busy_us *= c.row_major_factor.get(kernel, 1.0)
        self.busy_us = busy_us
        """Of a tile, when all multiprocessors have one."""
        self.fixed_us = c.tile_overhead_us[config.schedule]
        self.split_us = c.split_us * config.splits if config.splits > 1 else 0.0
        # In n parts: busy / n * (1 - gain) + fixed + n * split, at the best n of all numbers.
        parts_us = 2 * (max(0.0, 1 - c.idle_gain) * busy_us * c.split_us) ** 0.5
        self.least_split_us = self.fixed_us + parts_us
        """Of a tile whose K is split."""
        self.schedule = config.schedule


class Load(NamedTuple):
    """What the tiles of a matmul ask of the GPU, however the rows come."""

    tile_us: float
    blocks: int
    """Clusters of tiles, or of splits of them."""
    waves: int
    memory_us: float
    lost_us: float
    """To the falling clock."""


class At:
    """A problem, and what all predictions of its calls share; each is worked out once."""

    __slots__ = (
        "_arrivals",
        "_before",
        "_least_disturbance_us",
        "_least_sent_us",
        "_memory_us",
        "b_in_l2",
        "c",
        "problem",
        "rows",
        "shard_bytes",
        "world_size",
    )

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.c = constants(problem.gpu)
        self.world_size = problem.world_size
        self.rows = problem.m // problem.world_size
        self.shard_bytes = self.rows * problem.k * ELEMENT_BYTES
        self.b_in_l2 = is_b_in_l2(problem)
        c = self.c
        per_sm = max(c.sm_push_gb_per_s_and_cta, c.sm_push_gb_per_s_and_own_cta)
        us_per_mb = 1e3 / c.sm_push_gb_per_s + 1e3 / ((problem.sm_count or c.sm_count) * per_sm)
        sent_us = (self.world_size - 1) * self.shard_bytes * us_per_mb / 1e6
        sent_us *= min(1.0, c.sm_push_one_peer_factor)
        self._least_sent_us = sent_us
        self._least_disturbance_us = sent_us * min(c.sm_push_disturbance, c.sm_push_cta_disturbance)
        self._arrivals: dict[bool, list[float]] = {}
        self._before: dict[int, list[int]] = {}
        self._memory_us: dict[int, float] = {}

    def arrivals_us(self, is_pull: bool) -> list[float]:
        """By ring position; see `arrival_us`."""
        found = self._arrivals.get(is_pull)
        if found is None:
            c = self.c
            shard = self.shard_bytes / 1e3
            rate = c.pull_gb_per_s if is_pull else c.push_gb_per_s
            staging = c.copy_overhead_us + shard / c.staging_gb_per_s if is_pull else 0.0
            each = c.copy_overhead_us + shard / rate
            first = staging + c.copy_overhead_us
            found = [staging] + [first + p * each for p in range(1, self.world_size)]
            self._arrivals[is_pull] = found
        return found

    def straddles(self, tile_m: int) -> bool:
        return self.world_size > 1 and self.rows % tile_m != 0

    def blocks(self, t: Tiling) -> int:
        return -(-self.problem.m // t.block_rows) * t.blocks_in_row

    def whole_rows_before(self, block_rows: int) -> list[int]:
        """By ring position: how many rows of blocks lie wholly in the chunks before, on the rank
        that has the fewest. Those of two chunks belong to the later one; the last one of A is
        whole."""
        found = self._before.get(block_rows)
        if found is None:
            w, rows, m = self.world_size, self.rows, self.problem.m
            in_column = -(-m // block_rows)
            if rows and rows % block_rows == 0 and m == w * rows:
                each = rows // block_rows
                found = [p * each for p in range(w + 1)]
            else:
                # From the first whole row of blocks of a shard on, and up to the end of another's;
                # beyond the end of A follow its first rows.
                first = [-(-begin // block_rows) for begin in range(0, w * rows, max(1, rows))]
                ends = [
                    end // block_rows if end < m else in_column + (end - m) // block_rows
                    for end in range(0, 2 * w * rows, max(1, rows))
                ]
                found = [0] + [max(0, min(map(sub, ends[p:], first))) for p in range(1, w + 1)]
            self._before[block_rows] = found
        return found

    def memory_us(self, readings_of_b: int) -> float:
        """Of the memory traffic of a matmul on the gathered A."""
        found = self._memory_us.get(readings_of_b)
        if found is None:
            found = self._memory_us[readings_of_b] = _memory_us(self.problem, readings_of_b)
        return found

    def load(self, t: Tiling) -> Load:
        c = self.c
        rows_of_blocks = -(-self.problem.m // t.block_rows)
        blocks = rows_of_blocks * t.blocks_in_row
        # One worker per CTA; a pingpong CTA works on two tiles at a time but no faster than on one.
        # Clusters go in lockstep, so one cluster's tiles count as one worker's tile.
        tile_us = t.busy_us
        tile_us *= 1 - c.idle_gain * max(0.0, 1 - blocks / t.workers)
        tile_us += t.fixed_us
        tile_us += t.split_us
        waves = -(-blocks // t.workers)
        # The tiles of one chunk after the other read all of B, unless it stays in the L2 cache.
        memory_us = self.memory_us(1 if self.b_in_l2 else min(self.world_size, rows_of_blocks))
        busy_us = tile_us * waves
        lost_us = _lost_clock_us(c, busy_us, t.schedule)
        return Load(tile_us, blocks, waves, memory_us, lost_us)

    def least_us(
        self, t: Tiling, load: Load, is_pull: bool, can_push: bool
    ) -> tuple[float, float, float]:
        """What no call takes less than: of any transport, with copies (`fused_us`), and with SM
        push (`sm_push_us`), however the shard is cut, for one first peer at most, and none where a
        shard is shorter than a block."""
        c, tile_us, blocks, waves, memory_us, lost_us = self.c, *load
        workers, in_row, block_rows, rows = t.workers, t.blocks_in_row, t.block_rows, self.rows
        straddles = self.world_size > 1 and rows % t.tile_m != 0
        launch_us, busy_us = c.launch_us + lost_us, tile_us * waves
        arrivals = self.arrivals_us(is_pull)
        before_last = (self.world_size - 1) * rows // block_rows
        left = -(-(blocks - in_row * before_last) // workers)
        last_us = arrivals[-1] + (tile_us * left if left > 1 else tile_us)
        copied_us = max(arrivals[0] + busy_us, last_us)
        staging = c.copy_overhead_us if straddles and not is_pull else 0.0
        if not can_push:
            copied_us = launch_us + staging + _roofline_us(copied_us, memory_us)
            return copied_us, copied_us, inf
        early = 2 * rows // block_rows if rows >= block_rows else 0
        left = -(-(blocks - in_row * early) // workers) - 1
        first_us = max(tile_us + self._least_disturbance_us, self._least_sent_us)
        pushed_us = c.sm_push_us + first_us + (tile_us * left if left > 0 else 0.0)
        if waves == 1 and straddles and self.problem.m > block_rows:
            pushed_us += c.sm_push_straddling_us
        # Of the own rows, or, without a whole row of blocks of them, of the others.
        pushed_us = max(pushed_us, busy_us + self._least_disturbance_us)
        least_us = launch_us + _roofline_us(min(copied_us, pushed_us), memory_us)
        copied_us = launch_us + staging + max(copied_us, memory_us)
        return least_us, copied_us, launch_us + max(pushed_us, memory_us)

    def least_split_load(self, t: Tiling) -> Load:
        """As `load` for K in any number of parts, more than one, that are computed in one wave: at
        the least time of a tile. ``t`` is of the kernel without splits."""
        rows_of_blocks = -(-self.problem.m // t.block_rows)
        memory_us = self.memory_us(1 if self.b_in_l2 else min(self.world_size, rows_of_blocks))
        return Load(t.least_split_us, rows_of_blocks * t.blocks_in_row, 1, memory_us, 0.0)

    def fused_us(self, t: Tiling, load: Load, transport: str) -> float:
        """See `fused_us`."""
        c, tile_us, blocks, workers = self.c, load.tile_us, load.blocks, t.workers
        # Rows of the own shard in a tile that it shares with another rank's are copied beforehand.
        is_staged = transport == "push" and self.straddles(t.tile_m)
        staging = c.copy_overhead_us if is_staged else 0.0
        # From the arrival of a chunk on, its blocks and all later ones have to be computed.
        longest_us = 0.0
        in_row = t.blocks_in_row
        before = self.whole_rows_before(t.block_rows)
        for arrival, rows in zip(self.arrivals_us(transport == "pull"), before, strict=False):
            waves = -(-(blocks - in_row * rows) // workers)
            us = arrival + tile_us * (waves if waves > 1 else 1)
            if us > longest_us:
                longest_us = us
        return c.launch_us + staging + _roofline_us(longest_us, load.memory_us) + load.lost_us

    def push_rate_gb_per_s(self, load: Load) -> float:
        """See `push_rate_gb_per_s`."""
        sent = (self.world_size - 1) * self.shard_bytes
        return sent / (load.tile_us * load.waves) / 1e3

    def sm_push_us(
        self,
        t: Tiling,
        load: Load,
        chunk_columns: int,
        parts: int,
        first_peers: int,
        has_ctas: bool,
    ) -> float:
        """See `sm_push_us`."""
        c, tile_us, blocks, waves = self.c, load.tile_us, load.blocks, load.waves
        chunks = -(-self.problem.k // chunk_columns)
        ctas = min(blocks, t.workers) * t.ctas
        us_per_mb = self._us_per_mb_sent(ctas, parts, chunk_columns, first_peers, has_ctas)
        sent = (self.world_size - 1) * self.shard_bytes * us_per_mb / 1e6
        disturbance = sent * (c.sm_push_cta_disturbance if has_ctas else c.sm_push_disturbance)
        early = t.blocks_in_row * self.whole_rows_before(t.block_rows)[1 + first_peers]
        local_us = tile_us * waves + disturbance if early else 0.0
        blocks_left = max(0, -(-(blocks - early) // t.workers) - 1)
        first_us = max(tile_us + disturbance, sent + tile_us / chunks)
        remote_us = c.sm_push_us + first_us + tile_us * blocks_left
        if waves == 1 and self.problem.m > t.block_rows and self.straddles(t.tile_m):
            remote_us += c.sm_push_straddling_us
        longest_us = max(local_us, remote_us)
        return c.launch_us + _roofline_us(longest_us, load.memory_us) + load.lost_us

    def _us_per_mb_sent(
        self, ctas: int, parts: int, chunk_columns: int, first_peers: int, has_ctas: bool
    ) -> float:
        """Time in µs in which one rank sends 1 MB by SM push, ``ctas`` having tiles."""
        c = self.c
        peers = max(1, self.world_size - 1)
        us = 1e3 / c.sm_push_gb_per_s
        if has_ctas:
            sms = self.problem.sm_count or c.sm_count
            return us + 1e3 / (max(1, sms - ctas) * c.sm_push_gb_per_s_and_own_cta)
        # What goes to all peers of a round before a fence.
        chunk_bytes = self.rows * chunk_columns * ELEMENT_BYTES
        item_bytes = max(1.0, chunk_bytes * (first_peers or peers) / parts)
        while 2 * item_bytes <= MERGED_BYTES:
            item_bytes *= 2
        us += (1e3 / c.sm_push_gb_per_s_and_cta + 1e6 * c.sm_push_fence_us / item_bytes) / ctas
        return us * c.sm_push_one_peer_factor if self.world_size == 2 else us


def _shard_bytes(problem: Problem) -> int:
    return problem.m // problem.world_size * problem.k * ELEMENT_BYTES


def arrival_us(problem: Problem, position: int, transport: str = "push") -> float:
    """When the chunk at this ring position is there, in µs after the call.

    0 is the own shard, which pull stages before the matmul begins.
    """
    return At(problem).arrivals_us(transport == "pull")[position]


def clusters(problem: Problem, config: KernelConfig) -> tuple[int, int]:
    """How many clusters of tiles, or of splits of them, there are, and how many are computed at
    once."""
    t = Tiling(problem, config)
    return At(problem).blocks(t), t.workers


def straddles(problem: Problem, config: KernelConfig) -> bool:
    """Whether a shard ends inside a tile."""
    return At(problem).straddles(config.tile_m)


def _roofline_us(arithmetic_us: float, memory_us: float) -> float:
    """What takes both: the longer one, and up to a fifth more where they are alike."""
    return float((arithmetic_us**4 + memory_us**4) ** 0.25)


def is_b_in_l2(problem: Problem) -> bool:
    """Whether B stays in the L2 cache from one chunk's tiles to the next one's."""
    return problem.n * problem.k * ELEMENT_BYTES <= constants(problem.gpu).l2_mb * 1e6


def fused_us(problem: Problem, config: KernelConfig, transport: str = "push") -> float:
    """Predicted time of the fused call in µs, launch included."""
    at, t = At(problem), Tiling(problem, config)
    return at.fused_us(t, at.load(t), transport)


def push_rate_gb_per_s(problem: Problem, config: KernelConfig) -> float:
    """How fast SM push has to send, in GB/s, so that the matmul does not wait for it."""
    at = At(problem)
    return at.push_rate_gb_per_s(at.load(Tiling(problem, config)))


def sm_push_us(
    problem: Problem,
    config: KernelConfig,
    chunk_columns: int,
    *,
    parts: int = 1,
    first_peers: int = 0,
    has_ctas: bool = False,
) -> float:
    """Predicted time of the fused call in µs with SM push: of the workers whose first block is this
    rank's, or of those whose first block is another rank's. These wait for the first chunk, do not
    end that block before the last chunk has come and been multiplied, and then have the rest.

    Args:
        chunk_columns: of a column chunk.
        parts: that the rows of a chunk are sent in.
        first_peers: so many nearest consumers get the whole shard before the others.
        has_ctas: CTAs of their own push most of it.
    """
    at, t = At(problem), Tiling(problem, config)
    return at.sm_push_us(t, at.load(t), chunk_columns, parts, first_peers, has_ctas)


def _lost_clock_us(c: Constants, busy_us: float, schedule: str) -> float:
    """What a matmul takes longer that would compute for ``busy_us`` at its first clock."""
    return (c.falling_clock[schedule] - 1) * max(0.0, busy_us - c.steady_clock_us)


def _memory_us(problem: Problem, readings_of_b: int = 1) -> float:
    """Time of the memory traffic of a matmul on the gathered A."""
    c = constants(problem.gpu)
    m, n, k = problem.m, problem.n, problem.k
    elements = m * k + n * k * readings_of_b + m * n
    return elements * ELEMENT_BYTES / (c.matmul_gb_per_s * 1e3)


def _arithmetic_us(problem: Problem) -> float:
    """Time of the library's arithmetic on the gathered A."""
    return 2e-6 * problem.m * problem.n * problem.k / constants(problem.gpu).matmul_tflops


def matmul_us(problem: Problem) -> float:
    """Predicted time of the library's matmul on the gathered A (the roof), in µs."""
    c = constants(problem.gpu)
    us = _roofline_us(_arithmetic_us(problem), c.matmul_latency_us + _memory_us(problem))
    return c.launch_us + us + _lost_clock_us(c, us, "library")


def all_gather_us(problem: Problem) -> float:
    """Predicted time of the library's all-gather of A in µs."""
    c = constants(problem.gpu)
    received = (problem.world_size - 1) * _shard_bytes(problem)
    if received < c.small_gather_mb * 1e6:
        return c.small_gather_us + received / (c.small_gather_gb_per_s * 1e3)
    return c.all_gather_us + received / (c.all_gather_gb_per_s * 1e3)


def unfused_us(problem: Problem) -> float:
    """Predicted time of all-gather, then matmul, in µs."""
    return all_gather_us(problem) + matmul_us(problem)


def _scattered_bytes(problem: Problem) -> float:
    """What a rank sends of its partial sums, and receives."""
    return (1 - 1 / problem.world_size) * problem.m * problem.n * ELEMENT_BYTES


def matmul_reduce_scatter_us(problem: Problem) -> float:
    """Predicted time of the matmul, then NCCL's reduce-scatter of its rows, in µs. m, n and k are
    those of the matmul that each rank makes."""
    c = constants(problem.gpu)
    sent = _scattered_bytes(problem) / (c.reduce_scatter_gb_per_s * 1e3)
    return matmul_us(problem) + c.reduce_scatter_us + sent


def fused_matmul_reduce_scatter_us(problem: Problem) -> float:
    """The same for torch's ``symm_mem.fused_matmul_reduce_scatter``.

    It multiplies the rows for one rank after the other, copies each product when it is there beside
    the next one, and sums up what it has received. So the time is that of the products, or of the
    first one and the copies, and of the sum.
    """
    c = constants(problem.gpu)
    ranks = problem.world_size
    part = problem._replace(m=problem.m // ranks)
    # One after the other: the latency of the next one is hidden, and the clock falls over all.
    part_us = _roofline_us(_arithmetic_us(part), _memory_us(part))
    products_us = ranks * part_us
    products_us += _lost_clock_us(c, products_us, "library")
    copies_us = _scattered_bytes(problem) / (c.fused_reduce_scatter_gb_per_s * 1e3)
    summed = (1 + 1 / ranks) * problem.m * problem.n * ELEMENT_BYTES
    barriers_us = c.fused_reduce_scatter_us + c.fused_reduce_scatter_us_per_rank * ranks
    return (
        c.launch_us
        + barriers_us
        + max(products_us, part_us + copies_us)
        + summed / (c.memory_gb_per_s * 1e3)
    )


@lru_cache(maxsize=4096)
def is_reduce_scatter_fused(problem: Problem) -> bool:
    """Whether torch's fused op is to be taken for a matmul whose rows are scattered.

    It makes 17 launches from Python with 4 ranks, and has to save ``fused_reduce_scatter_gain_us``
    on the GPU for the host's time. The same in CUDA graphs, so that the calls before a capture make
    the workspace that torch's op needs.
    """
    saved_us = matmul_reduce_scatter_us(problem) - fused_matmul_reduce_scatter_us(problem)
    return saved_us > constants(problem.gpu).fused_reduce_scatter_gain_us


def is_gather_by_copies(problem: Problem, *, is_scatter_fused: bool) -> bool:
    """Whether copy engines should gather the rows of a backward beside the product that is
    scattered, rather than NCCL, whose kernel takes multiprocessors from the product.

    Args:
        problem: the product ``dout @ B`` on one rank; the gathered tensor is as large.
        is_scatter_fused: by torch's fused op, which copies over the same links. Both are hidden
            where the product takes `GATHER_ROOM` times as long as the gather. Where NCCL scatters,
            its gather has to be over before.
    """
    if not is_scatter_fused:
        return True
    gathered = problem._replace(k=problem.n)  # a tensor of the size of the product
    return matmul_us(problem) > GATHER_ROOM * all_gather_us(gathered)
