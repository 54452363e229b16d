"""The words of a plan: transports, plans and their names. Problems and kernel configs, which the
cost model needs to rate a plan, are in `problems` and can be imported from here as well. This
module needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from agmm.planning.problems import (
    ALIGNMENT,
    ALL_GATHER_MATMUL,
    CPU,
    DEFAULT_GPU,
    FUSED_DTYPES,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MAX_CHUNKS_PER_SHARD,
    MAX_CLUSTER_SPLITS,
    MAX_COLUMN_CHUNKS,
    MAX_PUSH_PARTS,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    MAX_SIZE,
    NUMBER,
    OPS,
    RASTERS,
    SWIZZLES,
    KernelConfig,
    Problem,
)

__all__ = [
    "ALIGNMENT",
    "ALL_GATHER_MATMUL",
    "BY_TORCH",
    "CPU",
    "DEFAULT_GPU",
    "FUSED_DTYPES",
    "GATHERED",
    "LAGGED",
    "MATMUL_ALL_REDUCE",
    "MATMUL_REDUCE_SCATTER",
    "MAX_CHUNKS_PER_SHARD",
    "MAX_CLUSTER_SPLITS",
    "MAX_COLUMN_CHUNKS",
    "MAX_PUSH_PARTS",
    "MAX_PUSH_RANKS",
    "MAX_SCATTER_TILES",
    "MAX_SIZE",
    "OPS",
    "RASTERS",
    "SCATTER",
    "SWIZZLES",
    "UNFUSED",
    "KernelConfig",
    "Plan",
    "Problem",
    "Row",
    "SmPush",
    "core_transport",
    "parse_config",
]

_SM_PUSH_NAME = re.compile(rf"sm({NUMBER})x([1-9][0-9]{{0,8}})(?:\+({NUMBER})|h({NUMBER}))?")


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
        """Parse a ``name``; None for every other string."""
        found = _SM_PUSH_NAME.fullmatch(name)
        return None if found is None else cls(*(int(v or 0) for v in found.groups()))

    @property
    def name(self) -> str:
        first = f"+{self.first_peers}" if self.first_peers else ""
        head = f"h{self.head_chunks}" if self.head_chunks else ""
        return f"sm{self.parts}x{self.chunk_columns}{first}{head}"

    def has_ctas(self, k: int) -> bool:
        """Whether CTAs of their own push some of K columns."""
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


@dataclass(frozen=True)
class Plan:
    """How a problem is computed.

    ``transport`` is ``"push"`` or ``"pull"`` (copy engine; on the CPU ``"push"`` by the copy
    thread), the name of an `SmPush`, ``"unfused"``: all-gather, then matmul, or matmul, then
    reduce-scatter or all-reduce, by the group's backend and the library, ``"gather"``: all-gather
    by agmm's kernel, then the library's matmul, or ``"torch"``: torch's fused matmul +
    reduce-scatter. The kernel of a "matmul_reduce_scatter" on a GPU pushes tiles. A
    "matmul_all_reduce" is ``"lagged"``: by one kernel, or ``"scatter"``: by one that scatters, and
    an all-gather of the result. ``kernel`` is the matmul's, None where it is not agmm's.
    ``chunks_per_shard`` is the number of row chunks of each shard; more than 1 on the CPU only.
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
GATHERED = Plan("gather")
BY_TORCH = Plan("torch")
LAGGED, SCATTER = "lagged", "scatter"
"""Transports of a "matmul_all_reduce" by kernels."""


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


def parse_config(config: str) -> tuple[KernelConfig | None, str | None]:
    """Parse kernel and transport of a config: a kernel's name, and perhaps ``/push``, ``/pull`` or
    the name of an `SmPush`. None where the config leaves it open; the empty one leaves both open.

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


def core_transport(transport: str) -> tuple[int, int, int, int, int]:
    """The transport as the tuple that `_core.GatherProblem` takes."""
    sm_push = SmPush.parse(transport)
    if sm_push is not None:
        return 2, *sm_push
    return int(transport == "pull"), 0, 0, 0, 0
