"""The words of a plan: plans, their names, and what tuning found. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transport_names import parse
from agmm.planning.transports import (
    BACKEND,
    GATHER,
    PORTABLE,
    STREAMED,
    TORCH,
    FusedGather,
    Gather,
    Transport,
)

__all__ = [
    "BEHIND_GATHER",
    "BY_COPIES",
    "BY_LIBRARY",
    "BY_STREAM",
    "BY_TORCH",
    "GATHERED",
    "NAMED",
    "UNFUSED",
    "KernelConfig",
    "Plan",
    "Problem",
    "Row",
    "parse_config",
]


@dataclass(frozen=True, init=False)
class Plan:
    """How a problem is computed.

    ``transport`` says how data moves between the ranks; it may be given by its name. ``kernel`` is
    the matmul's, None where it is not agmm's; behind a `Gather` of fp8 None leaves the choice of it
    to the planner of one rank. ``chunks_per_shard`` is the number of row chunks of each shard; more
    than 1 on the CPU only.
    """

    transport: Transport
    kernel: KernelConfig | None
    chunks_per_shard: int

    def __init__(
        self,
        transport: Transport | str,
        kernel: KernelConfig | None = None,
        chunks_per_shard: int = 1,
    ) -> None:
        found = parse(transport) if isinstance(transport, str) else transport
        object.__setattr__(self, "transport", found)
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "chunks_per_shard", chunks_per_shard)

    @property
    def gathers_first(self) -> bool:
        """Whether all rows of an all-gather -> matmul are there before they are multiplied."""
        return self.transport in (BACKEND, GATHER)

    @property
    def family(self) -> str:
        """The name that plans share whose predictions err alike: the transport's, and another one
        for agmm's gather before one of agmm's kernels."""
        family = self.transport.family
        return family if self.transport != GATHER or self.kernel is None else GATHERED_TO_KERNEL

    @property
    def name(self) -> str:
        parts = [self.transport.name]
        if self.kernel is not None:
            parts.append(self.kernel.name)
        if self.chunks_per_shard != 1:
            parts.append(f"{self.chunks_per_shard} chunks per shard")
        return ", ".join(parts)


GATHERED_TO_KERNEL = "gather to a kernel"
"""The `Plan.family` of agmm's gather before one of agmm's kernels."""

UNFUSED = Plan(BACKEND)
GATHERED = Plan(GATHER)
BY_TORCH = Plan(TORCH)
BY_COPIES = Plan(PORTABLE)
BY_STREAM = Plan(STREAMED)
"""The plan of a streaming kernel that a call without a plan of its own chooses by its operands."""
BY_LIBRARY = (UNFUSED, GATHERED)
"""The plans of an all-gather -> matmul that name no kernel and multiply all rows at once."""
BEHIND_GATHER = (GATHER, STREAMED)
"""The transports whose matmul, of an all-gather -> matmul, comes behind agmm's gather."""
NAMED = (*BY_LIBRARY, BY_COPIES, BY_STREAM)
"""The plans that a config names as a whole."""


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


def parse_config(config: str) -> tuple[KernelConfig | None, Transport | None]:
    """Parse kernel and transport of a config: a kernel's name, and perhaps ``/push``, ``/pull``,
    ``/gather`` or the name of an `SmPush`; or the name of a plan of `NAMED`. None where the config
    leaves it open; the empty one leaves both open.

    Raises:
        ValueError: it is neither such a plan's name, nor a kernel's, nor one followed by a
            transport.
    """
    if not config:
        return None, None
    for plan in NAMED:
        if config == plan.name:
            return None, plan.transport
    kernel, slash, name = config.rpartition("/")
    transport = parse(name)
    if slash and isinstance(transport, FusedGather | Gather):
        return KernelConfig.parse(kernel), transport
    return KernelConfig.parse(config), None
