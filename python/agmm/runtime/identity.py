"""Which group object a name or a mesh means: torch finds groups by their names, and gives the name
of a destroyed group to a later one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from agmm import _env
from agmm.errors import AgmmError, InvalidArgument

_PREFIX = "agmm:"
_by_own_name: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
_numbers: dict[str, int] = {}  # how many groups of each name there have been


def new_own_name(group: dist.ProcessGroup) -> str:
    """A name that no other group object of this process gets: agmm:NUMBER:RANKS:NAME. It is the
    same in every run of a program, so that compiled graphs on disk are found again."""
    name = group.group_name
    number = _numbers[name] = _numbers.get(name, 0) + 1
    own_name = f"{_PREFIX}{number}:{group.size()}:{name}"
    _by_own_name[own_name] = group
    return own_name


def is_own_name(group_name: str) -> bool:
    return group_name.startswith(_PREFIX)


def ranks_of(own_name: str) -> int:
    """The size of the group, which a trace takes for a constant."""
    return int(own_name.split(":", 3)[2])


def backend_name(group_name: str) -> str:
    """The name that torch knows, of a group by its name or its own name."""
    return group_name.split(":", 3)[3] if is_own_name(group_name) else group_name


def by_own_name(own_name: str) -> dist.ProcessGroup | None:
    return _by_own_name.get(own_name)


def destroyed() -> InvalidArgument:
    return InvalidArgument(
        "group: found a destroyed one (torch.distributed.destroy_process_group), wanted one in use"
    )


def check_alive(group: dist.ProcessGroup) -> None:
    """Raises InvalidArgument for a group that has been destroyed."""
    if group in _world.pg_map:  # of those in use; one look, on the way of every call
        return
    try:
        dist.get_rank(group)
    except ValueError:
        raise destroyed() from None


def group_of_mesh(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    """The group of this rank along a dimension of a mesh. Raises InvalidArgument where it has been
    destroyed."""
    if torch.compiler.is_compiling():
        return mesh.get_group(dim)
    try:
        group = mesh.get_group(dim)
    except RuntimeError:  # no group has the name
        raise destroyed() from None
    root = getattr(mesh, "_root_mesh", None) or mesh
    known = getattr(root, "_pg_registry", {})  # newer versions of torch keep the groups
    check_alive(known.get(group.group_name, group))
    if group.size() != mesh.size(dim):
        raise destroyed()
    return group


def told(host: str) -> str:
    """What a rank tells of its host, and of what all ranks of a group are to be asked for alike."""
    return f"{host} {'on' if _env.is_on(_env.MESSAGES) else 'off'}"


def agreed(by_rank: Sequence[str]) -> list[str]:
    """The host of each rank.

    Args:
        by_rank: what each has `told`.

    Raises:
        AgmmError: the ranks are asked for different things.
    """
    hosts, values = zip(*(one.rsplit(" ", 1) for one in by_rank), strict=True)
    if len(set(values)) > 1:
        ranks = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
        raise AgmmError(
            f"{_env.MESSAGES.name}: found {ranks} of a group, wanted the same on all its ranks"
        )
    return list(hosts)
