"""Groups and meshes of CPU ranks: as few as the tests need at a time. gloo runs three threads for
every group, and wakes them a hundred times a second as long as the group lives."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_fresh: list[dist.ProcessGroup] = []


@cache
def mesh_over(ranks: tuple[Any, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh of those ranks, made once. Collective when it is first asked for."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def dp_tp_mesh(dp: int, tp: int) -> DeviceMesh:
    """All ranks, as `dp` groups of `tp` ranks."""
    rows = tuple(tuple(range(i * tp, (i + 1) * tp)) for i in range(dp))
    return mesh_over(rows, ("dp", "tp"))


def fresh_group() -> dist.ProcessGroup:
    """A group of all ranks in which nothing is known yet. It lives until the next one is asked for.
    Collective."""
    dist.barrier()
    while _fresh:
        dist.destroy_process_group(_fresh.pop())
    _fresh.append(dist.new_group(list(range(dist.get_world_size()))))
    return _fresh[0]
