"""Tensor parallelism of torchtitan by agmm.

It is an override of torchtitan's own kind, which its trainer is given by name:

    torchrun ... -m torchtitan.train ... --override.imports agmm.integrations.torchtitan.by_agmm

It imports torchtitan.
"""

from __future__ import annotations

from agmm.integrations import async_tp
from agmm.integrations.clients import Client

__all__ = ["by_agmm"]

Client("torchtitan", (0, 3), (0, 3), "0.3.0").check()

from torchtitan.config import override  # noqa: E402
from torchtitan.tools.profiler import Profiler  # noqa: E402


# An override has to claim a part of the config. Who replaces the profiler as well is told so.
@override(  # type: ignore[untyped-decorator]
    target=Profiler.Config, description="agmm computes torch's fused ops of async TP"
)
def by_agmm(config: Profiler.Config) -> Profiler.Config:
    """Makes agmm compute torch's fused ops in this process, as `agmm.async_tp.enable`.

    torchtitan calls them in models with ``tp_gemm_backend="dist_gemm"``, and in graphs compiled
    with ``--compile.enable_async_tensor_parallel``. Nothing else changes: the part of the config
    that torchtitan has an override name, its profiler's, is given back as it is.

    Raises:
        InvalidArgument: at the import of this module, torchtitan is missing, or of a version that
            was not tried.
        AgmmError: this torch lacks one of the ops, or its schema is another one.
    """
    async_tp.enable()
    return config
