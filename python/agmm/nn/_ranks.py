"""The ranks that share a layer."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.runtime import backends, groups, identity
from agmm.runtime.groups import group_of, group_or_default

# The meshes of groups that were given without one, by type of device; they end with their group.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()
_SAMPLES = 4096


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
    return identity.group_of_mesh(mesh, 0)


def ascending(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, or one of the same group whose ranks ascend as they do in the group.

    torch cuts a tensor by the coordinates in a mesh, and joins it by the ranks in the group: over
    ranks in another order it would come back permuted.

    Raises:
        InvalidArgument: the mesh has several dimensions, and its ranks do not ascend along each.
    """
    ranks = mesh.mesh
    if all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim())):
        return mesh
    if mesh.ndim > 1:
        raise InvalidArgument(f"device_mesh: found {mesh}, wanted ranks that ascend")
    return mesh_of(group_of_mesh(mesh), mesh.device_type)


def mesh_of(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The mesh of a group that was given without one."""
    meshes = _meshes.setdefault(group, {})
    if device_type not in meshes:
        identity.check_alive(group)
        meshes[device_type] = DeviceMesh.from_group(group, device_type)
    return meshes[device_type]


def resolved(group: dist.ProcessGroup | DeviceMesh | str | None) -> dist.ProcessGroup:
    """The group that was given as such, by its name or as a mesh; the default group for None.

    Raises:
        InvalidArgument: it is none of these, it has been destroyed, or this rank is not in it.
    """
    if isinstance(group, DeviceMesh):
        return group_of_mesh(group)
    given: Any = group  # new_group returns a number in ranks that are not in it
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            f"group: found one which this rank {dist.get_rank()} is not in "
            "(torch.distributed.new_group returned GroupMember.NON_GROUP_MEMBER)"
        )
    named = group_or_default(group)
    found = group_of(named) if isinstance(named, str) else named
    identity.check_alive(found)
    if dist.get_rank(found) < 0:
        raise InvalidArgument(
            f"group: found {found.group_name!r}, which this rank {dist.get_rank()} is not in"
        )
    return found


class Ranks:
    """The group that layers and styles were made for, and the mesh that describes it.

    The group itself, since its name may belong to another group once it has been destroyed. A
    pickled one is found again by its name, so a copy in another process has that process's rank.

    Attributes:
        group_name: that torch knows.
        own_name: that no other group of this process has, for ops; see `groups.Group`.
        rank: of this process in the group.
        size: of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | str | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        if device_mesh is not None and group is not None:
            raise InvalidArgument("device_mesh: found one beside a group, wanted one of the two")
        given = group if isinstance(group, DeviceMesh) else device_mesh
        self._given = None if given is None else ascending(given)
        self._group = resolved(group if self._given is None else self._given)
        self.group_name = str(self._group.group_name)
        self.own_name = groups.of(self._group).own_name
        self.rank = dist.get_rank(self._group)
        self.size = self._group.size()

    @property
    def for_ops(self) -> dist.ProcessGroup | str:
        """What the ops take, which refuse it once the group has been destroyed: the group, or in a
        trace, to which a group is a stand-in, its own name."""
        return self.own_name if torch.compiler.is_compiling() else self._group

    def check_alive(self) -> None:
        """Raises InvalidArgument where the group has been destroyed."""
        identity.check_alive(self._group)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh that was given, or one of the group for tensors on such a device."""
        if self._given is not None:
            return self._given
        kind = _meta_stands_for(self._group) if device.type == "meta" else device.type
        return mesh_of(self._group, kind)

    def hold_the_same(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all ranks gave the same values, judged by samples. Collective."""
        tensors = [tensor.detach() for tensor in tensors]
        if any(type(tensor) is not torch.Tensor or tensor.is_meta for tensor in tensors):
            return False
        if backends.is_fake(self._group):  # the others are not there
            return False
        digest = hashlib.blake2b()
        for tensor in tensors:
            values = tensor.reshape(-1)
            step = -(-values.numel() // _SAMPLES) or 1
            sample = values[::step].contiguous().view(torch.uint8)
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(bytes(sample.tolist()))
        topic = "whether they load parts of a layer or the whole of another"
        return len(set(groups.of(self._group).exchange(topic, digest.hexdigest()))) == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A mesh keeps the coordinates of the rank that made it.
        return _found_again, (self.group_name, self.size)


def _found_again(group_name: str, size: int) -> Ranks:
    """The ranks that were pickled, in the group of that name in this process."""
    try:
        ranks = Ranks(group_name, None)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}, as what was pickled had it") from None
    if ranks.size != size:
        raise InvalidArgument(
            f"group: found {group_name!r} with {ranks.size} ranks, wanted {size} as what was "
            "pickled was made for"
        )
    return ranks


def _meta_stands_for(group: dist.ProcessGroup) -> str:
    kinds = {device.type for device in group._device_types}
    return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
