"""The ranks that share a layer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.runtime.groups import group_of, group_or_default, world_size_of

# The meshes of groups that were given without one, by type of device; they end with their group.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


def check_one_dimension(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise InvalidArgument(
            f"device_mesh: found {mesh.ndim} dimensions, wanted 1, e.g. mesh['tp']"
        )


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh of one dimension, of which this rank is a member."""
    check_one_dimension(mesh)
    if mesh.get_coordinate() is None:
        raise InvalidArgument(
            f"device_mesh: found {mesh}, which this rank {dist.get_rank()} is not in"
        )
    return mesh.get_group()


def resolved(group: dist.ProcessGroup | DeviceMesh | str | None) -> dist.ProcessGroup:
    """The group that was given as such, by its name or as a mesh; the default group for None.

    Raises:
        InvalidArgument: it is none of these, or this rank is not in it.
    """
    if isinstance(group, DeviceMesh):
        return group_of_mesh(group)
    given: Any = group  # new_group returns a number in ranks that are not in it
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            f"group: found one which this rank {dist.get_rank()} is not in "
            "(torch.distributed.new_group returned GroupMember.NON_GROUP_MEMBER)"
        )
    found = group_or_default(group)
    if isinstance(found, str):
        return group_of(found)
    if dist.get_rank(found) < 0:
        raise InvalidArgument(
            f"group: found {found.group_name!r}, which this rank {dist.get_rank()} is not in"
        )
    return found


class Ranks:
    """A group by its name, and the mesh that describes it. What it says is looked up when it is
    used: a copy in another process finds that process's rank."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | str | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        if device_mesh is not None and group is not None:
            raise InvalidArgument("device_mesh: found one beside a group, wanted one of the two")
        self._given = group if isinstance(group, DeviceMesh) else device_mesh
        self.group_name = str(resolved(group if self._given is None else self._given).group_name)

    @property
    def rank(self) -> int:
        return dist.get_rank(group_of(self.group_name))

    @property
    def size(self) -> int:
        return world_size_of(self.group_name)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh that was given, or one of the group for tensors on such a device."""
        if self._given is not None:
            return self._given
        group = group_of(self.group_name)
        kind = _meta_stands_for(group) if device.type == "meta" else device.type
        meshes = _meshes.setdefault(group, {})
        if kind not in meshes:
            meshes[kind] = DeviceMesh.from_group(group, kind)
        return meshes[kind]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A mesh keeps the coordinates of the rank that made it.
        return Ranks, (self.group_name, None)


def _meta_stands_for(group: dist.ProcessGroup) -> str:
    kinds = {device.type for device in group._device_types}
    return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
