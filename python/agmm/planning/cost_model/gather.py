"""The cost of a fused all-gather -> matmul: tiles that wait for the chunks of the ring."""

from __future__ import annotations

from math import inf
from operator import sub

from agmm import _core
from agmm.planning import formats
from agmm.planning.cost_model.gpu_constants import constants_for
from agmm.planning.cost_model.matmul import (
    Load,
    Tiling,
    is_b_in_l2,
    lost_clock_us,
    matmul_memory_us,
    roofline_us,
)
from agmm.planning.problems import KernelConfig, Problem

MERGED_BYTES = _core.SM_PUSH_HEAD_ITEM_BYTES
"""The most bytes up to which SM push sends parts together."""

SCALES_US = 8.0
"""What a push of a shard takes longer whose rows have scales, which go in a copy of their own;
fitted by the loss of the choice to 58 drawn shapes on 2 H200."""


class At:
    """A problem, and what all predictions of its calls share; each is worked out once."""

    __slots__ = (
        "_arrivals",
        "_before",
        "_fourths",
        "_least_disturbance_us",
        "_least_sent_us",
        "_memory_us",
        "b_in_l2",
        "c",
        "element_bytes",
        "problem",
        "rows",
        "scales_us",
        "shard_bytes",
        "world_size",
    )

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.c = constants_for(problem)
        self.world_size = problem.world_size
        self.rows = problem.m // problem.world_size
        of = formats.of(problem.format)
        self.element_bytes = of.element_bytes
        self.shard_bytes = self.rows * of.row_bytes(problem.k)
        has_scales = of.columns_of_a_scale is not None and self.world_size > 1
        self.scales_us = SCALES_US if has_scales else 0.0
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
        self._fourths: list[float] = []
        """The fourth powers of `gathering_us`, by the readings of B."""

    def arrivals_us(self, is_pull: bool) -> list[float]:
        """The arrival of each chunk by ring position; see the function `arrival_us`."""
        found = self._arrivals.get(is_pull)
        if found is None:
            c = self.c
            shard = self.shard_bytes / 1e3
            rate = c.pull_gb_per_s if is_pull else c.push_gb_per_s
            staging = c.copy_overhead_us + shard / c.staging_gb_per_s if is_pull else 0.0
            each = c.copy_overhead_us + self.scales_us + shard / rate
            first = staging + c.copy_overhead_us
            found = [staging] + [first + p * each for p in range(1, self.world_size)]
            self._arrivals[is_pull] = found
        return found

    def straddles(self, tile_m: int) -> bool:
        return self.world_size > 1 and self.rows % tile_m != 0

    def blocks(self, t: Tiling) -> int:
        return -(-self.problem.m // t.block_rows) * t.blocks_in_row

    def whole_rows_before(self, block_rows: int) -> list[int]:
        """The number of rows of blocks that lie wholly in the chunks before a ring position, by
        position, on the rank that has the fewest. A row of blocks that lies in two chunks belongs
        to the later one; the last one of A is whole."""
        found = self._before.get(block_rows)
        if found is None:
            w, rows, m = self.world_size, self.rows, self.problem.m
            in_column = -(-m // block_rows)
            if rows and rows % block_rows == 0 and m == w * rows:
                each = rows // block_rows
                found = [p * each for p in range(w + 1)]
            else:
                # The rows of blocks go from the first whole one of a shard up to the end of another
                # shard; beyond the end of A its first rows follow.
                first = [-(-begin // block_rows) for begin in range(0, w * rows, max(1, rows))]
                ends = [
                    end // block_rows if end < m else in_column + (end - m) // block_rows
                    for end in range(0, 2 * w * rows, max(1, rows))
                ]
                found = [0] + [max(0, min(map(sub, ends[p:], first))) for p in range(1, w + 1)]
            self._before[block_rows] = found
        return found

    def memory_us(self, readings_of_b: int) -> float:
        """The time of the memory traffic of a matmul on the gathered A."""
        found = self._memory_us.get(readings_of_b)
        if found is None:
            found = self._memory_us[readings_of_b] = matmul_memory_us(self.problem, readings_of_b)
        return found

    def gathering_us(self, readings_of_b: int) -> float:
        """`memory_us`, with the latency that a gather adds where there is one."""
        latency_us = self.c.gathered_latency_us if self.world_size > 1 else 0.0
        return latency_us + self.memory_us(readings_of_b)

    def load(self, t: Tiling) -> Load:
        if t.stream is not None:
            us, behind_us = t.stream.us(self.problem)
            # `streaming_us` stands in place of `call_us`.
            return Load(behind_us, min(self.blocks(t), t.workers), 1, us, -self.c.call_us)
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
        if waves > 1:
            tile_us -= t.hidden_us * (waves - 1) / waves
        # The tiles of one chunk after the other read all of B, unless it stays in the L2 cache.
        reads_once = self.b_in_l2 or t.across
        memory_us = self.gathering_us(1 if reads_once else min(self.world_size, rows_of_blocks))
        busy_us = tile_us * waves
        lost_us = lost_clock_us(c, busy_us, t.schedule)
        return Load(tile_us, blocks, waves, memory_us, lost_us)

    def least_wait_us(self, is_pull: bool, can_push: bool) -> float:
        """The least time after which the last tile of a call begins, whatever the kernel."""
        copied_us = self.arrivals_us(is_pull)[-1]
        pushed_us = self.c.sm_push_us + self._least_disturbance_us
        return min(copied_us, pushed_us) if can_push else copied_us

    def floor_us(self, t: Tiling, wait_us: float) -> float:
        """A time that no call takes less than, which is found sooner than `least_us`, and is
        further from what calls take.

        Args:
            wait_us: `least_wait_us` of the kernel.
        """
        c, stream = self.c, t.stream
        if stream is not None:
            return c.launch_us + roofline_us(
                wait_us + c.streaming_us, stream.least_us(self.problem)
            )
        if not self._fourths:
            readings = range(1, self.world_size + 1)
            self._fourths = [self.gathering_us(1 if self.b_in_l2 else n) ** 4 for n in readings]
        rows_of_blocks = -(-self.problem.m // t.block_rows)
        blocks, workers = rows_of_blocks * t.blocks_in_row, t.workers
        busy_us = t.busy_us
        if blocks <= workers:
            busy_us = busy_us * (1 - c.idle_gain * (1 - blocks / workers)) + t.fixed_us + t.split_us
            us = wait_us + busy_us
        else:
            waves = -(-blocks // workers)
            tile_us = busy_us + t.fixed_us + t.split_us
            busy_us = tile_us * waves - t.hidden_us * (waves - 1)
            last_us = wait_us + tile_us - t.hidden_us
            us = busy_us if busy_us > last_us else last_us
        least_us = c.launch_us + c.call_us
        if busy_us > c.steady_clock_us:
            least_us += lost_clock_us(c, busy_us, t.schedule)
        of_memory = self._fourths[0 if t.across else min(self.world_size, rows_of_blocks) - 1]
        return least_us + float((us**4 + of_memory) ** 0.25)

    def split_floor_us(self, t: Tiling, wait_us: float) -> float:
        """`floor_us` of K in any number of splits above one. ``t`` is that of the kernel without
        splits."""
        c = self.c
        memory_us = self.gathering_us(1)
        return c.launch_us + c.call_us + roofline_us(wait_us + t.least_split_us, memory_us)

    def least_us(
        self, t: Tiling, load: Load, is_pull: bool, can_push: bool
    ) -> tuple[float, float, float]:
        """The least times of a call: with any transport, with copies (`fused_us`), and with SM push
        (`sm_push_us`), however the shard is cut, for one first peer at most, and none where a shard
        is shorter than a block."""
        c, tile_us, blocks, waves, memory_us, lost_us = self.c, *load
        workers, in_row, block_rows, rows = t.workers, t.blocks_in_row, t.block_rows, self.rows
        straddles = self.world_size > 1 and rows % t.tile_m != 0
        launch_us, busy_us = c.launch_us + c.call_us + lost_us, tile_us * waves
        arrivals = self.arrivals_us(is_pull)
        before_last = (self.world_size - 1) * rows // block_rows
        left = -(-(blocks - in_row * before_last) // workers)
        last_us = arrivals[-1] + (tile_us * left if left > 1 else tile_us)
        copied_us = max(arrivals[0] + busy_us, last_us)
        staging = c.copy_overhead_us if straddles and not is_pull else 0.0
        if not can_push:
            copied_us = launch_us + staging + roofline_us(copied_us, memory_us)
            return copied_us, copied_us, inf
        early = 2 * rows // block_rows if rows >= block_rows else 0
        left = -(-(blocks - in_row * early) // workers) - 1
        first_us = max(tile_us + self._least_disturbance_us, self._least_sent_us)
        pushed_us = c.sm_push_us + first_us + (tile_us * left if left > 0 else 0.0)
        if waves == 1 and straddles and self.problem.m > block_rows:
            pushed_us += c.sm_push_straddling_us
        # This is the time of the own rows, or, where they are no whole row of blocks, of the
        # others.
        pushed_us = max(pushed_us, busy_us + self._least_disturbance_us)
        least_us = launch_us + roofline_us(min(copied_us, pushed_us), memory_us)
        copied_us = launch_us + staging + max(copied_us, memory_us)
        return least_us, copied_us, launch_us + max(pushed_us, memory_us)

    def least_split_load(self, t: Tiling) -> Load:
        """The least `load` of K in any number of splits above one, with the least time of a tile,
        for `least_us`. It has 0 waves, since clusters of some numbers of splits need a second one,
        which does not wait as the only one does. ``t`` is that of the kernel without splits."""
        rows_of_blocks = -(-self.problem.m // t.block_rows)
        memory_us = self.gathering_us(1 if self.b_in_l2 else min(self.world_size, rows_of_blocks))
        return Load(t.least_split_us, rows_of_blocks * t.blocks_in_row, 0, memory_us, 0.0)

    def fused_us(self, t: Tiling, load: Load, is_pull: bool) -> float:
        """Predicted time in µs: the function `fused_us` with what calls of one problem share."""
        c, tile_us, blocks, workers = self.c, load.tile_us, load.blocks, t.workers
        # Rows of the own shard in a tile that it shares with another rank's are copied beforehand.
        is_staged = not is_pull and self.straddles(t.tile_m)
        staging = c.copy_overhead_us if is_staged else 0.0
        # From the arrival of a chunk on, its blocks and all later ones have to be computed.
        longest_us = 0.0
        in_row = t.blocks_in_row
        before = self.whole_rows_before(t.block_rows)
        arrivals = self.arrivals_us(is_pull)
        if t.across:  # few tiles are computed before the last chunk is there
            arrivals = arrivals[-1:]
        for arrival, rows in zip(arrivals, before, strict=False):
            waves = -(-(blocks - in_row * rows) // workers)
            us = arrival + tile_us * (waves if waves > 1 else 1)
            if us > longest_us:
                longest_us = us
        launch_us = c.launch_us + c.call_us + load.lost_us
        return launch_us + staging + roofline_us(longest_us, load.memory_us)

    def push_rate_gb_per_s(self, load: Load) -> float:
        """The rate of SM push: the function `push_rate_gb_per_s` with what calls of one problem
        share."""
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
        """Predicted time in µs: the function `sm_push_us` with what calls of one problem share."""
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
        if has_ctas:
            remote_us += c.sm_push_cta_us
        if waves == 1 and self.problem.m > t.block_rows and self.straddles(t.tile_m):
            remote_us += c.sm_push_straddling_us
        longest_us = max(local_us, remote_us)
        launch_us = c.launch_us + c.call_us + load.lost_us
        return launch_us + roofline_us(longest_us, load.memory_us)

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
        # An item is what goes to all peers of a round before a fence.
        chunk_bytes = self.rows * chunk_columns * self.element_bytes
        item_bytes = max(1.0, chunk_bytes * (first_peers or peers) / parts)
        while 2 * item_bytes <= MERGED_BYTES:
            item_bytes *= 2
        us += (1e3 / c.sm_push_gb_per_s_and_cta + 1e6 * c.sm_push_fence_us / item_bytes) / ctas
        return us * c.sm_push_one_peer_factor if self.world_size == 2 else us


def arrival_us(problem: Problem, position: int, *, is_pull: bool = False) -> float:
    """The time in µs after the call at which the chunk at this ring position is there.

    Position 0 is the own shard, which pull stages before the matmul begins.
    """
    return At(problem).arrivals_us(is_pull)[position]


def clusters(problem: Problem, config: KernelConfig) -> tuple[int, int]:
    """The number of clusters of tiles, or of splits of them, and how many are computed at once."""
    t = Tiling(problem, config)
    return At(problem).blocks(t), t.workers


def free_sms(problem: Problem, config: KernelConfig) -> int:
    """Multiprocessors without a tile, in whole clusters; 0 with more than one wave of tiles."""
    t = Tiling(problem, config)
    return t.free_sms(At(problem).blocks(t))


def straddles(problem: Problem, config: KernelConfig) -> bool:
    """Whether a shard ends inside a tile."""
    return At(problem).straddles(config.tile_m)


def fused_us(problem: Problem, config: KernelConfig, *, is_pull: bool = False) -> float:
    """Predicted time of the fused call in µs with copies, launch included."""
    at, t = At(problem), Tiling(problem, config)
    return at.fused_us(t, at.load(t), is_pull)


def push_rate_gb_per_s(problem: Problem, config: KernelConfig) -> float:
    """The rate in GB/s at which SM push has to send so that the matmul does not wait for it."""
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
    """Predicted time of the fused call in µs with SM push: the longer of two times, of the workers
    whose first block is this rank's, and of those whose first block is another rank's. The latter
    wait for the first chunk, do not end that block before the last chunk has come and been
    multiplied, and then have the rest.

    Args:
        chunk_columns: the columns of a chunk.
        parts: the number of parts that the rows of a chunk are sent in.
        first_peers: the number of nearest consumers that get the whole shard before the others.
        has_ctas: CTAs of their own push most of it.
    """
    at, t = At(problem), Tiling(problem, config)
    return at.sm_push_us(t, at.load(t), chunk_columns, parts, first_peers, has_ctas)
