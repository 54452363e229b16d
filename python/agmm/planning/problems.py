"""What a plan is for, and the kernels that it may have: problems, kernel configs, and the limits of
both. This module needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from typing import Any

from agmm import _core
from agmm.runtime import kernels

PLAIN = kernels.PLAIN
"""The value of `Problem.epilogue` for a bias or none."""

ALIGNMENT = _core.ALIGNMENT
"""K and N must be multiples of this: 16-byte TMA alignment of 2-byte elements."""

NUMBER = r"[1-9][0-9]{0,3}"
"""The pattern of a number in a name. It has few digits, so that it fits into the 32 bits of the
core, and products of such numbers too."""

_CONFIG_NAME = re.compile(
    rf"(?P<tile_m>{NUMBER})x(?P<tile_n>{NUMBER})x(?P<tile_k>{NUMBER})"
    rf"_(?P<cluster_m>{NUMBER})x(?P<cluster_n>{NUMBER})_(?P<schedule>cooperative|pingpong|streaming)"
    r"(?P<swapped>_swapped)?(?P<timed>_timed)?(?:/split(?P<splits>[2-9]|[1-9][0-9]{1,3}))?"
    r"(?:/swizzle(?P<max_swizzle>[1248])(?:/(?P<raster>along_m|along_n)(?P<across>/across)?)?)?"
)
"""The groups are fields of `KernelConfig`; a name leaves out those with their defaults."""

MAX_PUSH_PARTS = _core.MAX_PUSH_PARTS
MAX_COLUMN_CHUNKS = _core.MAX_COLUMN_CHUNKS
MAX_PUSH_RANKS = _core.MAX_PUSH_RANKS
MAX_CLUSTER_SPLITS = _core.MAX_CLUSTER_SPLITS
"""The most splits of K where the CTAs that split a tile are a cluster."""
MAX_SCATTER_TILES = _core.MAX_SCATTER_TILES
"""The most tiles of a rank's rows in a launch of a matmul + reduce-scatter."""
MAX_CHUNKS_PER_SHARD = 1024
"""The most chunks of a shard. It is a choice: every chunk takes a signal and a matmul, and tuning
tries at most 8."""
_PIECE_ROWS = 1024
"""The rows of a shard that the portable path multiplies at a time, at least. It is a choice: fewer
would leave multiprocessors of a large GPU without a tile."""
_MOST_PIECES = 4
"""The most pieces of a shard. It is a choice: each costs a launch of the library's matmul."""
MAX_SIZE = _core.MAX_SIZE
"""The largest M, N and K, which the core counts in 32 bits."""

FUSED_DTYPES = tuple(name for name in _core.DType.__members__ if not name.startswith("float8"))
"""The dtypes of operands that need no scales and that the fused kernels take."""

DEFAULT_GPU = "nvidia-h200"
"""The GPU whose constants serve every GPU that has none of its own."""

CPU = "cpu"
"""The value of `Problem.gpu` for the CPU backend."""

SWIZZLES = (1, 2, 4, 8)  # of CUTLASS's schedulers
RASTERS = ("along_m", "along_n")


def portable_pieces(rows: int) -> int:
    """The number of pieces in which the portable path multiplies a shard of so many rows."""
    return max(1, min(_MOST_PIECES, rows // _PIECE_ROWS))


_CORE_FIELDS = tuple(_core.KernelConfig.field_names())


@lru_cache(maxsize=4096)
def _of_core(config: KernelConfig) -> _core.KernelConfig:
    return _core.KernelConfig(**{name: getattr(config, name) for name in _CORE_FIELDS})


@dataclass(frozen=True)
class KernelConfig:
    """A kernel of the table in ``kernels.json``, with its swizzle and raster.

    ``schedule`` is ``"cooperative"``, ``"pingpong"`` or ``"streaming"``; ``raster`` is
    ``"along_m"`` or ``"along_n"``; ``max_swizzle`` is 1, 2, 4 or 8. ``timed`` is the variant that
    records when each tile waited and ran. ``splits`` CTAs compute a tile together, each over a
    range of K, where ``can_split``. ``swapped`` multiplies transposed, with the tile's rows in
    steps of 8 and its columns in steps of 64. ``across``: the tiles go in one order over all rows,
    not one chunk's after another's, so that those which share columns of B come together.
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
    swapped: bool = False
    across: bool = False

    @classmethod
    def of(
        cls, kernel: _core.KernelConfig, *, max_swizzle: int = 1, raster: str = "along_m"
    ) -> KernelConfig:
        """The config of a built kernel (`_core.KernelFacts.config`)."""
        given = {name: getattr(kernel, name) for name in _CORE_FIELDS}
        return cls(**given | {"max_swizzle": max_swizzle, "raster": raster})

    @classmethod
    def parse(cls, name: str) -> KernelConfig:
        """The inverse of ``name``; splits, swizzle and raster may be left out.

        Raises:
            ValueError: ``name`` is not of the form
                ``128x256x64_2x1_cooperative[/splitN][/swizzleN[/raster[/across]]]``.
        """
        found = _CONFIG_NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"config: found {name!r}, wanted a name such as "
                "128x256x64_2x1_cooperative/swizzle4/along_m"
            )
        given = {name: text for name, text in found.groupdict().items() if text is not None}
        return cls(**{name: _PARSED[_FIELD_TYPES[name]](text) for name, text in given.items()})

    @property
    def kernel(self) -> str:
        """The name of tile, cluster and schedule, which are compiled in."""
        variant = ("_swapped" if self.swapped else "") + ("_timed" if self.timed else "")
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
            f"_{self.cluster_m}x{self.cluster_n}_{self.schedule}{variant}"
        )

    @property
    def tile(self) -> str:
        """The name of the tile alone, and whether it is multiplied transposed."""
        return f"{self.tile_m}x{self.tile_n}" + ("_swapped" if self.swapped else "")

    @property
    def can_split(self) -> bool:
        """Whether several CTAs can compute a tile together."""
        return self.core.can_split

    @property
    def splits_in_cluster(self) -> bool:
        """Whether the CTAs that split K of a tile are a cluster, and add up in shared memory."""
        return self.core.splits_in_cluster

    @property
    def is_streaming(self) -> bool:
        """Whether it is a kernel for few rows, which reads B as fast as memory gives it. Its splits
        of K are those of B's size (`legality.legal_splits`)."""
        return self.core.is_streaming

    @property
    def can_push(self) -> bool:
        """Whether it has spare warps that send a shard (SM push)."""
        return self.core.can_push

    @property
    def stores_A(self) -> Sequence[str]:
        """The layouts of B with which the kernel can store A."""
        return self.core.stores_A

    @property
    def core(self) -> _core.KernelConfig:
        """The core's object for this config, which knows what such a kernel can do whether it is
        built or not."""
        return _of_core(self)

    @property
    def name(self) -> str:
        split = f"/split{self.splits}" if self.splits != 1 else ""
        across = "/across" if self.across else ""
        return f"{self.kernel}{split}/swizzle{self.max_swizzle}/{self.raster}{across}"


_FIELD_TYPES = {field.name: str(field.type) for field in fields(KernelConfig)}
_PARSED: dict[str, Callable[[str], Any]] = {"int": int, "str": str, "bool": bool}
"""The functions that turn a group of `_CONFIG_NAME` into a field of that type: a flag is there or
it is not."""


ALL_GATHER_MATMUL = "all_gather_matmul"
MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
MATMUL_ALL_REDUCE = "matmul_all_reduce"
MOE = "moe"
"""Both calls of a mixture of experts, which `agmm bench` times and which have no plan."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_rms_norm")
"""The ops without a matmul, which `agmm bench` times and `agmm explain` explains."""
NORMED = "matmul_all_reduce_rms_norm"
"""A matmul + all-reduce with residual and norm, which `agmm bench` times and `agmm explain`
explains; its sum has the plans of `MATMUL_ALL_REDUCE`."""
UNDIVIDED = (MATMUL_ALL_REDUCE, NORMED, *COLLECTIVES[2:])
"""The ops whose rows the ranks need not share equally."""
OPS = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
"""The ops whose kernels have timed variants, of which `agmm bench` records timelines."""
TUNED = (*OPS, MATMUL_ALL_REDUCE)
"""The ops whose plans are measured: those that `Problem.op` may name."""


@dataclass(frozen=True)
class Problem:
    """``out[m, n] = all_gather(A_shard)[m, k] @ B[k, n]``; m is the gathered row count. For the op
    "matmul_reduce_scatter" ``reduce_scatter(A[m, k] @ B[k, n])``, of which each rank gets
    ``[m / world_size, n]``, for "matmul_all_reduce" ``all_reduce(A[m, k] @ B[k, n])``.

    ``format`` is the name of a `formats.Format`. ``b_layout`` is ``"column"`` (a transposed
    ``[n, k]`` weight) or ``"row"``; ``gpu`` the name of `agmm.planning.tables.gpu_name`, or `CPU`;
    ``sm_count`` the multiprocessors for the matmul, 0 for all that the GPU's constants name;
    ``peer_atomics`` whether links carry out atomic additions. ``epilogue`` is the one that the
    kernel has, as `_core.KernelFacts.epilogue` says it; with ``"gate"`` n counts the columns of
    both weights.
    """

    m: int
    n: int
    k: int
    _: KW_ONLY
    op: str = ALL_GATHER_MATMUL
    format: str = "bfloat16"
    world_size: int = 1
    return_A: bool = False
    b_layout: str = "column"
    gpu: str = DEFAULT_GPU
    sm_count: int = 0
    peer_atomics: bool = True
    epilogue: str = PLAIN
