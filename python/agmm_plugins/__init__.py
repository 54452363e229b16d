"""Entry points that serving frameworks load in each of their processes.

They lie outside of `agmm`, which imports torch. Where the variable of a plugin is not set, nothing
is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

__all__ = ["sglang", "vllm"]


def sglang() -> None:
    """Calls `agmm.integrations.sglang.enable` where ``AGMM_SGLANG=1``."""
    _start("AGMM_SGLANG", "agmm.integrations.sglang")


def vllm() -> None:
    """Calls `agmm.integrations.vllm.enable` where ``AGMM_VLLM=1``."""
    _start("AGMM_VLLM", "agmm.integrations.vllm")


def _start(variable: str, module: str) -> None:
    """Calls ``enable`` of the module where the variable is on. It never raises: a framework that
    has loaded a plugin goes on without it, and one warning says why."""
    value = os.environ.get(variable) or "0"
    if value == "0":
        return
    try:
        if value != "1":
            raise ValueError(f"{variable}: found {value!r}, wanted '1' or '0'")
        importlib.import_module(module).enable()
    except Exception as error:
        message = f"agmm does not serve this process: {error}"
        try:
            warnings.warn(message, stacklevel=3)
        except Warning:  # the process makes errors of warnings
            print(message, file=sys.stderr)
