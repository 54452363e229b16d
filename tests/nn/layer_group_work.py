"""What the tests of the layers' groups run inside the ranks of a pool of five."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh

import agmm
from agmm.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    full_state_dict,
    load_full_state_dict,
)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def layers_of_others() -> list[str]:
    """What layers of the ranks 1 to 4 say on each rank."""
    group = dist.new_group([1, 2, 3, 4])
    mesh = DeviceMesh("cpu", torch.arange(1, 5), mesh_dim_names=("tp",))
    found = []
    calls: list[Callable[[], object]] = [
        lambda: ColumnParallelLinear(4, 4, group=group),
        lambda: RowParallelLinear(4, 4, device_mesh=mesh),
        lambda: RowParallelLinear(4, 4, group="no such group" if dist.get_rank() == 0 else group),
    ]
    for call in calls:
        try:
            call()
            found.append("made")
        except agmm.InvalidArgument as e:
            found.append(str(e))
    return found


def mesh_as_group() -> bool:
    group = group_of(4)
    if group is None:
        return False
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(1)
    one = ColumnParallelLinear(8, [8, 4], group=mesh)
    torch.manual_seed(1)
    other = ColumnParallelLinear(8, [8, 4], group=group)
    x = _random(2, 8, seed=3).float()
    same = [torch.equal(a, b) for a, b in zip(one(x), other(x), strict=True)]
    return all(same) and one.group_name == group.group_name


def pickled_elsewhere() -> tuple[int, int, list[str]]:
    """Rank and world size of a layer that rank 1 pickled, and what a load into it gets wrong."""
    torch.manual_seed(11)
    made = ColumnParallelLinear(4, [10, 5], dtype=torch.float64)
    box = [pickle.dumps(made) if dist.get_rank() == 1 else b""]
    dist.broadcast_object_list(box, src=1)
    layer = pickle.loads(box[0])
    whole = torch.nn.Linear(4, 15, dtype=torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(whole.parameters()):
            parameter.copy_(_random(*parameter.shape, seed=i))
    load_full_state_dict(layer, whole.state_dict())
    rank = dist.get_rank()
    faults = []
    for name, rows in (("weight_0", 10), ("weight_1", 5)):
        begin = 0 if rows == 10 else 10
        wanted = whole.weight[begin : begin + rows].chunk(5)[rank]
        if not torch.equal(layer.get_parameter(name).to_local(), wanted):
            faults.append(f"{name} has another rank's part")
    for name, value in full_state_dict(layer).items():
        if not torch.equal(value, whole.state_dict()[name]):
            faults.append(f"{name} differs")
    return layer.rank, layer.world_size, faults
