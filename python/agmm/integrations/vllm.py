"""Tensor parallelism of vLLM by agmm.

vLLM loads the entry point of `agmm_plugins` in all its processes, and `enable` is called where
``AGMM_VLLM=1``:

    AGMM_VLLM=1 vllm serve MODEL --tensor-parallel-size 4
"""

from __future__ import annotations

from agmm.integrations import async_tp
from agmm.integrations.clients import Client

__all__ = ["enable"]

_CLIENT = Client("vllm", (0, 31), (0, 33), "0.33.0")
_WITHOUT_PASS = 0, 32
"""The first version without the compiler pass that calls torch's fused ops."""


def enable() -> None:
    """Makes agmm serve vLLM's tensor parallelism in this process.

    From vLLM 0.32 on, its row-parallel linears multiply and sum by `agmm.matmul_all_reduce`. It
    holds for layers that are made afterwards. Linears with quantised weights, and all of them under
    ``VLLM_BATCH_INVARIANT``, stay with vLLM, with one warning that names the reason. In vLLM 0.31
    agmm computes the ops that ``fuse_gemm_comms`` puts into graphs, as after
    `agmm.async_tp.enable`.

    Raises:
        InvalidArgument: vllm is missing, or of a version that was not tried, or another plugin has
            replaced its row-parallel linears.
        AgmmError: this torch lacks one of the ops, or its schema is another one.
    """
    if _CLIENT.check() < _WITHOUT_PASS:
        async_tp.enable()
        return
    from agmm.integrations import vllm_linear

    vllm_linear.register()
