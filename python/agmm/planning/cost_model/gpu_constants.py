"""The constants of each GPU, as its file in ``tables/`` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from agmm.planning import formats, kernel_table
from agmm.planning.problems import ALL_GATHER_MATMUL, DEFAULT_GPU, PLAIN, KernelConfig, Problem

_FOLDER = Path(__file__).parents[1] / "tables"
ELEMENT_BYTES = 2
"""The size of an element of a result, whatever the operands are."""

NEVER_US = 1e9
"""The time of what a GPU's constants do not know: it is never the shorter one."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Constants:
    """The constants of one GPU. Rates are sustained; GB/s are received bytes per rank.

    Constants that are given by kernel are looked up by a kernel's name, or else by its
    `KernelConfig.tile`.
    """

    gpu: str
    sm_count: int
    launch_us: float
    call_us: float
    """The time that a call of agmm's kernels takes beside ``launch_us`` and its tiles."""
    tflops_per_sm: dict[str, float]
    """The rate of one multiprocessor inside the main loop, by kernel."""
    row_major_factor: dict[str, float]
    """The factor by which a tile takes longer with a row-major B, by kernel, where it is above
    1.03. TMA loads a tile whose width is no multiple of 64 columns in narrow pieces."""
    gathered_factor: dict[str, float]
    """The factor by which a tile takes longer where rows come from other ranks, by kernel. It is 1
    where ``tflops_per_sm`` was fitted to such tiles."""
    other_gathered_factor: float
    """The factor of a kernel that is not in ``gathered_factor``, and so was not timed with a
    gather."""
    other_tflops_per_sm: float
    """The rate of a kernel that is not in ``tflops_per_sm``."""
    tile_overhead_us: dict[str, float]
    """The time between the main loops of two tiles, by kernel, else by schedule."""
    pingpong_overlap: float
    """The share of ``tile_overhead_us`` that a pingpong kernel's other warpgroup hides, for every
    tile but one. It holds for matmuls without a gather: ``gathered_factor`` was fitted without
    it."""
    idle_gain: float
    """The share of time that the main loop of a tile saves in one wave, to be multiplied with the
    share of the multiprocessors that have no tile: the clock is higher, and nobody else loads."""
    steady_clock_us: float
    """The time for which a matmul runs at its first clock."""
    falling_clock: dict[str, float]
    """The factor by which the rest of a matmul then takes longer, by schedule, and for the
    library's matmul."""
    split_us: float
    """The time of each split of K: to store its sums, or to add up those of another one."""
    cluster_split_us: tuple[float, float]
    """The time of splits of K where the CTAs of a tile are a cluster: once, and for each split."""
    copy_overhead_us: float
    """The time of one copy-engine copy and its signal, beside its bytes."""
    push_gb_per_s: float
    pull_gb_per_s: float
    staging_gb_per_s: float
    """The rate of the copy of A_shard that pull makes."""
    sm_push_us: float
    """The time until the first chunk of an SM push has arrived."""
    sm_push_straddling_us: float
    """The additional time of a call with SM push, of one wave and more than a row of blocks, where
    a shard ends inside a tile, which waits for two ranks."""
    sm_push_disturbance: float
    """The share of the sending time that SM push costs the matmul."""
    sm_push_cta_disturbance: float
    """The share of the sending time that SM push costs the matmul where CTAs of their own send."""
    sm_push_gb_per_s: float
    """The most that one rank sends by SM push, to all peers together."""
    sm_push_gb_per_s_and_cta: float
    """The rate at which a CTA that computes tiles can send beside them, its fences apart."""
    sm_push_fence_us: float
    """The time between what such a CTA sends and its signal."""
    sm_push_gb_per_s_and_own_cta: float
    """The rate at which a CTA that does nothing else can send."""
    sm_push_one_peer_factor: float
    """The factor by which a MB takes longer where there is one peer, so that no other peer shares a
    fence."""
    all_gather_us: float
    all_gather_gb_per_s: float
    small_gather_us: float
    small_gather_gb_per_s: float
    small_gather_mb: float
    """The most MB that a rank receives of a gather with the shorter latency and the lower rate."""
    reduce_scatter_us: float
    reduce_scatter_gb_per_s: float
    """The rate of NCCL's reduce-scatter after the matmul, in sent bytes per rank."""
    fused_reduce_scatter_us: float
    fused_reduce_scatter_us_per_rank: float
    """The time of torch's fused op beside its matmuls, copies and sum: its barriers."""
    fused_reduce_scatter_gb_per_s: float
    """The rate of the copies of torch's fused op."""
    fused_reduce_scatter_gain_us: float
    """The time that torch's fused op has to save on the GPU to make up for its host time."""
    scatter_us: float
    scatter_us_per_rank: float
    """The time of a matmul + reduce-scatter whose kernel sends tiles, beside its waves of tiles:
    once for the call, and for each other rank."""
    scatter_tile_us: dict[str, tuple[float, float]]
    """The time of a tile of such a kernel, by kernel: for each column of A, and beside that."""
    other_scatter_overhead_us: float
    """The time beside its columns of A of a tile whose kernel is not in ``scatter_tile_us``."""
    scatter_gb_per_s: float
    """The rate at which such a kernel sends, in sent bytes per rank."""
    matmul_tflops: float
    """The rate of the library's matmul of 16 bits."""
    memory_gb_per_s: float
    matmul_gb_per_s: float
    """The rate at which a matmul reads and writes that memory."""
    matmul_latency_us: float
    """The latency that the library's matmul adds to its memory traffic."""
    streaming_gb_per_s: float
    """The rate at which streaming kernels read B."""
    streaming_l2_gb_per_s: float
    """The rate at which they read A and B from L2, which all bytes pass."""
    streaming_sm_gb_per_s: float
    """The rate at which one multiprocessor takes them."""
    streaming_us: float
    """The time of such a kernel until its first bytes have come, and after its last, in place of
    ``call_us``."""
    streaming_split_us: float
    """The additional time where K is split."""
    l2_mb: float
    """The megabytes of B that stay in the L2 cache from one chunk's tiles to the next one's."""
    sources: str
    matmul_rate_factor: float = 1.0
    """The rate of the library's matmul of these operands, as a multiple of ``matmul_tflops``."""
    library: dict[str, float] = field(default_factory=dict)
    """The constants of the library's matmul by tiles, as `library_matmul.tiled_us` takes them, its
    latency and rate of memory, and the factor of `library_matmul.is_badly_chosen`; empty where only
    ``matmul_tflops`` and its like are known."""
    library_tiles: Sequence[tuple[int, int]] = ()
    """The rows and columns of the library's tiles by which these were fitted."""
    formats: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The constants that differ for operands of other kinds than `formats.BITS_16`, by
    `Format.kind`."""
    of_ranks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The constants that differ for a number of ranks, by that number and by `Format.kind`, as
    `benchmarks/fit_plans.py` fits them. What is given by kernel is added to what the GPU has."""
    choice_margins: dict[str, dict[str, float]] = field(default_factory=dict)
    """The factors by which predictions of plans are multiplied where plans are compared, by op and
    by the name of a transport, where they were fitted. What is seldom as fast as predicted has one
    above 1."""
    gathered_latency_us: float = 0.0
    """The latency that a fused gather adds to its memory traffic."""
    gathered_overlap: float = 0.0
    """The share of ``tile_overhead_us`` that is hidden behind a gather, for every tile but one."""
    scatter_reads_anew: bool = False
    """Whether the constants of scatters were fitted with B read anew for each rank's rows, where it
    does not stay in the L2 cache, and with this latency of memory traffic."""
    scatter_latency_us: float = 0.0
    """The latency that a fused scatter adds to its memory traffic."""
    scatter_rate_factor: dict[str, float] = field(default_factory=dict)
    """The rate at which a kernel that scatters sends, by kernel, as a multiple of
    ``scatter_gb_per_s``."""
    small_reduce_scatter_us: float = NEVER_US
    small_reduce_scatter_gb_per_s: float = 1.0
    """The time of NCCL's reduce-scatter of few bytes, where that is shorter than by
    ``reduce_scatter_us`` and its rate."""
    unaligned_scatter_factor: dict[str, float] = field(default_factory=dict)
    """The factor by which the main loop of a tile that is sent takes longer where rows of K columns
    are no whole lines of 128 bytes, by kernel."""
    scatter_add_us: float = 0.0
    """The time in which a tile of 128 x 128 of the own rows is added up, where the links are slower
    than the tiles; larger ones take longer."""
    sends_scales: bool = False
    """Whether SM push of rows with scales was timed; else tables alone choose it."""
    streams_exchanges: bool = False
    """Whether gathers and scatters beside a streaming kernel were timed; else they are taken by
    calls that name them alone."""
    sm_push_cta_us: float = 0.0
    """The additional time until an SM push has arrived where CTAs of their own send."""
    uncertainty: dict[str, dict[str, float]] = field(default_factory=dict)
    """How far off predictions are, as a share of them, by op and by `Plan.family`: of nine in
    ten calls that nothing was fitted to, at most so much."""

    @cached_property
    def library_rates(self) -> dict[float, list[tuple[int, int, float]]]:
        """What `library_matmul` has worked out of these constants, by the bytes of an element."""
        return {}

    def of_kernel(self, by_kernel: Mapping[str, _T], kernel: KernelConfig, other: _T) -> _T:
        """The value of a constant that is given by kernel for this one, or ``other``."""
        found = by_kernel.get(kernel.kernel)
        return by_kernel.get(kernel.tile, other) if found is None else found

    def overhead_us(self, kernel: KernelConfig) -> float:
        """The value of ``tile_overhead_us`` for this kernel."""
        by_kernel = self.tile_overhead_us
        return self.of_kernel(by_kernel, kernel, by_kernel[kernel.schedule])


@cache
def known_gpus() -> tuple[str, ...]:
    """The GPUs that have constants."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.json") if "tflops_per_sm" in p.read_text()))


_given: dict[str, Constants] = {}


def give(gpu: str, constants: Constants) -> None:
    """Replaces the constants of ``gpu`` in this process, whatever its file says, to fit them."""
    _given[gpu] = constants


def constants(gpu: str) -> Constants:
    """The constants of ``gpu``, or those of `DEFAULT_GPU` where it has none (see ``.gpu``), for
    operands of 16 bits."""
    return _given.get(gpu) or _of_file(gpu)


_of_kinds: dict[tuple[str, str, int], tuple[Constants, Constants]] = {}
"""The constants by GPU, kind of format and number of ranks: those that the GPU has for one rank and
16 bits, and those for the kind and the ranks."""


def constants_for(problem: Problem) -> Constants:
    """The constants of the problem's GPU for operands of its format and its number of ranks."""
    return constants_of_kind(problem.gpu, formats.of(problem.format).kind, problem.world_size)


def constants_of_kind(gpu: str, kind: str, world_size: int = 1) -> Constants:
    """The constants of ``gpu`` for operands of one `Format.kind` between so many ranks."""
    base = constants(gpu)
    found = _of_kinds.get((gpu, kind, world_size))
    if found is None or found[0] is not base:
        special = base
        if kind in base.formats:
            special = replace(base, **base.formats[kind], formats={})
        of_ranks = base.of_ranks.get(str(world_size), {}).get(kind)
        if of_ranks is not None:
            special = with_changes(special, of_ranks)
        found = _of_kinds[gpu, kind, world_size] = base, special
    return found[1]


def with_changes(constants: Constants, changes: Mapping[str, Any]) -> Constants:
    """The constants with others; of those that are given by name, only the names that the changes
    have differ."""
    merged: dict[str, Any] = {
        name: {**getattr(constants, name), **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(constants, **merged)


@cache
def _of_file(gpu: str) -> Constants:
    name = gpu if gpu in known_gpus() else DEFAULT_GPU
    return Constants(**json.loads((_FOLDER / f"{name}.json").read_text()))


def default_kernels(
    op: str = ALL_GATHER_MATMUL, name: str = "bfloat16", epilogue: str = PLAIN, b_layout: str = ""
) -> tuple[KernelConfig, ...]:
    """The kernels that a default build has for an op and the name of a format, as
    `built_kernels.kernels_of` has those of this build."""
    of = formats.of(name)
    if not of.has_kernels:
        return ()
    is_fp8 = of.kind == formats.FP8
    return tuple(
        KernelConfig.parse(row.kernel)
        for row in kernel_table.rows_of(
            "default", op, is_fp8=is_fp8, epilogue="plain" if epilogue == PLAIN else epilogue
        )
        if (not is_fp8 and b_layout in ("", *row.b_layouts))
        or (row.accumulation == of.accumulation and of.operands in map(_torch_name, row.formats))
    )


def _torch_name(name: str) -> str:
    """The name in `_core.DType` of fp8 operands, from their name in the table of kernels."""
    both = name.split("_") if "_" in name else (name, name)
    return "_".join({"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[one] for one in both)
