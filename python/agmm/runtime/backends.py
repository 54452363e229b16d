"""What the backend of a group can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from agmm.errors import InvalidArgument
from agmm.runtime import identity

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FAKE = "fake"
"""torch's backend of dry runs, whose collectives return at once and move nothing."""


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether it is a group of a dry run (`FAKE`), in which ops leave everything to torch's
    collectives: nobody answers, so nothing may be exchanged or awaited."""
    return _world.pg_map.get(group, ("", None))[0] == FAKE


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Checks the backend before tensors on a device are handed to it, but for a plain all-reduce.

    Raises:
        InvalidArgument: it takes none on that device: torch's functional collectives end the
            process where gloo is given a GPU's.
    """
    if device.type != "cuda":  # of others torch says in its own words
        return
    config = dist.get_backend_config(group)
    parts = (part.rpartition(":") for part in config.split(","))
    name = next((name for on, _, name in parts if on in ("", device.type)), "none")
    if name in ("gloo", "none"):
        raise InvalidArgument(
            f"group: found backend {name} for tensors on {device}, wanted one that takes them, "
            "such as nccl, since this call is left to the backend"
        )


def check_movable(tensor: DTensor) -> None:
    """Checks that torch can gather a DTensor, or divide it otherwise.

    Raises:
        InvalidArgument: a group of its mesh has been destroyed, or has a backend that would end
            the process (`check_backend`).
    """
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        group = identity.group_of_mesh(mesh, dim)
        if not placement.is_replicate() and group.size() > 1:
            check_backend(group, tensor.device)


def whole_of(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, gathered by torch. Collective. Raises as `check_movable`."""
    check_movable(tensor)
    return tensor.full_tensor()
