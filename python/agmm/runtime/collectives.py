"""All-gather and reduce-scatter along any dimension, as ops that ``torch.compile`` can trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_group_size_by_name, _resolve_process_group

from agmm.errors import InvalidArgument
from agmm.runtime import groups
from agmm.runtime.calls import Call
from agmm.runtime.workspaces import cuda_workspace, meet

_functional = torch.ops._c10d_functional


def group_of(group_name: str) -> dist.ProcessGroup:
    """The group of that name. Raises InvalidArgument where this process has none."""
    try:
        return _resolve_process_group(cast(Any, group_name))  # torch 2.13 wants a NewType of str
    except (RuntimeError, ValueError, KeyError):
        raise InvalidArgument(
            f"group: found {group_name!r}, wanted the name of a process group of this process"
        ) from None


def group_of_size(group_name: str, world_size: int) -> dist.ProcessGroup:
    """The group of that name. Raises InvalidArgument where its size is another one, as that of a
    graph which was compiled for more or fewer ranks and kept on disk."""
    group = group_of(group_name)
    if group.size() != world_size:
        raise InvalidArgument(
            f"world_size: found {world_size} in the call, wanted {group.size()}, the size of group "
            f"{group_name!r}: a graph compiled for another number of ranks; compile it anew with "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
    return group


def group_or_default(
    group: dist.ProcessGroup | DeviceMesh | str | None,
) -> dist.ProcessGroup | str:
    """The group that was given, a 1-D mesh's group, or the default group for None."""
    given: Any = group  # not always what it should be: traced, a group is a stand-in
    if isinstance(given, (dist.ProcessGroup, str)):
        return given
    if given is None:
        if not dist.is_initialized():
            raise InvalidArgument(
                "group: found None without a default process group, wanted a group or "
                "torch.distributed.init_process_group"
            )
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise InvalidArgument(
                f"group: found a DeviceMesh of {given.ndim} dimensions, wanted 1, e.g. mesh['tp']"
            )
        if given.get_coordinate() is None:
            raise InvalidArgument(
                "group: found a DeviceMesh that this rank is not in, wanted a mesh of this rank"
            )
        return given.get_group()
    if torch.compiler.is_compiling():
        return cast(dist.ProcessGroup, given)
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            "group: found a group that this rank is not in, wanted a group of this rank"
        )
    raise InvalidArgument(
        f"group: found {given!r}, wanted a process group, its name or a 1-D DeviceMesh"
    )


def name_of(group: dist.ProcessGroup | DeviceMesh | str | None) -> str:
    """The name of a group, the default group's for None."""
    found = group_or_default(group)
    return found if isinstance(found, str) else found.group_name


def world_size_of(group_name: str) -> int:
    if torch.compiler.is_compiling():
        # Which is traced as a constant.
        return _get_group_size_by_name(group_name)  # type: ignore[arg-type]  # a NewType of str
    return group_of(group_name).size()


def _moved(tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """The tensor with a dimension moved, contiguous; the tensor itself where nothing changes: a
    view, as movedim always makes one, could not be changed in place after an autograd Function."""
    if source % tensor.dim() != target % tensor.dim():
        tensor = tensor.movedim(source, target)
    return tensor.contiguous()


def _start(
    kind: str,
    tensor: torch.Tensor,
    group_name: str,
    dim: int,
    call: Call | None,
    start: Callable[[], torch.Tensor],
    then: str = "",
) -> torch.Tensor:
    """Starts a collective of the group's backend, on the CPU when all ranks come with the same.
    What is traced does without that."""
    if is_traced(tensor):
        return start()
    group = group_of(group_name)
    with groups.of(group).lock:
        if tensor.device.type == "cpu":
            what = f"{kind} of {list(tensor.shape)} {tensor.dtype} along {dim % tensor.dim()}{then}"
            meet(group, what, call or Call(kind, input=tensor, dim=dim))
        return start()


def start_all_gather(
    shard: torch.Tensor,
    group_name: str,
    dim: int,
    *,
    by_copies: bool = False,
    call: Call | None = None,
) -> Callable[[], torch.Tensor]:
    """Begin to gather ``shard`` along ``dim``.

    Args:
        by_copies: by copy engines instead of the group's backend, on GPUs that reach each other's
            memory. Not while the call is traced.
        call: what it is for, for messages.

    Returns:
        A function to call once, which returns the gathered tensor, contiguous.
    """
    given, shard = shard, _moved(shard, dim, 0)
    group = group_of(group_name)
    world_size = dist.get_world_size(group)
    if shard.numel() == 0:
        empty = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
        return lambda: _moved(empty, 0, dim)
    if by_copies and not is_traced(shard):
        finish = cuda_workspace(group, shard.device).start_all_gather(shard)
        return lambda: _moved(finish(), 0, dim)

    def start() -> torch.Tensor:
        found: torch.Tensor = _functional.all_gather_into_tensor(shard, world_size, group_name)
        return found

    started = _start("all_gather", given, group_name, dim, call, start)
    return lambda: _moved(_functional.wait_tensor(started), 0, dim)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a graph is being made of what is done to the tensor; also for tensors of a subclass,
    which may stand for others."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def reduce_scatter(
    partial: torch.Tensor, group_name: str, dim: int, *, call: Call | None = None, then: str = ""
) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum over all ranks of ``partial``; contiguous.

    The size of ``dim`` is a multiple of the world size. ``call`` is what it is for, for messages,
    and ``then`` what else has to be the same on all ranks.
    """
    given, partial = partial, _moved(partial, dim, 0)
    world_size = world_size_of(group_name)
    if partial.numel() == 0:
        part = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
    else:

        def start() -> torch.Tensor:
            op = _functional.reduce_scatter_tensor
            found: torch.Tensor = op(partial, "sum", world_size, group_name)
            return found

        started = _start("reduce_scatter", given, group_name, dim, call, start, then)
        part = _functional.wait_tensor(started)
    return _moved(part, 0, dim)
