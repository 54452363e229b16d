"""What Python asks of the NVIDIA driver and its management library, by NVIDIA's own bindings.

No other module asks them what torch and the core cannot say. No op needs an answer: where the
bindings (the extra `cuda`) or the driver are missing, or do not know a GPU, it is None, and
`why_unknown` says what is missing. GPUs are named by their UUIDs, since other processes may see
them in another order. Loads without torch and without the core.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agmm._installation import how_to_get

_T = TypeVar("_T")

KERNEL_MODULE = Path("/proc/driver/nvidia/version")

# The numbers are those of NVML's C header; the names that the bindings give them have changed
# between their versions.
OK = 0
P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_ATOMICS = range(4)
NVLINK_IS_ACTIVE = 1
SM_CLOCK = 1
_NVLINK_ENDS = {0: "gpu", 1: "cpu", 2: "switch"}
PCIE_WAYS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def nvml() -> Any:
    """The module of the bindings; None where it is not installed, or older than its NVML."""
    try:
        return importlib.import_module("cuda.bindings.nvml")
    except ImportError:
        return None


def why_unknown() -> str | None:
    """The reason why NVML cannot be asked, or None."""
    if nvml() is None:
        return f"no cuda-bindings with NVML is installed ({how_to_get('cuda')} brings one)"
    return None if _ask(lambda _: True) else "the driver's NVML does not load"


def driver_version() -> str | None:
    """The version of the NVIDIA driver, from NVML or from the kernel module; None where unknown."""
    said = _ask(lambda nvml: str(nvml.system_get_driver_version()))
    if said is not None:
        return said
    try:
        line = KERNEL_MODULE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", line)
    return None if found is None else found.group(1)


def have_atomics(uuid: str, peer: str) -> bool | None:
    """Whether one GPU's additions to words in the other's memory are atomic there."""

    def read(nvml: Any) -> bool:
        handles = [nvml.device_get_handle_by_uuid(name) for name in (uuid, peer)]
        return int(nvml.device_get_p2p_status(*handles, P2P_ATOMICS)) == OK

    return _ask(read)


def active_nvlinks(uuid: str) -> int | None:
    """How many NVLinks of a GPU are active."""

    return _ask(lambda nvml: len(_active(nvml, nvml.device_get_handle_by_uuid(uuid))))


def links_of(uuid: str, peers: Iterable[str]) -> dict[str, Any] | None:
    """What NVML knows of a GPU's links, as `topology.matrix_of` takes it.

    Args:
        peers: other GPUs of this host by UUID; those that NVML does not know here are left out.

    Returns:
        "bus": its place on PCIe. "nvlinks": for each active one what is at the other end ("gpu",
        "switch", "cpu" or "unknown") and its place. By peer: "pcie" (PIX, PXB, PHB, NODE or SYS),
        "peer" (whether it reaches that one's memory) and "nvlink_peer" (whether over NVLink).
        None where NVML cannot be asked.
    """

    def read(nvml: Any) -> dict[str, Any]:
        handle = nvml.device_get_handle_by_uuid(uuid)
        ends = [_other_end(nvml, handle, link) for link in _active(nvml, handle)]
        found: dict[str, Any] = {"bus": _place(nvml.device_get_pci_info_v3(handle))}
        found |= {"nvlinks": ends, "pcie": {}, "peer": {}, "nvlink_peer": {}}
        for name in peers:
            peer = _or_none(partial(nvml.device_get_handle_by_uuid, name))
            if name == uuid or peer is None:  # hidden from this process
                continue
            level = _or_none(partial(nvml.device_get_topology_common_ancestor, handle, peer))
            found["pcie"][name] = "" if level is None else PCIE_WAYS.get(int(level), "")
            found["peer"][name] = _can(nvml, handle, peer, P2P_READ, P2P_WRITE)
            found["nvlink_peer"][name] = _can(nvml, handle, peer, P2P_NVLINK)
        return found

    return _ask(read)


def _can(nvml: Any, handle: Any, peer: Any, *what: int) -> bool | None:
    """Whether one GPU can do all that to another; None where NVML does not say."""
    found: list[Any]
    found = [_or_none(partial(nvml.device_get_p2p_status, handle, peer, each)) for each in what]
    return None if None in found else [int(status) for status in found] == [OK] * len(what)


def _active(nvml: Any, handle: Any) -> list[int]:
    """The numbers of a GPU's active NVLinks."""
    active = []
    for link in range(int(nvml.NVLINK_MAX_LINKS)):
        state = _or_none(partial(nvml.device_get_nvlink_state, handle, link))
        if state is None:  # it has no more links
            break
        if int(state) == NVLINK_IS_ACTIVE:
            active.append(link)
    return active


def _other_end(nvml: Any, handle: Any, link: int) -> tuple[str, str]:
    """What is at the other end of an NVLink, and where. In virtual machines it may be hidden."""
    kind = _or_none(partial(nvml.device_get_nvlink_remote_device_type, handle, link))
    pci = _or_none(partial(nvml.device_get_nvlink_remote_pci_info_v2, handle, link))
    end = "unknown" if kind is None else _NVLINK_ENDS.get(int(kind), "unknown")
    return end, "" if pci is None else _place(pci)


def _place(pci: Any) -> str:
    """A device's place on PCIe in one spelling, such as 00000000:07:00.0."""
    found = pci.bus_id
    return (found.decode() if isinstance(found, bytes) else str(found)).strip("\0").lower()


_PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""What one lane of PCIe moves in one direction, by generation, behind its encoding."""


def ways_out(index: int) -> tuple[int, float]:
    """How many NVLinks of the first GPUs of this host are active, by the order of NVML, and the
    GB/s of its PCIe slot in one direction; zeros for what NVML does not say."""

    def read(nvml: Any) -> tuple[int, float]:
        handle = nvml.device_get_handle_by_index_v2(index)
        generation = _or_none(partial(nvml.device_get_max_pcie_link_generation, handle))
        lanes = _or_none(partial(nvml.device_get_max_pcie_link_width, handle))
        slot = _PCIE_GB_PER_S.get(int(generation or 0), 0.0) * int(lanes or 0)
        return len(_active(nvml, handle)), slot

    return _ask(read) or (0, 0.0)


def sm_clock_mhz(uuid: str) -> int | None:
    """The present clock of a GPU's multiprocessors."""
    return _ask(
        lambda nvml: int(nvml.device_get_clock_info(nvml.device_get_handle_by_uuid(uuid), SM_CLOCK))
    )


def _or_none(ask: Callable[[], _T]) -> _T | None:
    """The answer of NVML; None for an error, which here means that it has no answer."""
    try:
        return ask()
    except Exception:
        return None


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
        return _or_none(lambda: read(module))
    finally:
        module.shutdown()
