"""Problem -> plan: which kernel computes it. Pure Python, needs no GPU and no torch.

The choice is a cost model of a few lines (`predict_us`): tiles run in waves over the
multiprocessors in the order in which the persistent kernel takes them, each for the time that its
kernel needs per tile, and none starts before its chunk has arrived. The constants were measured on
H200 (docs/performance.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

ALIGNMENT = 8
"""K and N must be multiples of this: 16-byte TMA alignment of 2-byte elements."""

_CONFIG_NAME = re.compile(
    r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)_([1-9]\d*)x([1-9]\d*)_(cooperative|pingpong)(_timed)?"
    r"(?:/swizzle([1248])(?:/(along_m|along_n))?)?"
)

FUSED_DTYPES = ("bfloat16", "float16")

DEFAULT_SM_COUNT = 132


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


@dataclass(frozen=True)
class KernelConfig:
    """A kernel of the table in ``src/cuda/kernels.cmake``, with its swizzle and raster.

    ``schedule`` is ``"cooperative"`` or ``"pingpong"``; ``raster`` is ``"along_m"`` or
    ``"along_n"``; ``max_swizzle`` is 1, 2, 4 or 8. ``timed`` is the variant that
    records when each tile waited and ran.
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
        """The inverse of ``name``; swizzle and raster may be left out.

        Raises:
            ValueError: ``name`` is not of the form
                ``128x256x64_2x1_cooperative[/swizzleN[/raster]]``.
        """
        found = _CONFIG_NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"config: found {name!r}, wanted a name such as "
                "128x256x64_2x1_cooperative/swizzle4/along_m"
            )
        tile_m, tile_n, tile_k, cluster_m, cluster_n = (int(v) for v in found.groups()[:5])
        schedule, timed, max_swizzle, raster = found.groups()[5:]
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
        )

    @property
    def kernel(self) -> str:
        """Tile, cluster and schedule: what is compiled in."""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
            f"_{self.cluster_m}x{self.cluster_n}_{self.schedule}{'_timed' if self.timed else ''}"
        )

    @property
    def name(self) -> str:
        return f"{self.kernel}/swizzle{self.max_swizzle}/{self.raster}"


@dataclass(frozen=True)
class Problem:
    """``out[m, n] = all_gather(A_shard)[m, k] @ B[k, n]``; m is the gathered row count."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    world_size: int = 1
    return_A: bool = False
    sm_count: int = DEFAULT_SM_COUNT


def why_unfused(dtype: str, n: int, k: int) -> str | None:
    """The reason why the CUDA kernels cannot compute this product, or None."""
    if dtype not in FUSED_DTYPES:
        return f"A_shard: dtype={dtype}, the fused path wants bfloat16 or float16"
    if k < 1 or k % ALIGNMENT != 0:
        return f"A_shard: K={k} is not a positive multiple of {ALIGNMENT} (16-byte TMA alignment)"
    if n < 1 or n % ALIGNMENT != 0:
        return f"B: N={n} is not a positive multiple of {ALIGNMENT} (16-byte TMA alignment)"
    return None


# Sustained TFLOPS of one multiprocessor inside the main loop, by kernel, and µs between the main
# loops of two tiles (pingpong hides its epilogue behind the other tile's main loop).
_TFLOPS_PER_SM = {
    "128x256x64_2x1_cooperative": 6.2,
    "128x256x64_1x1_cooperative": 6.15,
    "128x192x64_2x1_cooperative": 6.08,
    "256x128x64_2x1_cooperative": 6.1,
    "128x128x64_1x1_pingpong": 5.85,
    "128x128x64_2x1_pingpong": 5.8,
    "128x160x64_1x1_pingpong": 5.9,
}
_DEFAULT_TFLOPS_PER_SM = 5.8
_TILE_OVERHEAD_US = {"cooperative": 2.2, "pingpong": 0.8}
_LAUNCH_US = 5.0

# The copy engine, one peer after the other: µs per copy and its signal, GB/s received.
_COPY_OVERHEAD_US = 5.0
_COPY_GB_PER_S = {False: 372.0, True: 350.0}  # by return_A: push, pull


def arrival_us(problem: Problem, position: int) -> float:
    """When the chunk at this ring position is there, in µs after the call; 0 is the own shard."""
    if position == 0:
        return 0.0
    shard_bytes = problem.m // problem.world_size * problem.k * 2
    per_shard = _COPY_OVERHEAD_US + shard_bytes / (_COPY_GB_PER_S[problem.return_A] * 1e3)
    staging = _COPY_OVERHEAD_US + shard_bytes / 1.5e6 if problem.return_A else 0.0
    return staging + _COPY_OVERHEAD_US + position * per_shard


def predict_us(problem: Problem, config: KernelConfig) -> float:
    """Predicted time of the fused call in µs, launch included."""
    tiles_m = -(-problem.m // config.tile_m)
    tiles_n = -(-problem.n // config.tile_n)
    tile_us = (
        2e-6
        * config.tile_m
        * config.tile_n
        * problem.k
        / _TFLOPS_PER_SM.get(config.kernel, _DEFAULT_TFLOPS_PER_SM)
        + _TILE_OVERHEAD_US[config.schedule]
    )

    # One worker per CTA; a pingpong CTA works on two tiles at a time but no faster than on one.
    # Clusters go in lockstep, so one cluster's tiles count as that many workers' tiles.
    cluster = config.cluster_m * config.cluster_n
    workers = problem.sm_count // cluster
    blocks_m = -(-tiles_m // config.cluster_m)
    blocks = blocks_m * -(-tiles_n // config.cluster_n)
    free_at = [0.0] * min(workers, blocks)
    per_position = blocks / problem.world_size
    arrivals = [arrival_us(problem, p) for p in range(problem.world_size)]
    for step in range(blocks):
        worker = step % len(free_at)
        position = min(int(step / per_position), problem.world_size - 1)
        free_at[worker] = max(free_at[worker], arrivals[position]) + tile_us
    return _LAUNCH_US + max(free_at)


def _raster_and_swizzle(problem: Problem, config: KernelConfig) -> tuple[str, int]:
    """Order inside a chunk: the best, or within 2% of it, on all shapes measured on H200."""
    if config.schedule == "pingpong":
        rows = -(-problem.m // (problem.world_size * config.tile_m))
        return "along_m", 1 if rows <= 8 else 4
    return "along_n", 4 if config.tile_m > config.tile_n else 8


def choose_kernel(problem: Problem, kernels: Sequence[KernelConfig]) -> KernelConfig:
    """The kernel with the shortest predicted time among ``kernels``.

    Raises:
        ValueError: ``kernels`` is empty.
    """
    if not kernels:
        raise ValueError("kernels: found none, wanted a build with CUDA kernels")
    best = min(kernels, key=lambda config: predict_us(problem, config))
    raster, max_swizzle = _raster_and_swizzle(problem, best)
    return replace(best, raster=raster, max_swizzle=max_swizzle)


@lru_cache(maxsize=4096)
def _cached_choice(problem: Problem, kernels: tuple[KernelConfig, ...]) -> KernelConfig:
    return choose_kernel(problem, kernels)


def choose(problem: Problem, kernels: tuple[KernelConfig, ...]) -> KernelConfig:
    """As `choose_kernel`, remembered per problem."""
    return _cached_choice(problem, kernels)


def as_config(config: Any) -> KernelConfig | None:
    """A `KernelConfig` from one, from its name, or None."""
    if config is None or isinstance(config, KernelConfig):
        return config
    return KernelConfig.parse(str(config))
