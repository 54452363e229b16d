"""The memory of workspaces: how much a call needs, to take it beforehand, to give it back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm import _core
from agmm.errors import InvalidArgument, Unsupported
from agmm.runtime import backends, cpu_collectives, cpu_scatter, groups, kernels, workspaces

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", *_COLLECTIVES)


def workspace_bytes(
    shape: Sequence[int], dtype: torch.dtype, world_size: int, *, op: str = "all_gather_matmul"
) -> int:
    """Bytes that a slot of the workspace needs for a call: the gathered A, or the parts of a sum.

    Args:
        shape: for "all_gather_matmul" of A_shard, [M_local, ..., K]; for "matmul_reduce_scatter"
            and "matmul_all_reduce" of ``A @ B``, [M, ..., N], before it is scattered; for those of
            `agmm.collectives` of ``x``.
        dtype: of the operands; for a sum of fp8 products of the result, bfloat16 where that is fp8.
        world_size: number of ranks.
        op: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce", whose parts come
            from all other ranks, of 8192 rows at a time, with as many finished rows in
            "matmul_all_reduce"; "all_gather", "reduce_scatter" or
            "all_reduce", of `agmm.collectives`, whose slots hold 2 MiB at most.

    Returns:
        What to pass to `reserve`, the largest of all calls. A workspace has two slots on each rank.
        On a GPU it also has places for two staged shards and one of the backward, so it takes
        ``(2 + 3 / world_size)`` times as much, and up to 64 MiB more, since slots grow in steps of
        32 MiB. "matmul_reduce_scatter" and "matmul_all_reduce" share memory of their own there,
        one slot on each rank, which grows in steps of 8 MiB for each other rank. Those of
        `agmm.collectives` share 72 MiB there, whatever the size.

    Raises:
        InvalidArgument: a size below 0, a world size below 1, no dtype, another op, or what is
            scattered is no multiple of the world size.
    """
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype: found {dtype!r}, wanted a torch.dtype")
    if world_size < 1:
        raise InvalidArgument(f"world_size: found {world_size}, wanted at least 1")
    if op not in _OPS:
        raise InvalidArgument(f"op: found {op!r}, wanted one of {_OPS}")
    if any(size < 0 for size in shape):
        raise InvalidArgument(f"shape: found {tuple(shape)}, wanted sizes >= 0")
    if op == "all_gather_matmul":
        return world_size * (prod(shape) * dtype.itemsize + _scale_bytes(shape, dtype))
    if op in _COLLECTIVES:
        return _collective_bytes(prod(shape), dtype, world_size, op)
    rows, is_scatter = prod(shape[:-1]), op == "matmul_reduce_scatter"
    if len(shape) < 2 or (is_scatter and rows % world_size):
        also = f", and rows that are a multiple of the world size {world_size}"
        raise InvalidArgument(
            f"shape: found {tuple(shape)}, wanted at least 2 sizes{also if is_scatter else ''}"
        )
    if max(rows, shape[-1]) > _core.MAX_SIZE:
        raise InvalidArgument(
            f"shape: found {rows} rows of {shape[-1]}, wanted at most {_core.MAX_SIZE} of each"
        )
    row_bytes = shape[-1] * dtype.itemsize
    shared = -(-rows // world_size) * world_size
    whole_tiles = [
        (world_size - 1) * _core.scatter_part_bytes(shared, shape[-1], world_size, kernel)
        for kernel in kernels.built("matmul_reduce_scatter")
    ]
    if is_scatter:
        return max(_core.scatter_slot_bytes(rows, row_bytes, world_size), *whole_tiles, 0)
    whole_tiles += [
        (world_size - 1) * _core.scatter_part_bytes(shared, shape[-1], world_size, kernel, True)
        for kernel in kernels.built("matmul_all_reduce")
    ]
    of_cpu = cpu_scatter.all_reduce_slot_bytes(rows, row_bytes, world_size)
    return max(of_cpu, *whole_tiles, 0)


def _scale_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of what travels with fp8 operands: a float32 for each row and 128 columns. Block
    scales, which have the most, have this many."""
    if not shape or not (dtype.is_floating_point and dtype.itemsize == 1):
        return 0
    return 4 * prod(shape[:-1]) * -(-shape[-1] // 128)


def _collective_bytes(numbers: int, dtype: torch.dtype, world_size: int, op: str) -> int:
    if op == "reduce_scatter" and numbers % world_size:
        raise InvalidArgument(
            f"shape: found {numbers} elements, wanted a multiple of the world size {world_size}"
        )
    if world_size == 1:
        return 0
    sent = torch.empty(numbers, dtype=dtype, device="meta")
    job: cpu_collectives.Job
    if op == "all_gather":
        job = cpu_collectives.AllGather(0, world_size, sent, sent)
    elif op == "reduce_scatter":
        part = sent[: numbers // world_size]
        job = cpu_collectives.ReduceScatter(0, world_size, sent, part, False)
    else:
        job = cpu_collectives.AllReduce(0, world_size, sent, sent, False)
    return job.slot_bytes()


def reserve(
    group: dist.ProcessGroup | DeviceMesh | str | None,
    nbytes: int,
    *,
    device: torch.device | str | None = None,
    op: str = "all_gather_matmul",
) -> None:
    """Make the slots of ``group``'s workspace at least ``nbytes`` large. Collective.

    Without it they grow with the first call that needs more, which waits for all ranks and for the
    GPU, and cannot be done while a CUDA graph is captured. Buffers that a graph uses stay as they
    are when larger ones are made.

    Args:
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        nbytes: see `workspace_bytes`; the same on all ranks.
        device: None: the current GPU where the group has NCCL, else the CPU.
        op: whose memory. On a GPU "matmul_reduce_scatter" and "matmul_all_reduce" have their own;
            so have "all_gather", "reduce_scatter" and "all_reduce", of one size whatever ``nbytes``
            is, which small calls of the ops with a matmul use too.

    Raises:
        Unsupported: the group cannot have such buffers (ranks on several hosts, GPUs that do not
            reach each other, too little memory); all ranks raise, and keep what they had.
        InvalidArgument: ``nbytes`` is below 0, another op, or the group is none of this process.
    """
    if nbytes < 0:
        raise InvalidArgument(f"nbytes: found {nbytes}, wanted at least 0")
    if op not in _OPS:
        raise InvalidArgument(f"op: found {op!r}, wanted one of {_OPS}")
    found, on = _resolved(group, device)
    if backends.is_fake(found):
        return
    if on.type == "cpu":
        workspaces.cpu_workspace(found).reserve(nbytes)
        return
    from agmm.runtime import capabilities, symmetric

    feature = capabilities.COLLECTIVES if op in _COLLECTIVES else capabilities.MATMULS
    reason = symmetric.why_group_unfused(found, on, feature)
    if reason is not None:
        raise Unsupported(reason)
    if op in _COLLECTIVES:
        from agmm.runtime.cuda_collectives import SLOT_BYTES

        if found.size() > _core.MAX_COLLECTIVE_RANKS:
            ranks = (
                f"{found.size()} ranks, agmm's kernels serve at most {_core.MAX_COLLECTIVE_RANKS}"
            )
            raise Unsupported(f"group: {ranks}")
        workspaces.collectives_workspace(found, on).ensure(SLOT_BYTES)
    elif op != "all_gather_matmul":
        workspace = workspaces.scatter_workspace(found, on)
        workspace.ensure(-(-nbytes // max(1, workspace.world_size - 1)))
    else:
        workspaces.cuda_workspace(found, on).ensure(nbytes)


def release(
    group: dist.ProcessGroup | DeviceMesh | str | None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give back the buffers of ``group``; the next call takes them anew. Collective.

    It returns when all ranks have finished their calls, and waits for the GPU.

    Args:
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        device: as for `reserve`.

    Raises:
        AgmmError: calls in this group were captured in CUDA graphs, which use the buffers whenever
            they are replayed; all ranks raise. They stay until the group is destroyed.
        InvalidArgument: the group is none of this process.
    """
    found, on = _resolved(group, device)
    if backends.is_fake(found):
        return
    if on.type == "cpu":
        workspaces.release_cpu_workspace(found)
    else:
        of_group = (
            workspaces.cuda_workspace(found, on),
            workspaces.scatter_workspace(found, on),
            workspaces.gather_copies(found, on),
            workspaces.scatter_copies(found, on),
            workspaces.portable_gathers(found, on),
            workspaces.portable_scatters(found, on),
            workspaces.collectives_workspace(found, on),
            workspaces.dispatch_workspace(found, on),
            workspaces.combine_workspace(found, on),
        )
        for workspace in of_group:  # before any is released
            workspace.check_no_graphs()
        for workspace in of_group:
            workspace.release()


def _resolved(
    group: dist.ProcessGroup | DeviceMesh | str | None, device: torch.device | str | None
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
