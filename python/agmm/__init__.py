"""Fused all-gather + matmul for tensor-parallel layers."""

from __future__ import annotations

from importlib.metadata import version as _version

from agmm import async_tp
from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.ops import all_gather_matmul
from agmm.plan import KernelConfig
from agmm.reduce_scatter import matmul_reduce_scatter

__version__ = _version("agmm")

__all__ = [
    "AgmmError",
    "InvalidArgument",
    "KernelConfig",
    "Unsupported",
    "__version__",
    "all_gather_matmul",
    "async_tp",
    "matmul_reduce_scatter",
]
