"""Which path a collective takes: the one place where that is chosen."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import torch

from agmm.errors import Unsupported
from agmm.ops.checks import FLOATS
from agmm.ops.paths import levels_to_caller

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
SHARED_MEMORY = "shared memory"
"""agmm's, between the processes of a host."""
TORCH = "torch's collective"
"""By the group's backend: NCCL, gloo."""


class Path(NamedTuple):
    by: str
    """`SHARED_MEMORY` or `TORCH`."""
    reason: str
    """Why torch's; empty for agmm's own."""
    is_choice: bool = False
    """Whether torch's is what is meant to serve such calls, so that nobody is warned."""


def choose(kind: Kind, x: torch.Tensor) -> Path:
    """The path of a collective of more than one rank and more than no element. The same on all
    ranks, as long as they call with the same shapes and dtypes.

    Args:
        x: what this rank sends.
    """
    if x.device.type == "cpu":
        reason = _why_not_in_shared_memory(kind, x)
        return Path(SHARED_MEMORY, "") if reason is None else Path(TORCH, reason)
    if x.device.type == "cuda":
        return Path(TORCH, f"{kind}: agmm has no kernel of it on CUDA as yet", is_choice=True)
    return Path(TORCH, f"x: device {x.device}, agmm's own collectives want cpu")


def _why_not_in_shared_memory(kind: Kind, x: torch.Tensor) -> str | None:
    if kind != "all_gather" and x.dtype not in FLOATS:
        return f"x: dtype={x.dtype}, agmm sums floating-point types of 2 to 8 bytes"
    return None


_warned: set[str] = set()


def leave_to_torch(kind: Kind, path: Path, strict: bool) -> None:
    """Raises Unsupported if strict, else warns of each reason once in a process, where torch's
    collective is no choice."""
    if strict:
        raise Unsupported(f"{path.reason}; strict=True refuses torch's collective")
    if not path.is_choice and path.reason not in _warned:
        _warned.add(path.reason)
        warnings.warn(f"agmm leaves {kind} to torch: {path.reason}", stacklevel=levels_to_caller())
