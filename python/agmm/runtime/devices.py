"""What Python asks of the NVIDIA driver and its management library, by NVIDIA's own bindings.

No other module asks them what torch and the core cannot say. No op needs an answer: where the
bindings (the extra `cuda`) or the driver are missing, or do not know a GPU, it is None, and
`why_unknown` says what is missing. GPUs are named by their UUIDs, since other processes may see
them in another order. Loads without torch and without the core.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agmm._installation import how_to_get

_T = TypeVar("_T")

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")

# Of NVML's C header; what the bindings call these has changed between their versions.
_OK = 0
_P2P_ATOMICS = 3
_NVLINK_IS_ACTIVE = 1
_SM_CLOCK = 1


def nvml() -> Any:
    """The bindings' module; None where it is not installed, or older than its NVML."""
    try:
        return importlib.import_module("cuda.bindings.nvml")
    except ImportError:
        return None


def why_unknown() -> str | None:
    """Why NVML cannot be asked, or None."""
    if nvml() is None:
        return f"no cuda-bindings with NVML is installed ({how_to_get('cuda')} brings one)"
    return None if _ask(lambda _: True) else "the driver's NVML does not load"


def driver_version() -> str | None:
    """As NVML states it, or the kernel module."""
    said = _ask(lambda nvml: str(nvml.system_get_driver_version()))
    if said is not None:
        return said
    try:
        line = _KERNEL_MODULE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", line)
    return None if found is None else found.group(1)


def have_atomics(uuid: str, peer: str) -> bool | None:
    """Whether one GPU's additions to words in the other's memory are atomic there."""

    def read(nvml: Any) -> bool:
        handles = [nvml.device_get_handle_by_uuid(name) for name in (uuid, peer)]
        return int(nvml.device_get_p2p_status(*handles, _P2P_ATOMICS)) == _OK

    return _ask(read)


def active_nvlinks(uuid: str) -> int | None:
    """How many NVLinks of a GPU are active."""

    def read(nvml: Any) -> int:
        handle = nvml.device_get_handle_by_uuid(uuid)
        active = 0
        for link in range(int(nvml.NVLINK_MAX_LINKS)):
            try:
                state = int(nvml.device_get_nvlink_state(handle, link))
            except Exception:  # it has no more links
                break
            active += state == _NVLINK_IS_ACTIVE
        return active

    return _ask(read)


def sm_clock_mhz(uuid: str) -> int | None:
    """The present clock of a GPU's multiprocessors."""
    return _ask(
        lambda nvml: int(
            nvml.device_get_clock_info(nvml.device_get_handle_by_uuid(uuid), _SM_CLOCK)
        )
    )


def _ask(read: Callable[[Any], _T]) -> _T | None:
    """What ``read`` finds out. The bindings raise errors of many classes, which all mean here that
    it is not known."""
    module = nvml()
    if module is None:
        return None
    try:
        module.init_v2()
    except Exception:
        return None
    try:
        return read(module)
    except Exception:
        return None
    finally:
        module.shutdown()
