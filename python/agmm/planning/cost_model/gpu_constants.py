"""The constants of each GPU, as its file in ``tables/`` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from agmm.planning import formats, kernel_table
from agmm.planning.plans import ALL_GATHER_MATMUL, DEFAULT_GPU, KernelConfig, Problem

_FOLDER = Path(__file__).parents[1] / "tables"
ELEMENT_BYTES = 2
"""The size of an element of a result, whatever the operands are."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Constants:
    """The constants of one GPU. Rates are sustained; GB/s are received bytes per rank.

    What is told by kernel holds for a kernel's name, or else for its `KernelConfig.tile`.
    """

    gpu: str
    sm_count: int
    launch_us: float
    call_us: float
    """What a call of agmm's kernels takes beside that and its tiles."""
    tflops_per_sm: dict[str, float]
    """Of one multiprocessor inside the main loop, by kernel."""
    row_major_factor: dict[str, float]
    """How much longer a tile takes with a row-major B, by kernel, where that is above 3%: of a
    tile whose width is no multiple of 64 columns, TMA loads it in narrow pieces."""
    gathered_factor: dict[str, float]
    """How much longer a tile takes where rows come from other ranks, by kernel: 1 where the rate is
    that."""
    other_gathered_factor: float
    """Of a kernel that is not in ``gathered_factor``: not timed so."""
    other_tflops_per_sm: float
    """Of a kernel that is not in ``tflops_per_sm``."""
    tile_overhead_us: dict[str, float]
    """Between the main loops of two tiles, by kernel, else by schedule."""
    pingpong_overlap: float
    """The share of it that a pingpong kernel's other warpgroup hides, of every tile but one. Of
    matmuls without a gather: ``gathered_factor`` was fitted without it."""
    idle_gain: float
    """How much less time the main loop of a tile takes in one wave, times the share of the
    multiprocessors that have none: the clock is higher, and nobody takes its loads."""
    steady_clock_us: float
    """For so long a matmul keeps its clock."""
    falling_clock: dict[str, float]
    """How many times as long what is left then takes, by schedule, and for the library's matmul."""
    split_us: float
    """Of each part when K is split: leaving its sums, or adding up another's."""
    cluster_split_us: tuple[float, float]
    """The same where the CTAs of a tile are a cluster: once, and of each part."""
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
    scatter_us: float
    scatter_us_per_rank: float
    """Of a matmul + reduce-scatter whose kernel sends tiles, beside its waves of tiles: of the
    call, and of each other rank."""
    scatter_tile_us: dict[str, tuple[float, float]]
    """Of a tile there, by kernel: for each column of A, and beside that."""
    other_scatter_overhead_us: float
    """The second of these for a kernel that is not in ``scatter_tile_us``."""
    scatter_gb_per_s: float
    """Sent by one rank there."""
    matmul_tflops: float
    """The rate of the library's matmul of 16 bits."""
    memory_gb_per_s: float
    matmul_gb_per_s: float
    """Of the same memory, what a matmul gets."""
    matmul_latency_us: float
    """What the library's adds to its memory traffic."""
    l2_mb: float
    """What stays in the L2 cache from one chunk's tiles to the next one's."""
    sources: str
    matmul_rate_factor: float = 1.0
    """How many times ``matmul_tflops`` the library's matmul of these operands has."""
    formats: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What differs for operands of other kinds than `formats.BITS_16`, by `Format.kind`."""

    def of_kernel(self, by_kernel: Mapping[str, _T], kernel: KernelConfig, other: _T) -> _T:
        """What one of the constants by kernel says of this one, or ``other``."""
        found = by_kernel.get(kernel.kernel)
        return by_kernel.get(kernel.tile, other) if found is None else found

    def overhead_us(self, kernel: KernelConfig) -> float:
        """See ``tile_overhead_us``."""
        by_kernel = self.tile_overhead_us
        return self.of_kernel(by_kernel, kernel, by_kernel[kernel.schedule])


@cache
def known_gpus() -> tuple[str, ...]:
    """The GPUs that have constants."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.json") if "tflops_per_sm" in p.read_text()))


_given: dict[str, Constants] = {}


def give(gpu: str, constants: Constants) -> None:
    """From now on those of ``gpu`` in this process, whatever its file says: to fit them."""
    _given[gpu] = constants


def constants(gpu: str) -> Constants:
    """The constants of ``gpu``, or those of `DEFAULT_GPU` where it has none (see ``.gpu``), for
    operands of 16 bits."""
    return _given.get(gpu) or _of_file(gpu)


_of_kinds: dict[tuple[str, str], tuple[Constants, Constants]] = {}
"""By GPU and kind of format: its constants for 16 bits, and those for the kind."""


def constants_for(problem: Problem) -> Constants:
    """The constants of the problem's GPU for operands of its format."""
    return constants_of_kind(problem.gpu, formats.of(problem.format).kind)


def constants_of_kind(gpu: str, kind: str) -> Constants:
    """The constants of ``gpu`` for operands of one `Format.kind`."""
    base = constants(gpu)
    if kind not in base.formats:
        return base
    found = _of_kinds.get((gpu, kind))
    if found is None or found[0] is not base:
        found = _of_kinds[gpu, kind] = base, replace(base, **base.formats[kind], formats={})
    return found[1]


@cache
def _of_file(gpu: str) -> Constants:
    name = gpu if gpu in known_gpus() else DEFAULT_GPU
    return Constants(**json.loads((_FOLDER / f"{name}.json").read_text()))


def default_kernels(
    op: str = ALL_GATHER_MATMUL, name: str = "bfloat16"
) -> tuple[KernelConfig, ...]:
    """The kernels that a default build has for an op and the name of a format."""
    of = formats.of(name)
    if not of.has_kernels:
        return ()
    is_fp8 = of.kind == formats.FP8
    return tuple(
        KernelConfig.parse(row.kernel)
        for row in kernel_table.rows_of("default", op, is_fp8=is_fp8)
        if not is_fp8
        or (row.accumulation == of.accumulation and of.operands in map(_torch_name, row.formats))
    )


def _torch_name(name: str) -> str:
    """What `_core.DType` calls the fp8 operands that the table of kernels calls that."""
    both = name.split("_") if "_" in name else (name, name)
    return "_".join({"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[one] for one in both)
