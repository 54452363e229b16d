"""What the tests of reserved and released memory run inside ranks."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from rank_groups import fresh_group

import agmm
from agmm.runtime import workspaces


def _call(group: dist.ProcessGroup, m_local: int) -> bool:
    A = torch.arange(float(dist.get_world_size() * m_local * 8)).remainder(7).view(-1, 8)
    shard = A[dist.get_rank() * m_local : (dist.get_rank() + 1) * m_local].clone()
    out = agmm.all_gather_matmul(shard, torch.ones(8, 2), group, strict=True)
    return bool(torch.equal(out, A @ torch.ones(8, 2)))


def _mapped() -> int:
    """Segments of this process's own that are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/dev/shm/agmm-{os.getpid()}-" in line for line in lines)


def reserve_and_call() -> tuple[int, int, int]:
    """The size of a buffer once reserved, after a call that fits, and after a larger one."""
    group = fresh_group()
    agmm.reserve(group, agmm.workspace_bytes((4, 8), torch.float32, 5))
    sizes = [workspaces.cpu_workspace(group).slot_bytes]
    for m_local in (4, 8):
        assert _call(group, m_local)
        sizes.append(workspaces.cpu_workspace(group).slot_bytes)
    agmm.release(group)
    return sizes[0], sizes[1], sizes[2]


def reserve_and_scatter(nbytes: int) -> tuple[int, int, int]:
    """The size of a slot once reserved, after a scatter that fits, and after a larger one."""
    group, found = fresh_group(), []
    agmm.reserve(group, nbytes)
    sizes = [workspaces.cpu_workspace(group).slot_bytes]
    for rows in (10, 11):
        A = torch.ones(5, rows, 2, dtype=torch.float64)
        out = agmm.matmul_reduce_scatter(A, torch.ones(2, 3, dtype=torch.float64), group)
        found.append(torch.equal(out, torch.full((1, rows, 3), 10.0, dtype=torch.float64)))
        sizes.append(workspaces.cpu_workspace(group).slot_bytes)
    assert all(found)
    agmm.release(group)
    return sizes[0], sizes[1], sizes[2]


def release_and_call() -> tuple[int, int, list[bool]]:
    group = fresh_group()
    before = _mapped()
    good = [_call(group, 4)]
    mapped = _mapped() - before
    agmm.release(group.group_name)
    agmm.release(group)  # harmless
    released = _mapped() - before
    good.append(_call(group, 4))
    agmm.release(group)
    return mapped, released, good


def reserve_too_much(limit_bytes: int) -> tuple[str, bool]:
    group = fresh_group()
    assert _call(group, 4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        agmm.reserve(group, 4_000_000)
    except agmm.Unsupported as error:
        return str(error), _call(group, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", False


def reserve_own_size() -> None:
    agmm.reserve(None, 1000 + dist.get_rank())
