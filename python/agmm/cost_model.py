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
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agmm.plan import KernelConfig, Problem

DEFAULT_GPU = "nvidia-h200"
"""Its constants serve every GPU that has none of its own."""

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


def _shard_bytes(problem: Problem) -> int:
    return problem.m // problem.world_size * problem.k * ELEMENT_BYTES


def arrival_us(problem: Problem, position: int, transport: str = "push") -> float:
    """When the chunk at this ring position is there, in µs after the call.

    0 is the own shard, which pull stages before the matmul begins.
    """
    c = constants(problem.gpu)
    shard = _shard_bytes(problem) / 1e3
    is_pull = transport == "pull"
    rate = c.pull_gb_per_s if is_pull else c.push_gb_per_s
    staging = c.copy_overhead_us + shard / c.staging_gb_per_s if is_pull else 0.0
    if position == 0:
        return staging
    return staging + c.copy_overhead_us + position * (c.copy_overhead_us + shard / rate)


def clusters(problem: Problem, config: KernelConfig) -> tuple[int, int]:
    """How many clusters of tiles, or of splits of them, there are, and how many are computed at
    once."""
    sms = problem.sm_count or constants(problem.gpu).sm_count
    blocks = -(-problem.m // (config.tile_m * config.cluster_m))
    blocks *= -(-problem.n // (config.tile_n * config.cluster_n)) * config.splits
    return blocks, sms // (config.cluster_m * config.cluster_n)


def _tiles(problem: Problem, config: KernelConfig) -> tuple[float, int, int]:
    """Time of a tile in µs, how many tiles there are, and how many are computed at once."""
    c = constants(problem.gpu)
    rate = c.tflops_per_sm.get(config.kernel, c.other_tflops_per_sm)
    tile_us = 2e-6 * config.tile_m * config.tile_n * problem.k / config.splits / rate
    if problem.b_layout == "row":
        tile_us *= c.row_major_factor.get(config.kernel, 1.0)
    # One worker per CTA; a pingpong CTA works on two tiles at a time but no faster than on one.
    # Clusters go in lockstep, so one cluster's tiles count as one worker's tile.
    blocks, workers = clusters(problem, config)
    tile_us *= 1 - c.idle_gain * max(0.0, 1 - blocks / workers)
    tile_us += c.tile_overhead_us[config.schedule]
    if config.splits > 1:
        tile_us += c.split_us * config.splits
    return tile_us, blocks, workers


def straddles(problem: Problem, config: KernelConfig) -> bool:
    """Whether a shard ends inside a tile."""
    return problem.world_size > 1 and problem.m // problem.world_size % config.tile_m != 0


def _roofline_us(arithmetic_us: float, memory_us: float) -> float:
    """What takes both: the longer one, and up to a fifth more where they are alike."""
    return float((arithmetic_us**4 + memory_us**4) ** 0.25)


def _lost_clock_us(gpu: str, busy_us: float, schedule: str) -> float:
    """What a matmul takes longer that would compute for ``busy_us`` at its first clock."""
    c = constants(gpu)
    return (c.falling_clock[schedule] - 1) * max(0.0, busy_us - c.steady_clock_us)


def _memory_us(problem: Problem, readings_of_b: int = 1) -> float:
    """Time of the memory traffic of a matmul on the gathered A."""
    c = constants(problem.gpu)
    m, n, k = problem.m, problem.n, problem.k
    elements = m * k + n * k * readings_of_b + m * n
    return elements * ELEMENT_BYTES / (c.matmul_gb_per_s * 1e3)


def is_b_in_l2(problem: Problem) -> bool:
    """Whether B stays in the L2 cache from one chunk's tiles to the next one's."""
    return problem.n * problem.k * ELEMENT_BYTES <= constants(problem.gpu).l2_mb * 1e6


def _readings_of_b(problem: Problem, config: KernelConfig) -> int:
    """How often B comes from memory: the tiles of one chunk after the other read all of it, unless
    it stays in the L2 cache."""
    if is_b_in_l2(problem):
        return 1
    return min(problem.world_size, -(-problem.m // (config.tile_m * config.cluster_m)))


def _blocks_before(problem: Problem, config: KernelConfig, position: int) -> int:
    """How many blocks lie wholly in the chunks before this ring position, on the rank that has the
    fewest. Those of two chunks belong to the later one; the last one of A is whole."""
    block_rows = config.tile_m * config.cluster_m
    in_column = -(-problem.m // block_rows)
    in_row = clusters(problem, config)[0] // in_column
    rows = problem.m // problem.world_size

    def whole(begin: int) -> int:
        first = -(-begin // block_rows)
        beyond = begin + position * rows - problem.m  # these are the first rows of A
        if beyond < 0:
            return max(0, (problem.m + beyond) // block_rows - first)
        return in_column - first + beyond // block_rows

    begins = range(0, problem.world_size * rows, max(1, rows))
    return in_row * (min(map(whole, begins)) if position else 0)


def fused_us(problem: Problem, config: KernelConfig, transport: str = "push") -> float:
    """Predicted time of the fused call in µs, launch included."""
    c = constants(problem.gpu)
    tile_us, blocks, workers = _tiles(problem, config)
    # Rows of the own shard in a tile that it shares with another rank's are copied beforehand.
    staging = c.copy_overhead_us if transport == "push" and straddles(problem, config) else 0.0
    # From the arrival of a chunk on, its blocks and all later ones have to be computed.
    longest_us = max(
        arrival_us(problem, position, transport)
        + tile_us * max(1, -(-(blocks - _blocks_before(problem, config, position)) // workers))
        for position in range(problem.world_size)
    )
    memory_us = _memory_us(problem, _readings_of_b(problem, config))
    lost_us = _lost_clock_us(problem.gpu, tile_us * -(-blocks // workers), config.schedule)
    return c.launch_us + staging + _roofline_us(longest_us, memory_us) + lost_us


def push_rate_gb_per_s(problem: Problem, config: KernelConfig) -> float:
    """How fast SM push has to send, in GB/s, so that the matmul does not wait for it."""
    tile_us, blocks, workers = _tiles(problem, config)
    sent = (problem.world_size - 1) * _shard_bytes(problem)
    return sent / (tile_us * -(-blocks // workers)) / 1e3


def _us_per_mb_sent(
    problem: Problem, ctas: int, parts: int, chunk_columns: int, first_peers: int, has_ctas: bool
) -> float:
    """Time in µs in which one rank sends 1 MB by SM push, ``ctas`` having tiles."""
    c = constants(problem.gpu)
    peers = max(1, problem.world_size - 1)
    us = 1e3 / c.sm_push_gb_per_s
    if has_ctas:
        sms = problem.sm_count or c.sm_count
        return us + 1e3 / (max(1, sms - ctas) * c.sm_push_gb_per_s_and_own_cta)
    # What goes to all peers of a round before a fence.
    chunk_bytes = problem.m // problem.world_size * chunk_columns * ELEMENT_BYTES
    item_bytes = max(1.0, chunk_bytes * (first_peers or peers) / parts)
    while 2 * item_bytes <= MERGED_BYTES:
        item_bytes *= 2
    us += (1e3 / c.sm_push_gb_per_s_and_cta + 1e6 * c.sm_push_fence_us / item_bytes) / ctas
    return us * c.sm_push_one_peer_factor if problem.world_size == 2 else us


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
    c = constants(problem.gpu)
    tile_us, blocks, workers = _tiles(problem, config)
    chunks = -(-problem.k // chunk_columns)
    waves = -(-blocks // workers)
    ctas = min(blocks, workers) * config.cluster_m * config.cluster_n
    us_per_mb = _us_per_mb_sent(problem, ctas, parts, chunk_columns, first_peers, has_ctas)
    sent = (problem.world_size - 1) * _shard_bytes(problem) * us_per_mb / 1e6
    disturbance = sent * (c.sm_push_cta_disturbance if has_ctas else c.sm_push_disturbance)
    early = _blocks_before(problem, config, 1 + first_peers)
    local_us = tile_us * waves + disturbance if early else 0.0
    blocks_left = max(0, -(-(blocks - early) // workers) - 1)
    first_us = max(tile_us + disturbance, sent + tile_us / chunks)
    remote_us = c.sm_push_us + first_us + tile_us * blocks_left
    has_two_rows = problem.m > config.tile_m * config.cluster_m
    if waves == 1 and has_two_rows and straddles(problem, config):
        remote_us += c.sm_push_straddling_us
    memory_us = _memory_us(problem, _readings_of_b(problem, config))
    lost_us = _lost_clock_us(problem.gpu, tile_us * waves, config.schedule)
    return c.launch_us + _roofline_us(max(local_us, remote_us), memory_us) + lost_us


def _arithmetic_us(problem: Problem) -> float:
    """Time of the library's arithmetic on the gathered A."""
    return 2e-6 * problem.m * problem.n * problem.k / constants(problem.gpu).matmul_tflops


def matmul_us(problem: Problem) -> float:
    """Predicted time of the library's matmul on the gathered A (the roof), in µs."""
    c = constants(problem.gpu)
    us = _roofline_us(_arithmetic_us(problem), c.matmul_latency_us + _memory_us(problem))
    return c.launch_us + us + _lost_clock_us(problem.gpu, us, "library")


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
    products_us += _lost_clock_us(problem.gpu, products_us, "library")
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
