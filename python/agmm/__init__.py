"""Fused all-gather + matmul for tensor-parallel layers."""

from __future__ import annotations

import warnings as _warnings
from importlib.metadata import version as _version

from agmm import _core, async_tp
from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.memory import release, reserve, workspace_bytes
from agmm.ops import all_gather_matmul
from agmm.plan import KernelConfig
from agmm.reduce_scatter import matmul_reduce_scatter

__version__ = _version("agmm")

# A stale core has no such attribute; `agmm doctor` has to be able to say that it is stale.
if getattr(_core, "fault", ""):
    _warnings.warn(
        f"agmm is built with the deliberate fault {_core.fault}: results are wrong; reinstall it",
        RuntimeWarning,
        stacklevel=2,
    )

__all__ = [
    "AgmmError",
    "InvalidArgument",
    "KernelConfig",
    "Unsupported",
    "__version__",
    "all_gather_matmul",
    "async_tp",
    "matmul_reduce_scatter",
    "release",
    "reserve",
    "workspace_bytes",
]
