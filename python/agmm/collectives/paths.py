"""Which path a collective takes: the one place where that is chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import Unsupported, warn_once
from agmm.ops.checks import FLOATS
from agmm.ops.small_collectives import SUMMED
from agmm.planning.cost_model.collectives import (
    MOST_BYTES,
    MOST_RANKS,
    Kind,
    Method,
    collective_method,
)
from agmm.runtime import capabilities, symmetric

SHARED_MEMORY = "shared memory"
"""agmm's, between the processes of a host."""
SYMMETRIC_MEMORY = "symmetric memory"
"""agmm's kernels, between the GPUs of a host."""
COPY_ENGINES = "copy engines"
"""agmm's copies through symmetric memory, between the GPUs of a host."""
TORCH = "torch's collective"
"""The collective of the group's backend: NCCL, gloo."""


class Path(NamedTuple):
    by: str
    """`SHARED_MEMORY`, `SYMMETRIC_MEMORY`, `COPY_ENGINES` or `TORCH`."""
    reason: str
    """Why torch's; empty for agmm's own."""
    is_choice: bool = False
    """Whether torch's is what is meant to serve such calls, so that nobody is warned."""
    method: Method | None = None
    """The method of agmm's kernel."""


def choose(
    kind: Kind,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    strict: bool = False,
    low_contention: bool = False,
) -> Path:
    """The path of a collective of more than one rank and more than no element. The same on all
    ranks, as long as they call with the same shapes and dtypes. Collective at first use on GPUs.

    Args:
        x: what this rank sends.
        strict: leave out what torch is the choice for.
        low_contention: on GPUs by copies rather than by kernels.
    """
    if x.device.type == "cpu":
        reason = _why_not_in_shared_memory(kind, x)
        return Path(SHARED_MEMORY, "") if reason is None else Path(TORCH, reason)
    if x.device.type != "cuda":
        return Path(TORCH, f"x: device {x.device}, agmm's own collectives want cpu or cuda")
    if low_contention:
        reason = _why_not_summed(kind, x)
        return Path(COPY_ENGINES, "") if reason is None else Path(TORCH, reason)
    world_size = group.size()
    nbytes = x.nbytes * world_size if kind == "all_gather" else x.nbytes
    if nbytes > MOST_BYTES and not strict:
        reason = f"{kind}: {nbytes} bytes, torch's is taken for more than {MOST_BYTES}"
        return Path(TORCH, reason, is_choice=True)
    reason = _why_not_by_kernel(kind, x, group)
    if reason is not None:
        return Path(TORCH, reason)
    return Path(SYMMETRIC_MEMORY, "", method=collective_method(kind, nbytes, world_size))


def _why_not_by_kernel(kind: Kind, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    if group.size() > MOST_RANKS:
        return f"group: {group.size()} ranks, agmm's kernels serve at most {MOST_RANKS}"
    return _why_not_summed(kind, x) or symmetric.why_group_unfused(
        group, x.device, capabilities.COLLECTIVES
    )


def _why_not_summed(kind: Kind, x: torch.Tensor) -> str | None:
    if kind != "all_gather" and x.dtype not in SUMMED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
        return f"x: dtype={x.dtype}, agmm's kernels sum {names}"
    return None


def _why_not_in_shared_memory(kind: Kind, x: torch.Tensor) -> str | None:
    if kind != "all_gather" and x.dtype not in FLOATS:
        return f"x: dtype={x.dtype}, agmm sums floating-point types of 2 to 8 bytes"
    return None


def leave_to_torch(kind: Kind, path: Path, strict: bool) -> None:
    """Raises Unsupported if strict, else warns of each reason once in a process, where torch's
    collective is no choice."""
    if strict:
        raise Unsupported(f"{path.reason}; strict=True refuses torch's collective")
    if not path.is_choice:
        warn_once(f"agmm leaves {kind} to torch: {path.reason}")
