"""Fused all-gather + matmul for tensor-parallel layers."""

from __future__ import annotations

import warnings as _warnings
from importlib.metadata import version as _version

from agmm import _installation

if not _installation.is_light_command():
    try:
        # torch comes first: the core then takes torch's libraries, and what torch lacks is not
        # blamed on the core.
        import torch as _torch  # noqa: F401

        from agmm import _core, async_tp, collectives, moe
        from agmm.errors import AgmmError, InvalidArgument, Unsupported
        from agmm.ops.all_gather_matmul import all_gather_matmul
        from agmm.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
        from agmm.ops.grouped_matmuls import (
            all_gather_grouped_matmul,
            grouped_matmul_reduce_scatter,
        )
        from agmm.ops.learning import learn_plans
        from agmm.ops.matmul_all_reduce import matmul_all_reduce
        from agmm.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
        from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter
        from agmm.ops.recordings import record
        from agmm.ops.scaled_matmul_all_reduce import scaled_matmul_all_reduce
        from agmm.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
        from agmm.ops.status import Status, status
        from agmm.planning.problems import KernelConfig
        from agmm.runtime.group_gpus import reserve_sms
        from agmm.runtime.memory import release, reserve, workspace_bytes
        from agmm.runtime.nan_check import check_nan
        from agmm.runtime.packed import Packed4BitWeight

        __version__ = _version("agmm")
    except (Exception, KeyboardInterrupt) as _error:
        # The commands have to be imported nevertheless: they say in a line what is wrong.
        if not _installation.is_command():
            raise
        _installation.import_error = _error
    else:
        if getattr(_core, "fault", ""):  # a stale core has no such attribute
            _warnings.warn(
                f"agmm is built with the deliberate fault {_core.fault}: results are wrong; "
                "reinstall it",
                RuntimeWarning,
                stacklevel=2,
            )

__all__ = [
    "AgmmError",
    "InvalidArgument",
    "KernelConfig",
    "Packed4BitWeight",
    "Status",
    "Unsupported",
    "__version__",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "async_tp",
    "check_nan",
    "collectives",
    "grouped_matmul_reduce_scatter",
    "learn_plans",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "moe",
    "record",
    "release",
    "reserve",
    "reserve_sms",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "status",
    "workspace_bytes",
]
