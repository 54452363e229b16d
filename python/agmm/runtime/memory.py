"""The memory of workspaces: how much a call needs, to take it beforehand, to give it back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported
from agmm.runtime import groups, workspaces


def workspace_bytes(A_shard_shape: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
    """Bytes that a gather buffer needs for a call of `agmm.all_gather_matmul`: the gathered A.

    Args:
        A_shard_shape: [M_local, ..., K] of each rank.
        dtype: of A_shard.
        world_size: number of ranks.

    Returns:
        What to pass to `reserve`. A workspace has two such buffers on each rank. On a GPU it also
        has places for two staged shards and one of the backward, so it takes
        ``(2 + 3 / world_size)`` times as much, and up to 64 MiB more, since buffers grow in steps
        of 32 MiB.

    Raises:
        InvalidArgument: a size below 0, a world size below 1, or no dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype: found {dtype!r}, wanted a torch.dtype")
    if world_size < 1:
        raise InvalidArgument(f"world_size: found {world_size}, wanted at least 1")
    if any(size < 0 for size in A_shard_shape):
        raise InvalidArgument(f"A_shard_shape: found {tuple(A_shard_shape)}, wanted sizes >= 0")
    return world_size * prod(A_shard_shape) * dtype.itemsize


def reserve(
    group: dist.ProcessGroup | str | None,
    nbytes: int,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Make the gather buffers of ``group`` at least ``nbytes`` large. Collective.

    Without it they grow with the first call that needs more, which waits for all ranks and for the
    GPU, and cannot be done while a CUDA graph is captured. Buffers that a graph uses stay as they
    are when larger ones are made.

    Args:
        group: process group or its name; the default group when None.
        nbytes: see `workspace_bytes`; the same on all ranks.
        device: None: the current GPU where the group has NCCL, else the CPU.

    Raises:
        Unsupported: the group cannot have such buffers (ranks on several hosts, GPUs that do not
            reach each other, too little memory); all ranks raise, and keep what they had.
        InvalidArgument: ``nbytes`` is below 0 or the group is none of this process.
    """
    if nbytes < 0:
        raise InvalidArgument(f"nbytes: found {nbytes}, wanted at least 0")
    found, on = _resolved(group, device)
    if on.type == "cpu":
        workspaces.cpu_workspace(found).reserve(nbytes)
        return
    from agmm.runtime import cuda

    reason = cuda.why_unfused(on)
    if reason is not None:
        raise Unsupported(reason)
    workspaces.cuda_workspace(found, on).ensure(nbytes)


def release(
    group: dist.ProcessGroup | str | None, *, device: torch.device | str | None = None
) -> None:
    """Give back the gather buffers of ``group``; the next call takes them anew. Collective.

    It returns when all ranks have finished their calls, and waits for the GPU.

    Args:
        group: process group or its name; the default group when None.
        device: as for `reserve`.

    Raises:
        AgmmError: calls in this group were captured in CUDA graphs, which use the buffers whenever
            they are replayed; all ranks raise. They stay until the group is destroyed.
        InvalidArgument: the group is none of this process.
    """
    found, on = _resolved(group, device)
    if on.type == "cpu":
        workspaces.release_cpu_workspace(found)
    else:
        workspaces.cuda_workspace(found, on).release()


def _resolved(
    group: dist.ProcessGroup | str | None, device: torch.device | str | None
) -> tuple[dist.ProcessGroup, torch.device]:
    found = groups.group_or_default(group)
    if isinstance(found, str):
        found = groups.group_of(found)
    groups.check_alive(found)
    if device is None:
        on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(found)
        device = torch.device("cuda" if on_gpu else "cpu")
    device = torch.device(device)
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return found, device
