"""Whether the links between GPUs carry out atomic additions, which SM push needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from agmm import _core
from agmm.runtime import devices


@cache
def uuid(index: int) -> str:
    """The UUID of a GPU that this process sees, as NVML names it."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


@cache
def visible() -> dict[str, int]:
    """The index of each GPU that this process sees, by UUID."""
    return {uuid(index): index for index in range(torch.cuda.device_count())}


def why_no_atomics(own: str, peers: Iterable[str]) -> str | None:
    """The reason why a GPU cannot add to words in its peers' memory, or None. All by UUID.

    NVLink does it natively. A link that does not would lose additions, or refuse them. The driver
    is asked of GPUs that this process sees, NVML of the others on this host.
    """
    for peer in peers:
        if peer == own:
            continue
        indices = visible()
        if own in indices and peer in indices:
            found: bool | None = _core.peer_atomics(indices[own], indices[peer])
        else:
            found = devices.have_atomics(own, peer)
        if found is None:
            unknown = devices.why_unknown() or "NVML does not know them"
            return f"whether the link from {own} to {peer} has native atomics is unknown: {unknown}"
        if not found:
            return f"the link from {own} to {peer} has no native atomics"
    return None


def pairs_without_atomics() -> list[tuple[int, int]]:
    """The pairs among the GPUs that this process sees whose links have none."""
    count = torch.cuda.device_count()
    return [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and not _core.peer_atomics(a, b)
    ]
