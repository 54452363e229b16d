"""The workspaces of this process: one for each group and kind of device, made at first use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.runtime import backends, groups
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call

if TYPE_CHECKING:
    from agmm.runtime.copies import GatherCopies, ScatterCopies
    from agmm.runtime.cpu import CpuWorkspace
    from agmm.runtime.cuda import CudaWorkspace
    from agmm.runtime.cuda_collectives import CollectivesWorkspace
    from agmm.runtime.cuda_dispatch import CombineWorkspace, DispatchWorkspace
    from agmm.runtime.cuda_portable import PortableGather, PortableScatter
    from agmm.runtime.cuda_scatter import ScatterWorkspace

_Workspace = TypeVar("_Workspace")

# Keyed by the group object: a name may come back for another group after destroy_process_group.
_why_no_cpu_workspace: weakref.WeakKeyDictionary[dist.ProcessGroup, str]
_why_no_cpu_workspace = weakref.WeakKeyDictionary()
_cpu_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, CpuWorkspace]
_cpu_workspaces = weakref.WeakKeyDictionary()
_cuda_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, CudaWorkspace]]
_cuda_workspaces = weakref.WeakKeyDictionary()
_scatter_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ScatterWorkspace]]
_scatter_workspaces = weakref.WeakKeyDictionary()
_gather_copies: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, GatherCopies]]
_gather_copies = weakref.WeakKeyDictionary()
_scatter_copies: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ScatterCopies]]
_scatter_copies = weakref.WeakKeyDictionary()
_portable: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, PortableGather]]
_portable = weakref.WeakKeyDictionary()
_portable_scatters: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, PortableScatter]]
_portable_scatters = weakref.WeakKeyDictionary()
_collectives: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, CollectivesWorkspace]]
_collectives = weakref.WeakKeyDictionary()
_dispatches: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DispatchWorkspace]]
_dispatches = weakref.WeakKeyDictionary()
_combines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, CombineWorkspace]]
_combines = weakref.WeakKeyDictionary()


def cpu_workspace(group: dist.ProcessGroup) -> CpuWorkspace:
    """The CPU workspace of ``group``; collective at first use. It grows when it is used.

    Raises:
        Unsupported: the group can have none; all ranks raise.
        InvalidArgument: the group has been destroyed.
    """
    groups.check_alive(group)
    with groups.of(group).lock:
        workspace = _cpu_workspaces.get(group)
        if workspace is None:
            if backends.is_fake(group):
                raise Unsupported(f"group: backend {backends.FAKE}, which has no other ranks")
            from agmm.runtime.cpu import CpuWorkspace

            reason = _why_no_cpu_workspace.get(group)
            if reason is not None:
                raise Unsupported(reason)
            try:
                workspace = _cpu_workspaces[group] = CpuWorkspace.create(group, 0)
            except Unsupported as error:
                _why_no_cpu_workspace[group] = str(error)
                raise
        return workspace


def release_cpu_workspace(group: dist.ProcessGroup) -> None:
    """Collective. Nothing where the group has none."""
    with groups.of(group).lock:
        workspace = _cpu_workspaces.get(group)
        if workspace is not None:
            workspace.meet("release", Call("release"))
            workspace.close()
            del _cpu_workspaces[group]
        _why_no_cpu_workspace.pop(group, None)


def meet(group: dist.ProcessGroup, what: str, call: Call) -> None:
    """Meets the ranks before a collective of the backend on CPU tensors: see `CpuWorkspace.meet`.
    Does nothing where the group has no workspace, as on several hosts: there the backend's own
    limits hold."""
    try:
        with calling(call):
            workspace = cpu_workspace(group)
    except Unsupported:
        return
    workspace.meet(what, call)


def take_turn(
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
    call: Call,
    *,
    agree: Callable[[dist.ProcessGroup, torch.device], None] | None = None,
) -> None:
    """What a call without elements does in place of its communication. Collective.

    No rank can know whether the others have elements. So such a call takes its turn among the
    calls of the group: it ends, on a GPU in the order of the current stream, when all ranks have
    come to it, and its tag is that of no call with elements. A rank that has some finds this tag in
    place of its peer's data and ends with a message that names both calls; it never takes the data
    of the peer's next call. Where the ranks share no memory they meet in the group's store.

    Args:
        device: of the operands.
        what: what all ranks have to agree on.
        call: for messages.
        agree: what precedes such a call with elements on the host, where ranks may already differ.

    Raises:
        AgmmError: a rank is found to call something else, or did not come within AGMM_TIMEOUT_S,
            where the ranks exchange words in the group's store, as in its first call.
    """
    known = groups.of(group)
    if known.world_size == 1 or backends.is_fake(group):
        return
    what = f"without elements, {what}"
    with calling(call, empty=what):
        if agree is not None:
            agree(group, device)
        try:
            if device.type == "cpu":
                cpu_workspace(group).meet(what, call)
                return
            if device.type == "cuda":
                collectives_workspace(group, device).meet(what, call)
                return
        except Unsupported:
            pass
        known.exchange("that their call has no elements", "")


def cuda_workspace(group: dist.ProcessGroup, device: torch.device) -> CudaWorkspace:
    """The CUDA workspace of ``group`` on ``device``. It takes its memory at its first call."""
    by_device = _cuda_workspaces.get(group)
    workspace = None if by_device is None else by_device.get(device.index)
    if workspace is None:
        from agmm.runtime.cuda import CudaWorkspace

        workspace = _kept(_cuda_workspaces, CudaWorkspace, group, device)
    return workspace


def scatter_workspace(group: dist.ProcessGroup, device: torch.device) -> ScatterWorkspace:
    """The workspace of ``group`` on ``device`` for matmul + reduce-scatter."""
    by_device = _scatter_workspaces.get(group)
    workspace = None if by_device is None else by_device.get(device.index)
    if workspace is None:
        from agmm.runtime.cuda_scatter import ScatterWorkspace

        workspace = _kept(_scatter_workspaces, ScatterWorkspace, group, device)
    return workspace


def collectives_workspace(group: dist.ProcessGroup, device: torch.device) -> CollectivesWorkspace:
    """The workspace of ``group`` on ``device`` for collectives without a matmul."""
    by_device = _collectives.get(group)
    workspace = None if by_device is None else by_device.get(device.index)
    if workspace is None:
        from agmm.runtime.cuda_collectives import CollectivesWorkspace

        workspace = _kept(_collectives, CollectivesWorkspace, group, device)
    return workspace


def dispatch_workspace(group: dist.ProcessGroup, device: torch.device) -> DispatchWorkspace:
    """The workspace of ``group`` on ``device`` for the rows of mixtures of experts."""
    from agmm.runtime.cuda_dispatch import DispatchWorkspace

    return _kept(_dispatches, DispatchWorkspace, group, device)


def combine_workspace(group: dist.ProcessGroup, device: torch.device) -> CombineWorkspace:
    """The workspace of ``group`` on ``device`` for the sums of mixtures of experts."""
    from agmm.runtime.cuda_dispatch import CombineWorkspace

    return _kept(_combines, CombineWorkspace, group, device)


def gather_copies(group: dist.ProcessGroup, device: torch.device) -> GatherCopies:
    """The workspace of ``group`` on ``device`` for all-gathers by copy engines."""
    from agmm.runtime.copies import GatherCopies

    return _kept(_gather_copies, GatherCopies, group, device)


def scatter_copies(group: dist.ProcessGroup, device: torch.device) -> ScatterCopies:
    """The workspace for reduce-scatters by copy engines, which come on another stream."""
    from agmm.runtime.copies import ScatterCopies

    return _kept(_scatter_copies, ScatterCopies, group, device)


def portable_gathers(group: dist.ProcessGroup, device: torch.device) -> PortableGather:
    """The workspace of ``group`` on ``device`` for all-gathers beside products of the library."""
    from agmm.runtime.cuda_portable import PortableGather

    collectives = collectives_workspace(group, device)
    return _kept(_portable, partial(PortableGather, collectives=collectives), group, device)


def portable_scatters(group: dist.ProcessGroup, device: torch.device) -> PortableScatter:
    """The workspace of ``group`` on ``device`` for products of the library that are scattered."""
    from agmm.runtime.cuda_portable import PortableScatter

    make = partial(PortableScatter, collectives=collectives_workspace(group, device))
    return _kept(_portable_scatters, make, group, device)


def _kept(
    known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Workspace]],
    make: Callable[[dist.ProcessGroup, torch.device], _Workspace],
    group: dist.ProcessGroup,
    device: torch.device,
) -> _Workspace:
    """The one workspace of its kind, made where there is none."""
    with groups.of(group).lock:
        by_device = known.setdefault(group, {})
        if device.index not in by_device:
            by_device[device.index] = make(group, device)
        return by_device[device.index]
