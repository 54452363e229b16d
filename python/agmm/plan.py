"""Problem -> plan: how one call is computed. Needs no GPU and no torch.

A plan comes from the first of these that knows the problem: the user's table, the packaged table
(`agmm.tables`), the cost model (`agmm.cost_model`). `Planner.choose` has the rule for an M between
two tuned ones. What a plan must fulfil is said once, in `why_illegal`.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf, log
from typing import NamedTuple, Protocol

from agmm import _core, cost_model
from agmm.cost_model import At, Load, Tiling

ALIGNMENT = _core.ALIGNMENT
"""K and N must be multiples of this: 16-byte TMA alignment of 2-byte elements."""

_CONFIG_NAME = re.compile(
    r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)_([1-9]\d*)x([1-9]\d*)_(cooperative|pingpong)(_timed)?"
    r"(?:/split([2-9]|[1-9]\d+))?(?:/swizzle([1248])(?:/(along_m|along_n))?)?"
)

_SM_PUSH_NAME = re.compile(r"sm([1-9]\d*)x([1-9]\d*)(?:\+([1-9]\d*)|h([1-9]\d*))?")

_PUSH_ROWS = 8
_PUSH_COLUMNS = (64, 128)
"""Of the usual SM push: the rows of a part, and the columns of a chunk. The narrow chunks begin
earlier but send less in a second: for matmuls whose only wave takes longer than the sending, with
tiles of one shard each that one CTA computes. Twice the rows where K is split or shards end inside
tiles, which wait for two ranks. Calls of two ranks, and those whose nearest peer goes first, have
one peer to send to at a time."""

_PUSH_SMS = 8
_PUSH_RATE_GB_PER_S = 220.0
_ONE_PEER_RATE_GB_PER_S = 100.0
"""What a matmul must need at least to be held to wait for the sending: to several peers, and to
one, whose fences are not shared."""
_LINK_BOUND_GB_PER_S = 300.0
_LINK_BOUND_PARTS = 8
_LINK_BOUND_ROWS = 48
"""Where a matmul needs more than that and shards end inside tiles: more parts than these only of
as many rows each."""
_HEAD = (128, 4)
"""CTAs of their own push where so many multiprocessors are free, and the matmul takes the rows of
the others faster than its own warps send them; then the columns of a chunk, and the chunks that
these warps still send."""

_MAX_SPLITS = 8
"""Of K in the usual plans. With more, adding up takes longer than the matmul."""

MAX_PUSH_PARTS = _core.MAX_PUSH_PARTS
MAX_COLUMN_CHUNKS = _core.MAX_COLUMN_CHUNKS
MAX_PUSH_RANKS = _core.MAX_PUSH_RANKS

FUSED_DTYPES = tuple(_core.DType.__members__)

CPU = "cpu"
"""What `Problem.gpu` says for the CPU backend."""

SWIZZLES = (1, 2, 4, 8)
RASTERS = ("along_m", "along_n")

_NEIGHBOUR_FACTOR = 4
"""A tuned M says something about an M up to this many times larger or smaller."""

_MAX_PLANS = 4096
_MAX_FAMILIES = 512
"""What a planner remembers: plans, and problems that differ in more than M."""

_GATHER_VARIES = 0.2
_STEADY_GATHER_BYTES = 4e6
"""The model takes the unfused plan where the fused ones take longer than it by more than so much of
its all-gather: that of more bytes than these varies from run to run. With fewer it takes its
latency, which is steady."""


class _BuiltKernel(Protocol):
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def cluster_m(self) -> int: ...
    @property
    def cluster_n(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def timed(self) -> bool: ...


@cache
def _core_config(
    tile_m: int,
    tile_n: int,
    tile_k: int,
    cluster_m: int,
    cluster_n: int,
    schedule: str,
    timed: bool,
) -> _core.KernelConfig:
    """The kernel as the core knows it, which knows what it can do whether it is built or not."""
    return _core.KernelConfig(tile_m, tile_n, tile_k, cluster_m, cluster_n, schedule, timed=timed)


@dataclass(frozen=True)
class KernelConfig:
    """A kernel of the table in ``src/gemm/kernels.cmake``, with its swizzle and raster.

    ``schedule`` is ``"cooperative"`` or ``"pingpong"``; ``raster`` is ``"along_m"`` or
    ``"along_n"``; ``max_swizzle`` is 1, 2, 4 or 8. ``timed`` is the variant that
    records when each tile waited and ran. ``splits`` CTAs compute a tile together, each with a part
    of K, where ``can_split``.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    cluster_n: int
    schedule: str
    max_swizzle: int = 1
    raster: str = "along_m"
    timed: bool = False
    splits: int = 1

    @classmethod
    def of(
        cls, kernel: _BuiltKernel, *, max_swizzle: int = 1, raster: str = "along_m"
    ) -> KernelConfig:
        """The config of a built kernel (an element of ``_core.kernels()``)."""
        return cls(
            kernel.tile_m,
            kernel.tile_n,
            kernel.tile_k,
            kernel.cluster_m,
            kernel.cluster_n,
            kernel.schedule,
            max_swizzle,
            raster,
            kernel.timed,
        )

    @classmethod
    def parse(cls, name: str) -> KernelConfig:
        """The inverse of ``name``; splits, swizzle and raster may be left out.

        Raises:
            ValueError: ``name`` is not of the form
                ``128x256x64_2x1_cooperative[/splitN][/swizzleN[/raster]]``.
        """
        found = _CONFIG_NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"config: found {name!r}, wanted a name such as "
                "128x256x64_2x1_cooperative/swizzle4/along_m"
            )
        tile_m, tile_n, tile_k, cluster_m, cluster_n = (int(v) for v in found.groups()[:5])
        schedule, timed, splits, max_swizzle, raster = found.groups()[5:]
        return cls(
            tile_m,
            tile_n,
            tile_k,
            cluster_m,
            cluster_n,
            schedule,
            int(max_swizzle or 1),
            raster or "along_m",
            timed is not None,
            int(splits or 1),
        )

    @property
    def kernel(self) -> str:
        """Tile, cluster and schedule: what is compiled in."""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
            f"_{self.cluster_m}x{self.cluster_n}_{self.schedule}{'_timed' if self.timed else ''}"
        )

    @property
    def can_split(self) -> bool:
        """Whether several CTAs can compute a tile together."""
        return self._of_core.can_split

    @property
    def stores_A(self) -> Sequence[str]:
        """The layouts of B with which it can store A."""
        return self._of_core.stores_A

    @property
    def _of_core(self) -> _core.KernelConfig:
        return _core_config(
            self.tile_m,
            self.tile_n,
            self.tile_k,
            self.cluster_m,
            self.cluster_n,
            self.schedule,
            self.timed,
        )

    @property
    def name(self) -> str:
        split = f"/split{self.splits}" if self.splits != 1 else ""
        return f"{self.kernel}{split}/swizzle{self.max_swizzle}/{self.raster}"


def default_kernels(gpu: str) -> tuple[KernelConfig, ...]:
    """The kernels of a default build, as the GPU's constants name them."""
    c = cost_model.constants(gpu)
    return tuple(KernelConfig.parse(name) for name in c.tflops_per_sm)


class SmPush(NamedTuple):
    """The SM push transport: spare warps of the matmul write the shard, ``chunk_columns`` columns
    at a time, each chunk in ``parts`` parts of its rows; the ``first_peers`` nearest consumers get
    the whole shard before the others get any of it. With ``head_chunks`` they write so many chunks
    only, and CTAs of their own, on multiprocessors that have no tile, write the others.

    Its name, in configs and tables: ``sm16x128``, ``sm16x128+1`` with one first peer, ``sm64x96h4``
    with 4 chunks in the head.
    """

    parts: int
    chunk_columns: int
    first_peers: int = 0
    head_chunks: int = 0

    @classmethod
    def parse(cls, name: str) -> SmPush | None:
        """The inverse of ``name``; None for every other string."""
        found = _SM_PUSH_NAME.fullmatch(name)
        return None if found is None else cls(*(int(v or 0) for v in found.groups()))

    @property
    def name(self) -> str:
        first = f"+{self.first_peers}" if self.first_peers else ""
        head = f"h{self.head_chunks}" if self.head_chunks else ""
        return f"sm{self.parts}x{self.chunk_columns}{first}{head}"

    def has_ctas(self, k: int) -> bool:
        """Whether CTAs of their own push a part of K columns."""
        return 0 < self.head_chunks * self.chunk_columns < k

    def why_illegal(self, k: int) -> str | None:
        """The reason why it cannot serve a call with K columns, or None."""
        if not 0 < self.parts <= MAX_PUSH_PARTS or self.parts & (self.parts - 1):
            return f"sm push: found {self.parts} parts, wanted a power of 2 up to {MAX_PUSH_PARTS}"
        if self.chunk_columns < 1 or self.chunk_columns % ALIGNMENT != 0:
            return f"sm push: found {self.chunk_columns} columns, wanted a multiple of {ALIGNMENT}"
        if self.first_peers and self.head_chunks:
            return f"sm push: found first peers and a head in {self.name}, wanted one of them"
        chunks = -(-k // self.chunk_columns)
        if chunks > MAX_COLUMN_CHUNKS:
            return f"sm push: found {chunks} chunks, wanted at most {MAX_COLUMN_CHUNKS}"
        return None


class Problem(NamedTuple):
    """``out[m, n] = all_gather(A_shard)[m, k] @ B[k, n]``; m is the gathered row count.

    ``b_layout`` is ``"column"`` (a transposed ``[n, k]`` weight) or ``"row"``; ``gpu`` the name
    of `agmm.tables.gpu_name`, or `CPU`; ``sm_count`` the multiprocessors for the matmul, 0 for all
    that the GPU's constants name; ``peer_atomics`` whether links carry out atomic additions.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    world_size: int = 1
    return_A: bool = False
    b_layout: str = "column"
    gpu: str = cost_model.DEFAULT_GPU
    sm_count: int = 0
    peer_atomics: bool = True


@dataclass(frozen=True)
class Plan:
    """How a problem is computed.

    ``transport`` is ``"push"`` or ``"pull"`` (copy engine; on the CPU ``"push"`` by the copy
    thread), the name of an `SmPush`, or ``"unfused"``: all-gather, then matmul. ``kernel`` is None
    on the CPU and unfused. ``chunks_per_shard`` is the number of row chunks of each shard; more
    than 1 on the CPU only.
    """

    transport: str
    kernel: KernelConfig | None = None
    chunks_per_shard: int = 1

    @property
    def name(self) -> str:
        parts = [self.transport]
        if self.kernel is not None:
            parts.append(self.kernel.name)
        if self.chunks_per_shard != 1:
            parts.append(f"{self.chunks_per_shard} chunks per shard")
        return ", ".join(parts)


UNFUSED = Plan("unfused")


def why_unfused(dtype: str, n: int, k: int) -> str | None:
    """The reason why the CUDA kernels cannot compute this product, or None."""
    if dtype not in FUSED_DTYPES:
        return f"A_shard: dtype={dtype}, the fused path wants bfloat16 or float16"
    if k < 1 or k % ALIGNMENT != 0:
        return f"A_shard: K={k} is not a positive multiple of {ALIGNMENT} (16-byte TMA alignment)"
    if n < 1 or n % ALIGNMENT != 0:
        return f"B: N={n} is not a positive multiple of {ALIGNMENT} (16-byte TMA alignment)"
    return None


def why_transport_illegal(problem: Problem, kernel: KernelConfig, transport: str) -> str | None:
    """The reason why a fused call with this kernel cannot use the transport, or None."""
    sm_push = SmPush.parse(transport)
    copying = copy_transports(problem, kernel)
    if sm_push is not None and problem.gpu != CPU and "push" in copying:
        if not 1 < problem.world_size <= MAX_PUSH_RANKS:
            return f"sm push: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
        if not problem.peer_atomics:
            return "sm push: found links without native atomics, wanted NVLink between all GPUs"
        if sm_push.has_ctas(problem.k) and _free_sms(problem, kernel) < 1:
            return f"sm push: found {kernel.kernel} on all multiprocessors, wanted free ones"
        return sm_push.why_illegal(problem.k)
    if transport in copying:
        return None
    return f"found transport {transport}, wanted {' or '.join(copying)}"


def copy_transports(problem: Problem, kernel: KernelConfig | None = None) -> tuple[str, ...]:
    """The legal transports by copies of a fused call with this kernel, the usual one first.

    Pull copies A into the tensor that is returned. With push the kernel writes that tensor, if it
    can (`KernelConfig.stores_A`).
    """
    if problem.gpu == CPU or not problem.return_A:
        return ("push",)
    if kernel is not None and problem.b_layout not in kernel.stores_A:
        return ("pull",)
    return "push", "pull"


def why_illegal(problem: Problem, plan: Plan, kernels: Iterable[KernelConfig]) -> str | None:
    """The reason why this build, whose kernels are ``kernels``, cannot run the plan, or None."""
    if plan == UNFUSED:
        return None
    if plan.chunks_per_shard < 1:
        return f"plan: found {plan.chunks_per_shard} chunks per shard, wanted at least 1"
    if problem.gpu == CPU:
        if plan.transport != "push":
            return f"plan: found transport {plan.transport}, wanted push or unfused on the CPU"
        return None if plan.kernel is None else f"plan: found kernel {plan.kernel.name} on the CPU"
    reason = why_unfused(problem.dtype, problem.n, problem.k)
    if reason is not None:
        return reason
    if plan.chunks_per_shard != 1:
        return f"plan: found {plan.chunks_per_shard} chunks per shard, wanted 1 on a GPU"
    if plan.kernel is None:
        return "plan: found no kernel, wanted one"
    reason = why_transport_illegal(problem, plan.kernel, plan.transport)
    if reason is not None:
        return f"plan: {reason}"
    built = _built(plan.kernel, kernels)
    if built is None:
        return f"plan: found kernel {plan.kernel.kernel}, which is not in this build"
    legal = _legal_splits(problem, built)
    if plan.kernel.splits not in legal:
        return (
            f"plan: found {plan.kernel.splits} splits of K for {plan.kernel.kernel}, "
            f"wanted 1 to {legal[-1]}"
        )
    return None


def _built(config: KernelConfig, kernels: Iterable[KernelConfig]) -> KernelConfig | None:
    """This kernel as the build has it."""
    return next((kernel for kernel in kernels if kernel.kernel == config.kernel), None)


def _legal_splits(problem: Problem, kernel: KernelConfig) -> range:
    """Into how many parts K may be split: all parts of all tiles are computed in one wave."""
    if not kernel.can_split:
        return range(1, 2)
    blocks, workers = cost_model.clusters(problem, replace(kernel, splits=1))
    return _splits_that_fit(problem.k, kernel.tile_k, blocks, workers)


def _splits_that_fit(k: int, tile_k: int, blocks: int, workers: int) -> range:
    return range(1, max(1, min(workers // blocks, -(-k // tile_k))) + 1)


def orders(config: KernelConfig) -> Iterator[KernelConfig]:
    """The kernel with every raster and swizzle."""
    for raster, max_swizzle in product(RASTERS, SWIZZLES):
        yield replace(config, raster=raster, max_swizzle=max_swizzle)


def _has_few_rows_of_tiles(problem: Problem, tile_m: int) -> bool:
    """In a shard."""
    return -(-problem.m // (problem.world_size * tile_m)) <= 8


def usual_order(problem: Problem, config: KernelConfig) -> KernelConfig:
    """The kernel with the raster and swizzle that were the best, or within 2% of it, on all but a
    few of the shapes measured on H200, within 4% on those (docs/dev/tried.md)."""
    if config.schedule == "pingpong":
        if _has_few_rows_of_tiles(problem, config.tile_m):
            return replace(config, raster="along_m", max_swizzle=1)
        # Bands of rows read all of B each: from the L2 cache, or one reading for two tiles.
        reads_b_cheaply = config.cluster_m > 1 or cost_model.is_b_in_l2(problem)
        raster = "along_n" if reads_b_cheaply else "along_m"
        return replace(config, raster=raster, max_swizzle=4)
    return replace(config, raster="along_n", max_swizzle=4 if config.tile_m > config.tile_n else 8)


def _free_sms(problem: Problem, kernel: KernelConfig) -> int:
    """Multiprocessors without a tile, in whole clusters; 0 with more than one wave of tiles."""
    tiling = Tiling(problem, kernel)
    return _free_of(tiling, At(problem).blocks(tiling))


def _free_of(tiling: Tiling, blocks: int) -> int:
    return max(0, tiling.workers - blocks) * tiling.ctas


def _can_have_head(k: int, free_sms: int) -> bool:
    """Whether CTAs of their own find a multiprocessor, and most of K left to push."""
    columns, chunks = _HEAD
    return free_sms >= _PUSH_SMS and k >= 2 * columns * chunks


def _usual_sm_push(problem: Problem, kernel: KernelConfig) -> SmPush:
    at, tiling = At(problem), Tiling(problem, kernel)
    return _usual_sm_push_at(at, tiling, at.load(tiling), kernel.splits)


def _usual_sm_push_at(at: At, tiling: Tiling, load: Load, splits: int) -> SmPush:
    # With more than one wave of tiles the nearest consumer's rows go first, since it computes them
    # first.
    problem, rows = at.problem, max(1, at.rows)
    one_wave = load.waves <= 1
    # In shorter shards it holds up the others for longer than it helps.
    straddles = at.straddles(tiling.tile_m)
    is_short = straddles or rows < max(256, tiling.block_rows)
    first_peers = 0 if one_wave or is_short else 1
    has_one_peer = problem.world_size == 2
    one_peer = first_peers == 1 or has_one_peer
    has_small_parts = one_peer or (splits == 1 and not straddles)
    part_rows = _PUSH_ROWS if has_small_parts else 2 * _PUSH_ROWS
    rate = at.push_rate_gb_per_s(load)
    waits = rate > (_ONE_PEER_RATE_GB_PER_S if has_one_peer else _PUSH_RATE_GB_PER_S)
    most_parts = MAX_PUSH_PARTS
    if straddles and rate > _LINK_BOUND_GB_PER_S:
        most_parts = max(_LINK_BOUND_PARTS, rows // _LINK_BOUND_ROWS)
    # The largest power of 2 that leaves each part enough rows.
    parts = 1 << (max(1, min(most_parts, rows // part_rows)).bit_length() - 1)
    is_narrow = one_wave and has_small_parts and not one_peer and not waits
    columns = _PUSH_COLUMNS[0 if is_narrow else 1]
    head_chunks = 0
    has_head = waits and (one_peer or not straddles)
    if has_head and _can_have_head(problem.k, _free_of(tiling, load.blocks)):
        columns, head_chunks = _HEAD
    while problem.k > columns * MAX_COLUMN_CHUNKS:
        columns *= 2
    return SmPush(parts, min(columns, max(ALIGNMENT, problem.k)), first_peers, head_chunks)


def sm_pushes(problem: Problem, kernel: KernelConfig) -> list[SmPush]:
    """The legal SM pushes of a call with this kernel that are worth a measurement."""
    usual = _usual_sm_push(problem, kernel)
    can_have_head = _can_have_head(problem.k, _free_sms(problem, kernel))
    found = [
        SmPush(parts, columns, first_peers, head_chunks)
        for parts in dict.fromkeys((usual.parts, max(1, usual.parts // 2)))
        for columns in (64, 128, 192, 256)
        for first_peers in dict.fromkeys((0, usual.first_peers))
        for head_chunks in ((0, _HEAD[1]) if can_have_head else (0,))
    ]
    return [p for p in found if why_transport_illegal(problem, kernel, p.name) is None]


def usual_plans(problem: Problem, kernel: KernelConfig) -> list[Plan]:
    """The kernel with copies, and with SM push where that is legal; in the order of tiles that
    serves each best; where there are few tiles, with K split too."""
    plans = []
    for splits in _legal_splits(problem, kernel)[:_MAX_SPLITS]:
        config = replace(usual_order(problem, kernel), splits=splits)
        plans.append(Plan(copy_transports(problem, config)[0], config))
        push = _usual_sm_push(problem, config)
        if why_transport_illegal(problem, config, push.name) is None:
            plans.append(Plan(push.name, config))
    return plans


def predict_us(problem: Problem, plan: Plan) -> float | None:
    """Predicted time of a call in µs; None where there is no cost model (the CPU, other dtypes)."""
    if problem.gpu == CPU or problem.dtype not in FUSED_DTYPES:
        return None
    if plan == UNFUSED:
        return cost_model.unfused_us(problem)
    assert plan.kernel is not None
    sm_push = SmPush.parse(plan.transport)
    if sm_push is not None:
        return cost_model.sm_push_us(
            problem,
            plan.kernel,
            sm_push.chunk_columns,
            parts=sm_push.parts,
            first_peers=sm_push.first_peers,
            has_ctas=sm_push.has_ctas(problem.k),
        )
    return cost_model.fused_us(problem, plan.kernel, plan.transport)


@dataclass(frozen=True)
class Row:
    """The outcome of tuning one problem. Times in µs, medians of one run; None: not measured.

    ``roof_us`` is the matmul alone on the gathered A, ``agmm`` the version that measured.
    """

    m: int
    plan: Plan
    us: float
    roof_us: float | None = None
    unfused_us: float | None = None
    agmm: str = ""


class Rows(Protocol):
    """A table as the look-up sees it."""

    @property
    def name(self) -> str:
        """Where the rows come from, for people."""

    def rows(self, problem: Problem) -> Sequence[Row]:
        """Rows that differ from the problem in M alone."""


@dataclass(frozen=True)
class Choice:
    """A plan, where it comes from, and its time in µs, predicted and measured (None: unknown)."""

    plan: Plan
    source: str
    predicted_us: float | None
    row: Row | None = None
    """The row of exactly this problem."""


class _Way:
    """A kernel with its splits of K: what M does not change."""

    __slots__ = ("_orders", "can_push", "config", "copies", "is_pull", "tiling")

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        copying = copy_transports(problem, config)
        self.config = config
        self.tiling = Tiling(problem, config)
        self.copies = copying[0]
        self.is_pull = self.copies == "pull"
        columns = _PUSH_COLUMNS[-1]
        while problem.k > columns * MAX_COLUMN_CHUNKS:
            columns *= 2
        push = SmPush(1, columns).name
        self.can_push = why_transport_illegal(problem, config, push) is None
        self._orders: dict[bool, KernelConfig] = {}

    def in_order(self, problem: Problem) -> KernelConfig:
        """See `usual_order`."""
        few = self.config.schedule == "pingpong" and _has_few_rows_of_tiles(
            problem, self.config.tile_m
        )
        found = self._orders.get(few)
        if found is None:
            found = self._orders[few] = usual_order(problem, self.config)
        return found

    def copied_us(self, at: At, load: Load, transport: str) -> float:
        return at.fused_us(self.tiling, load, transport)

    def pushed_us(self, at: At, load: Load, push: SmPush) -> float:
        has_ctas = push.has_ctas(at.problem.k)
        return at.sm_push_us(
            self.tiling, load, push.chunk_columns, push.parts, push.first_peers, has_ctas
        )

    def usual_push(self, at: At, load: Load) -> SmPush:
        return _usual_sm_push_at(at, self.tiling, load, self.config.splits)


class _KeptRow:
    """A row of a table, and whether it may serve the problems of a family."""

    __slots__ = ("_built", "_is_legal", "_there_us", "push", "row", "source", "way")

    def __init__(self, problem: Problem, row: Row, source: str, kernels: Sequence[KernelConfig]):
        self.row, self.source = row, source
        plan = row.plan
        self.push = SmPush.parse(plan.transport)
        self.way: _Way | None = None
        if plan.kernel is not None and _has_model(problem):
            self.way = _Way(problem, plan.kernel)
        self._there_us: tuple[float | None] | None = None
        # Only splits, and CTAs of their own that push, may be legal for some M.
        plain, self._built = plan, None
        if self.way is not None:
            config = self.way.config
            if self.push is not None and self.push.has_ctas(problem.k):
                plain = replace(plain, transport=self.push._replace(head_chunks=0).name)
            if config.splits > 1:
                plain = replace(plain, kernel=replace(config, splits=1))
            built = _built(config, kernels)
            if plain is not plan and built is not None:
                self._built = _Way(problem, replace(built, splits=1))
        self._is_legal = why_illegal(problem, plain, kernels) is None

    def is_legal(self, at: At) -> bool:
        """See `why_illegal`."""
        way, built = self.way, self._built
        if not self._is_legal or way is None or built is None:
            return self._is_legal
        k, blocks, workers = at.problem.k, at.blocks(built.tiling), built.tiling.workers
        splits = way.config.splits
        if splits > 1:
            if not built.config.can_split:
                return False
            if splits not in _splits_that_fit(k, way.config.tile_k, blocks, workers):
                return False
        has_ctas = self.push is not None and self.push.has_ctas(k)
        return not has_ctas or _free_of(way.tiling, at.blocks(way.tiling)) >= 1

    def there_us(self, problem: Problem) -> float | None:
        """What the model says of the row's own problem."""
        if self._there_us is None:
            self._there_us = (predict_us(problem._replace(m=self.row.m), self.row.plan),)
        return self._there_us[0]

    def here(self, at: At) -> tuple[Plan, float]:
        """Its plan for another M, and the predicted time. Its order of tiles says nothing: the best
        one there may be best by less than the noise, and take a third longer here. How SM push best
        cuts whole tiles of a shard says nothing about shards that end inside them."""
        plan, way, push = self.row.plan, self.way, self.push
        if way is None:
            return plan, cost_model.unfused_us(at.problem)
        load, transport = at.load(way.tiling), plan.transport
        if push is None:
            us = way.copied_us(at, load, transport)
        else:
            if at.straddles(way.tiling.tile_m):
                push = way.usual_push(at, load)
                transport = push.name
            us = way.pushed_us(at, load, push)
        return Plan(transport, way.in_order(at.problem), plan.chunks_per_shard), us


def _has_model(problem: Problem) -> bool:
    return problem.gpu != CPU and problem.dtype in FUSED_DTYPES


_PRUNING = 1.0 + 1e-9
"""Predictions are compared with floors that are computed in another order of operations."""


class _Family:
    """What a planner knows of all problems that differ in M alone."""

    def __init__(self, planner: Planner, problem: Problem) -> None:
        self._kernels = planner.kernels
        self.why_unfused: str | None = None
        self._ways: list[list[_Way]] = []
        if problem.gpu != CPU:
            self.why_unfused = why_unfused(problem.dtype, problem.n, problem.k)
        if problem.gpu != CPU and self.why_unfused is None:
            self._ways = [[_Way(problem, kernel)] for kernel in self._kernels]
        twin = problem._replace(return_A=not problem.return_A)
        self.rows = [self._rows_of(planner, problem, tuned) for tuned in (problem, twin)]
        """By M: what was tuned for the problem, and for the one that differs in return_A."""
        self.tuned_ms = [sorted(rows) for rows in self.rows]

    def _rows_of(
        self, planner: Planner, problem: Problem, tuned: Problem
    ) -> dict[int, list[_KeptRow]]:
        differs = "" if tuned == problem else f", return_A={tuned.return_A}"
        at = At(problem)
        found: dict[int, list[_KeptRow]] = {}
        for table in planner.tables:
            for row in table.rows(tuned):
                others = found.setdefault(row.m, [])
                kept = _KeptRow(problem, row, table.name + differs, self._kernels)
                others.append(kept)
                own = tuned._replace(m=row.m, sm_count=0)
                # Else it is for other calls, as splits of K are for few rows and all SMs.
                if not kept.is_legal(at) and why_illegal(own, row.plan, self._kernels) is not None:
                    reason = why_illegal(problem, row.plan, self._kernels)
                    planner.warn(f"agmm passes over rows of {table.name}: {reason}", reason or "")
        return found

    def usable_row(self, at: At, which: int, m: int, fused: bool) -> _KeptRow | None:
        for kept in self.rows[which].get(m, ()):
            if not (fused and kept.row.plan == UNFUSED) and kept.is_legal(at):
                return kept
        return None

    def near_rows(self, at: At, which: int, fused: bool) -> list[_KeptRow]:
        """The nearest usable rows below and above."""
        ms, m, found = self.tuned_ms[which], at.problem.m, []
        if not ms:
            return []
        here = bisect_left(ms, m)
        for i in range(here - 1, -1, -1):
            if ms[i] < m / _NEIGHBOUR_FACTOR:
                break
            row = self.usable_row(at, which, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        for i in range(here, len(ms)):
            if ms[i] > m * _NEIGHBOUR_FACTOR:
                break
            row = None if ms[i] == m else self.usable_row(at, which, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        return found

    def fastest(self, at: At) -> tuple[Plan, float] | None:
        """The fastest of the kernels' `usual_plans` by the cost model, the first of equals.

        Kernels come by the least time that they can take, and so do the numbers of parts that a
        kernel may split K in; what cannot take less than the best found is not looked at.
        """
        # The least time, the number in the order of plans, the load (None: of all splits), and the
        # least times with copies and with SM push.
        waiting: list[tuple[float, int, _Way, Load | None, float, float]] = []
        for i, ways in enumerate(self._ways):
            way, number = ways[0], _MAX_SPLITS * i
            load = at.load(way.tiling)
            least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
            waiting.append((least[0], number, way, load, least[1], least[2]))
            if way.config.can_split and 2 * load.blocks <= way.tiling.workers:
                load = at.least_split_load(way.tiling)
                least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
                waiting.append((least[0], number + 1, way, None, 0.0, 0.0))
        heapify(waiting)
        best_us, best_number = inf, 0
        best: tuple[_Way, SmPush | None] | None = None
        while waiting:
            least_us, number, way, some_load, copied_us, pushed_us = heappop(waiting)
            limit_us = best_us * _PRUNING
            if least_us > limit_us:
                break
            if some_load is None:
                for splits, way in self._splits(at, number // _MAX_SPLITS):
                    load = at.load(way.tiling)
                    least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
                    if least[0] <= limit_us:
                        of_splits = number + splits - 2
                        heappush(waiting, (least[0], of_splits, way, load, least[1], least[2]))
                continue
            if way.can_push and pushed_us <= limit_us:
                push = way.usual_push(at, some_load)
                us = way.pushed_us(at, some_load, push)
                is_better = us < best_us or (us == best_us and 2 * number + 1 < best_number)
                if is_better and push.why_illegal(at.problem.k) is None:
                    best_us, best_number, best = us, 2 * number + 1, (way, push)
            if copied_us <= best_us * _PRUNING:
                us = way.copied_us(at, some_load, way.copies)
                if us < best_us or (us == best_us and 2 * number < best_number):
                    best_us, best_number, best = us, 2 * number, (way, None)
        if best is None:
            return None
        way, chosen = best
        transport = way.copies if chosen is None else chosen.name
        return Plan(transport, way.in_order(at.problem)), best_us

    def _splits(self, at: At, i: int) -> Iterator[tuple[int, _Way]]:
        """The legal splits of a kernel's K into two parts and more."""
        ways = self._ways[i]
        config, tiling = ways[0].config, ways[0].tiling
        legal = _splits_that_fit(at.problem.k, config.tile_k, at.blocks(tiling), tiling.workers)
        for splits in legal[1:_MAX_SPLITS]:
            if len(ways) < splits:
                ways.append(_Way(at.problem, replace(config, splits=splits)))
            yield splits, ways[splits - 1]


class _Here:
    """A problem under a planner's eyes; what the choices for it share is worked out once."""

    def __init__(self, family: _Family, problem: Problem) -> None:
        self.family = family
        self.problem = problem
        self.at = At(problem)
        self._fastest: tuple[tuple[Plan, float] | None] | None = None
        self._unfused_us: float | None = None
        self._of_rows: dict[int, tuple[Plan, float]] = {}
        self.between: tuple[list[_KeptRow], _Found, _Found] | None = None
        """The last choice between rows: these, the model's favourite, and what was found."""

    def fastest(self) -> tuple[Plan, float] | None:
        if self._fastest is None:
            self._fastest = (self.family.fastest(self.at),)
        return self._fastest[0]

    def of_row(self, kept: _KeptRow) -> tuple[Plan, float]:
        found = self._of_rows.get(id(kept))
        if found is None:
            found = self._of_rows[id(kept)] = kept.here(self.at)
        return found

    def unfused_us(self) -> float:
        if self._unfused_us is None:
            self._unfused_us = cost_model.unfused_us(self.problem)
        return self._unfused_us


class _Found(NamedTuple):
    plan: Plan
    source: str
    us: float | None = None
    """Predicted, where it had to be."""
    row: Row | None = None


class Planner:
    """Chooses plans for one build and remembers them.

    Args:
        kernels: the kernels to choose from, in any order and raster.
        tables: the tables to look into; of two rows for one problem the first table's counts.
    """

    def __init__(self, kernels: Sequence[KernelConfig], tables: Sequence[Rows] = ()) -> None:
        self.kernels = tuple(kernels)
        self.tables = tuple(tables)
        self._warned: set[str] = set()
        self._plan = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, False).plan)
        self._fused = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, True).plan)
        self._family = lru_cache(_MAX_FAMILIES)(lambda key: _Family(self, Problem(1, *key)))
        self._last: _Here | None = None

    def plan(self, problem: Problem) -> Plan:
        """`choose(problem).plan`, remembered."""
        return self._plan(problem)

    def fused_plan(self, problem: Problem) -> Plan:
        """The best fused plan of a GPU problem, remembered.

        Raises:
            ValueError: there is no kernel to choose from.
        """
        return self._fused(problem)

    def choose(self, problem: Problem, *, fused: bool = False) -> Choice:
        """The plan for a problem.

        A row of exactly this problem decides, or else one that differs in ``return_A`` alone. Else
        the nearest rows below and above count, each at most 4 times away in M. Each plan is rated
        by the cost model's time at this M, times what its row measured over what the model says
        there. The model's own favourite, where it is none of these, takes part at the mean of these
        ratios (of the fused rows where it is fused). The order of tiles is the usual one, and so is
        SM push where shards end inside tiles. Where there is no model, the row nearest in M decides
        as it is (of two equally near the one above). Without any such row those of the problem that
        differs in ``return_A`` count in the same way, and without these it is the model's
        favourite. Rows whose plan this build cannot run are passed over, with one warning per
        reason.

        Args:
            fused: leave the unfused plan out.

        Raises:
            ValueError: ``fused``, and there is no kernel to choose from.
        """
        found = self._find(problem, fused)
        return Choice(found.plan, found.source, predict_us(problem, found.plan), found.row)

    def warn(self, message: str, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(message, stacklevel=2)

    def _find(self, problem: Problem, fused: bool) -> _Found:
        here = self._last
        if here is None or here.problem != problem:
            here = self._last = _Here(self._family(problem[1:]), problem)
        family = here.family
        # Unfused A costs nothing: what is the fastest with it need not be so without.
        fused_of_twin = fused or not problem.return_A
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            kept = family.usable_row(here.at, which, problem.m, only_fused)
            if kept is not None:
                own_row = kept.row if which == 0 else None
                return _Found(kept.row.plan, kept.source, None, own_row)
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            near = family.near_rows(here.at, which, only_fused)
            if near:
                return self._choose_between_rows(here, near, fused)
        return self._favourite(here, fused)

    def _choose_between_rows(self, here: _Here, near: list[_KeptRow], fused: bool) -> _Found:
        """What the rows of other M say."""
        problem = here.problem
        favourite = None
        if _has_model(problem):
            favourite = self._favourite(here, fused)
            if here.between is not None:
                before, of, found = here.between
                if before == near and of == favourite:
                    return found
        words = " and ".join(f"M={kept.row.m}" for kept in near)
        source = f"tuned at {words} ({near[-1].source})"
        if favourite is None:
            nearest = min(reversed(near), key=lambda kept: abs(log(kept.row.m / problem.m)))
            return _Found(nearest.row.plan, source)
        rated: list[tuple[float, Plan]] = []
        ratios: list[tuple[bool, float]] = []
        for kept in near:
            plan_here, here_us = here.of_row(kept)
            there_us = kept.there_us(problem)
            assert there_us is not None
            measured = kept.row.us / there_us
            if plan_here.transport != kept.row.plan.transport:
                measured = max(1.0, measured)  # it says little of another plan
            ratios.append((kept.row.plan == UNFUSED, measured))
            rated.append((here_us * measured, plan_here))
        assert favourite.us is not None
        best_us, best = min(rated, key=lambda pair: pair[0])
        is_unfused = favourite.plan == UNFUSED
        alike = [ratio for of_unfused, ratio in ratios if of_unfused == is_unfused]
        alike = alike or [ratio for _, ratio in ratios]
        mean = sum(alike) / len(alike)
        is_theirs = any(favourite.plan == plan for _, plan in rated)
        found = _Found(best, source)
        if not is_theirs and favourite.us * mean < best_us:
            found = favourite._replace(source=f"cost model, against what was {source}")
        here.between = near, favourite, found
        return found

    def alternatives(self, problem: Problem) -> list[tuple[Plan, float | None]]:
        """`usual_plans` of each kernel and the unfused plan, with predicted µs, fastest first."""
        plans = [UNFUSED]
        if problem.gpu == CPU:
            plans.insert(0, Plan("push"))
        elif why_unfused(problem.dtype, problem.n, problem.k) is None:
            plans += [plan for kernel in self.kernels for plan in usual_plans(problem, kernel)]
        timed = [(plan, predict_us(problem, plan)) for plan in plans]
        return sorted(timed, key=lambda pair: (pair[1] is None, pair[1] or 0.0))

    def _favourite(self, here: _Here, fused: bool) -> _Found:
        """What the cost model says; where it says nothing, the plain fused plan."""
        problem, family = here.problem, here.family
        if problem.gpu == CPU:
            return _Found(Plan("push"), "default of the CPU backend")
        if family.why_unfused is not None and not fused:
            return _Found(UNFUSED, family.why_unfused, predict_us(problem, UNFUSED))
        # One rank has nothing to gather: the unfused path would only copy A.
        fused = fused or problem.world_size == 1
        best = here.fastest()
        if best is None and fused:
            raise ValueError("kernels: found none, wanted a build with CUDA kernels")
        if best is not None:
            gathered = problem.m * problem.k * cost_model.ELEMENT_BYTES
            varies = _GATHER_VARIES if gathered > _STEADY_GATHER_BYTES else 0.0
            margin_us = varies * cost_model.all_gather_us(problem)
            if fused or best[1] <= here.unfused_us() + margin_us:
                return _Found(best[0], "cost model", best[1])
        return _Found(UNFUSED, "cost model", here.unfused_us())


def parse_config(config: str) -> tuple[KernelConfig | None, str | None]:
    """Kernel and transport of a config: a kernel's name, and perhaps ``/push``, ``/pull`` or the
    name of an `SmPush`.

    None where the config leaves it open; the empty one leaves both open.

    Raises:
        ValueError: it is neither a kernel's name nor one followed by a transport.
    """
    if not config:
        return None, None
    kernel, slash, transport = config.rpartition("/")
    if slash and (transport in ("push", "pull") or SmPush.parse(transport) is not None):
        return KernelConfig.parse(kernel), transport
    return KernelConfig.parse(config), None
