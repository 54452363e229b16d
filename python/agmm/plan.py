"""Problem -> plan: how one call is computed. Needs no GPU and no torch.

A plan comes from the first of these that knows the problem: the user's table, the packaged table
(`agmm.tables`), the cost model (`agmm.cost_model`). `Planner.choose` has the rule for an M between
two tuned ones. What a plan must fulfil is said once, in `why_illegal`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log
from statistics import fmean
from typing import NamedTuple, Protocol

from agmm import _core, cost_model

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
        if 0 < sm_push.head_chunks * sm_push.chunk_columns < problem.k:
            free = _free_sms(problem, kernel)
            if free < 1:
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
    built = [kernel for kernel in kernels if kernel.kernel == plan.kernel.kernel]
    if not built:
        return f"plan: found kernel {plan.kernel.kernel}, which is not in this build"
    legal = _legal_splits(problem, built[0])
    if plan.kernel.splits not in legal:
        return (
            f"plan: found {plan.kernel.splits} splits of K for {plan.kernel.kernel}, "
            f"wanted 1 to {legal[-1]}"
        )
    return None


def _legal_splits(problem: Problem, kernel: KernelConfig) -> range:
    """Into how many parts K may be split: all parts of all tiles are computed in one wave."""
    if not kernel.can_split:
        return range(1, 2)
    blocks, workers = cost_model.clusters(problem, replace(kernel, splits=1))
    return range(1, max(1, min(workers // blocks, -(-problem.k // kernel.tile_k))) + 1)


def orders(config: KernelConfig) -> Iterator[KernelConfig]:
    """The kernel with every raster and swizzle."""
    for raster, max_swizzle in product(RASTERS, SWIZZLES):
        yield replace(config, raster=raster, max_swizzle=max_swizzle)


def usual_order(problem: Problem, config: KernelConfig) -> KernelConfig:
    """The kernel with the raster and swizzle that were the best, or within 2% of it, on all but a
    few of the shapes measured on H200, within 4% on those (docs/performance.md)."""
    if config.schedule == "pingpong":
        rows = -(-problem.m // (problem.world_size * config.tile_m))
        if rows <= 8:
            return replace(config, raster="along_m", max_swizzle=1)
        # Bands of rows read all of B each: from the L2 cache, or one reading for two tiles.
        reads_b_cheaply = config.cluster_m > 1 or cost_model.is_b_in_l2(problem)
        raster = "along_n" if reads_b_cheaply else "along_m"
        return replace(config, raster=raster, max_swizzle=4)
    return replace(config, raster="along_n", max_swizzle=4 if config.tile_m > config.tile_n else 8)


def _free_sms(problem: Problem, kernel: KernelConfig) -> int:
    """Multiprocessors without a tile, in whole clusters; 0 with more than one wave of tiles."""
    blocks, workers = cost_model.clusters(problem, kernel)
    return max(0, workers - blocks) * kernel.cluster_m * kernel.cluster_n


def _can_have_head(problem: Problem, kernel: KernelConfig) -> bool:
    """Whether CTAs of their own find a multiprocessor, and most of K left to push."""
    columns, chunks = _HEAD
    return _free_sms(problem, kernel) >= _PUSH_SMS and problem.k >= 2 * columns * chunks


def _usual_sm_push(problem: Problem, kernel: KernelConfig) -> SmPush:
    # With more than one wave of tiles the nearest consumer's rows go first, since it computes them
    # first.
    blocks, workers = cost_model.clusters(problem, kernel)
    rows = max(1, problem.m // problem.world_size)
    one_wave = blocks <= workers
    # In shorter shards it holds up the others for longer than it helps.
    straddles = cost_model.straddles(problem, kernel)
    is_short = straddles or rows < max(256, kernel.tile_m * kernel.cluster_m)
    first_peers = 0 if one_wave or is_short else 1
    has_one_peer = problem.world_size == 2
    one_peer = first_peers == 1 or has_one_peer
    has_small_parts = one_peer or (kernel.splits == 1 and not straddles)
    part_rows = _PUSH_ROWS if has_small_parts else 2 * _PUSH_ROWS
    rate = cost_model.push_rate_gb_per_s(problem, kernel)
    waits = rate > (_ONE_PEER_RATE_GB_PER_S if has_one_peer else _PUSH_RATE_GB_PER_S)
    most_parts = MAX_PUSH_PARTS
    if straddles and rate > _LINK_BOUND_GB_PER_S:
        most_parts = max(_LINK_BOUND_PARTS, rows // _LINK_BOUND_ROWS)
    parts = 1
    while 2 * parts <= most_parts and 2 * parts * part_rows <= rows:
        parts *= 2
    is_narrow = one_wave and has_small_parts and not one_peer and not waits
    columns = _PUSH_COLUMNS[0 if is_narrow else 1]
    head_chunks = 0
    if _can_have_head(problem, kernel) and waits and (one_peer or not straddles):
        columns, head_chunks = _HEAD
    while problem.k > columns * MAX_COLUMN_CHUNKS:
        columns *= 2
    return SmPush(parts, min(columns, max(ALIGNMENT, problem.k)), first_peers, head_chunks)


def sm_pushes(problem: Problem, kernel: KernelConfig) -> list[SmPush]:
    """The legal SM pushes of a call with this kernel that are worth a measurement."""
    usual = _usual_sm_push(problem, kernel)
    can_have_head = _can_have_head(problem, kernel)
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
            has_ctas=0 < sm_push.head_chunks * sm_push.chunk_columns < problem.k,
        )
    return cost_model.fused_us(problem, plan.kernel, plan.transport)


def _plan_here(problem: Problem, tuned: Plan) -> Plan:
    """The plan of another M for this one. Its order of tiles says nothing: the best one there may
    be best by less than the noise, and take a third longer here. How SM push best cuts whole tiles
    of a shard says nothing about shards that end inside them."""
    if tuned.kernel is None:
        return tuned
    kernel = usual_order(problem, tuned.kernel)
    if SmPush.parse(tuned.transport) is None or not cost_model.straddles(problem, kernel):
        return replace(tuned, kernel=kernel)
    return replace(tuned, transport=_usual_sm_push(problem, kernel).name, kernel=kernel)


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


class Planner:
    """Chooses plans for one build and remembers them.

    Args:
        kernels: the kernels to choose from, in any order and raster.
        tables: the tables to look into; of two rows for one problem the first table's counts.
    """

    def __init__(self, kernels: Sequence[KernelConfig], tables: Sequence[Rows] = ()) -> None:
        self.kernels = tuple(kernels)
        self.tables = tuple(tables)
        self._plans: dict[Problem, Plan] = {}
        self._fused: dict[Problem, Plan] = {}
        self._warned: set[str] = set()

    def plan(self, problem: Problem) -> Plan:
        """`choose(problem).plan`, remembered."""
        found = self._plans.get(problem)
        if found is None:
            found = self._plans[problem] = self.choose(problem).plan
        return found

    def fused_plan(self, problem: Problem) -> Plan:
        """The best fused plan of a GPU problem, remembered.

        Raises:
            ValueError: there is no kernel to choose from.
        """
        found = self._fused.get(problem)
        if found is None:
            found = self._fused[problem] = self.choose(problem, fused=True).plan
        return found

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
        twin = problem._replace(return_A=not problem.return_A)
        rows = []
        for tuned in (problem, twin):
            by_m = self._usable_rows(problem, tuned, fused)
            if problem.m in by_m:
                row, source = by_m[problem.m]
                own_row = row if tuned == problem else None
                return Choice(row.plan, source, predict_us(problem, row.plan), own_row)
            rows.append(by_m)
        for by_m in rows:
            choice = self._choose_between_rows(problem, by_m, fused)
            if choice is not None:
                return choice
        return self._favourite(problem, fused)

    def _choose_between_rows(
        self, problem: Problem, rows: dict[int, tuple[Row, str]], fused: bool
    ) -> Choice | None:
        """What the rows of other M say; None: nothing."""
        below = max((m for m in rows if problem.m / _NEIGHBOUR_FACTOR <= m < problem.m), default=0)
        above = min((m for m in rows if problem.m < m <= problem.m * _NEIGHBOUR_FACTOR), default=0)
        near = [rows[m][0] for m in (below, above) if m]
        if not near:
            return None
        words = " and ".join(f"M={row.m}" for row in near)
        source = f"tuned at {words} ({rows[near[-1].m][1]})"
        plans = [_plan_here(problem, row.plan) for row in near]
        rated: list[tuple[float, Plan]] = []
        ratios: list[float] = []
        for row, plan_here in zip(near, plans, strict=True):
            there = predict_us(problem._replace(m=row.m), row.plan)
            here = predict_us(problem, plan_here)
            if there is None or here is None:
                nearest = min(reversed(near), key=lambda r: abs(log(r.m / problem.m)))
                return Choice(nearest.plan, source, None)
            measured = row.us / there
            if plan_here.transport != row.plan.transport:
                measured = max(1.0, measured)  # it says little of another plan
            ratios.append(measured)
            rated.append((here * measured, plan_here))
        favourite = self._favourite(problem, fused)
        assert favourite.predicted_us is not None
        best_us, best = min(rated, key=lambda pair: pair[0])
        is_unfused = favourite.plan == UNFUSED
        alike = [
            ratio
            for row, ratio in zip(near, ratios, strict=True)
            if (row.plan == UNFUSED) == is_unfused
        ]
        is_theirs = favourite.plan in plans
        if not is_theirs and favourite.predicted_us * fmean(alike or ratios) < best_us:
            return replace(favourite, source=f"cost model, against what was {source}")
        return Choice(best, source, predict_us(problem, best))

    def alternatives(self, problem: Problem) -> list[tuple[Plan, float | None]]:
        """`usual_plans` of each kernel and the unfused plan, with predicted µs, fastest first."""
        plans = [UNFUSED]
        if problem.gpu == CPU:
            plans.insert(0, Plan("push"))
        elif why_unfused(problem.dtype, problem.n, problem.k) is None:
            plans += [plan for kernel in self.kernels for plan in usual_plans(problem, kernel)]
        timed = [(plan, predict_us(problem, plan)) for plan in plans]
        return sorted(timed, key=lambda pair: (pair[1] is None, pair[1] or 0.0))

    def _favourite(self, problem: Problem, fused: bool) -> Choice:
        """What the cost model says; where it says nothing, the plain fused plan."""
        reason = None if problem.gpu == CPU else why_unfused(problem.dtype, problem.n, problem.k)
        if reason is not None and not fused:
            return Choice(UNFUSED, reason, predict_us(problem, UNFUSED))
        if problem.gpu == CPU:
            return Choice(Plan("push"), "default of the CPU backend", None)
        # One rank has nothing to gather: the unfused path would only copy A.
        fused = fused or problem.world_size == 1
        plans = self.alternatives(problem)
        best = next((pair for pair in plans if pair[0] != UNFUSED), None)
        if best is None and fused:
            raise ValueError("kernels: found none, wanted a build with CUDA kernels")
        unfused_us = next(us for plan, us in plans if plan == UNFUSED)
        if best is not None:
            gathered = problem.m * problem.k * cost_model.ELEMENT_BYTES
            varies = _GATHER_VARIES if gathered > _STEADY_GATHER_BYTES else 0.0
            margin_us = varies * cost_model.all_gather_us(problem)
            if fused or (best[1] or 0.0) <= (unfused_us or 0.0) + margin_us:
                return Choice(best[0], "cost model", best[1])
        return Choice(UNFUSED, "cost model", unfused_us)

    def _usable_rows(
        self, problem: Problem, tuned: Problem, fused: bool
    ) -> dict[int, tuple[Row, str]]:
        """By M: the row of `tuned` that counts, and its table's name."""
        found: dict[int, tuple[Row, str]] = {}
        # Unfused A costs nothing: what is the fastest with it need not be so without.
        fused = fused or (tuned.return_A and not problem.return_A)
        differs = "" if tuned == problem else f", return_A={tuned.return_A}"
        whole = tuned._replace(sm_count=0)
        for table in self.tables:
            for row in table.rows(tuned):
                if row.m in found or (fused and row.plan == UNFUSED):
                    continue
                reason = why_illegal(problem, row.plan, self.kernels)
                if reason is None:
                    found[row.m] = row, table.name + differs
                elif why_illegal(whole._replace(m=row.m), row.plan, self.kernels) is None:
                    continue  # it is for other calls, as splits of K are for few rows and all SMs
                elif reason not in self._warned:
                    self._warned.add(reason)
                    warnings.warn(f"agmm passes over rows of {table.name}: {reason}", stacklevel=2)
        return found


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
