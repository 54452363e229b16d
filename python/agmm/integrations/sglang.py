"""Sequence parallelism of SGLang by agmm.

SGLang loads the entry point of `agmm_plugins` in its schedulers, and `enable` is called where
``AGMM_SGLANG=1``:

    AGMM_SGLANG=1 python -m sglang.launch_server --tp 4 --enable-layernorm-sp ...
"""

from __future__ import annotations

from agmm.integrations import async_tp
from agmm.integrations.clients import Client

__all__ = ["enable"]

_CLIENT = Client("sglang", (0, 5, 23), (0, 5, 23), "0.5.23")


def enable() -> None:
    """Makes agmm serve the linears of SGLang's sequence parallelism in this process.

    They call torch's fused ops by name, which agmm computes after this, as after
    `agmm.async_tp.enable`.

    Raises:
        InvalidArgument: sglang is missing, or of a version that was not tried.
        AgmmError: this torch lacks one of the ops, or its schema is another one.
    """
    _CLIENT.check()
    async_tp.enable()
