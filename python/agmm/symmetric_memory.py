"""The workspaces of this process: one for each group and kind of device, made at first use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from agmm._cpu import CpuWorkspace
    from agmm._cuda import CudaWorkspace

# Keyed by the group object: a name may come back for another group after destroy_process_group.
_cpu_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, CpuWorkspace]
_cpu_workspaces = weakref.WeakKeyDictionary()
_cuda_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, CudaWorkspace]]
_cuda_workspaces = weakref.WeakKeyDictionary()


def cpu_workspace(group: dist.ProcessGroup, slot_bytes: int) -> CpuWorkspace:
    """The CPU workspace of ``group``; collective at first use."""
    workspace = _cpu_workspaces.get(group)
    if workspace is None:
        from agmm._cpu import CpuWorkspace

        workspace = _cpu_workspaces[group] = CpuWorkspace.create(group, slot_bytes)
    return workspace


def cuda_workspace(group: dist.ProcessGroup, device: torch.device) -> CudaWorkspace:
    """The CUDA workspace of ``group`` on ``device``. It takes its memory at its first call."""
    by_device = _cuda_workspaces.get(group)
    if by_device is None:
        by_device = _cuda_workspaces[group] = {}
    workspace = by_device.get(device.index)
    if workspace is None:
        from agmm._cuda import CudaWorkspace

        workspace = by_device[device.index] = CudaWorkspace(group, device)
    return workspace
