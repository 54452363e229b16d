"""Device meshes of CPU ranks, each made once in a process: gloo runs three threads for every group
that a mesh makes, and wakes them a hundred times a second as long as the process lives."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def dp_tp_mesh(dp: int, tp: int) -> DeviceMesh:
    """All ranks, as `dp` groups of `tp` ranks. Collective when it is first asked for."""
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
