"""What the tests of the layers' groups run inside the ranks of a pool of five."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import agmm
from agmm.nn import (
    ColumnParallelLinear,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
    SharedGatherParallel,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    sum_replicated_gradients,
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


def _begin_anew(folder: str, generation: int, world_size: int) -> None:
    """The default group ends, and another one of the same name begins."""
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank < world_size:
        where = f"file://{folder}/{generation}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)


def _models() -> dict[str, torch.nn.Module]:
    """Every layer and style, over the three ranks of the default group, for an input [3, 48]."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def linear() -> torch.nn.Linear:
        return torch.nn.Linear(48, 48)

    def chain(style: Any) -> torch.nn.Module:
        gather = parallelize_module(linear(), mesh, GatherColwiseParallel(sequence_dim=0))
        return torch.nn.Sequential(gather, parallelize_module(linear(), mesh, style))

    shared = torch.nn.Sequential(linear())
    return {
        "column": ColumnParallelLinear(48, 48),
        "several": ColumnParallelLinear(48, [48, 96]),
        "of a mesh": ColumnParallelLinear(48, 48, device_mesh=mesh),
        "column fp8": ColumnParallelLinear(48, 48, fp8="tensorwise"),
        "row": torch.nn.Sequential(torch.nn.Linear(48, 16), RowParallelLinear(48, 48)),
        "row fp8": torch.nn.Sequential(
            torch.nn.Linear(48, 16), RowParallelLinear(48, 48, fp8="tensorwise")
        ),
        "styles": chain(RowwiseScatterParallel(sequence_dim=0)),
        "shared": parallelize_module(shared, mesh, SharedGatherParallel("0", sequence_dim=0)),
    }


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except agmm.InvalidArgument as error:
        return str(error)
    return "no error"


def _without_graph(model: Callable[..., Any], x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def _unpickled(data: bytes, x: torch.Tensor) -> None:
    pickle.loads(data)(x)


def outlived(folder: str, compiled: str) -> dict[str, str]:
    """What everything that was made for three ranks says in later groups of the same name: of three
    ranks and of two; one model is compiled, which takes its time."""
    models = _models()
    x = torch.ones(3, 48)
    outs = {}
    for name, model in models.items():
        _without_graph(model, x)  # a kept call is there to be made again
        out = model(x)
        outs[name] = out if isinstance(out, torch.Tensor) else out[0]
    torch.compiler.reset()
    run: Any = torch.compile(models[compiled], fullgraph=True, backend="aot_eager")
    _without_graph(run, x)
    run(x)
    models["deep copy"] = copy.deepcopy(models["column"])
    models["deep copy of styles"] = copy.deepcopy(models["styles"])
    pickled = {name: pickle.dumps(models[name]) for name in ("column", "styles", "shared")}
    group = dist.group.WORLD
    said: dict[str, str] = {}
    for generation, world_size in ((1, 3), (2, 2)):
        _begin_anew(folder, generation, world_size)
        if not dist.is_initialized():
            return said
        models[f"copied in group {generation}"] = copy.deepcopy(models["column"])
        for name, model in models.items():
            said[f"{world_size} ranks, {name}"] = _refusal(partial(_without_graph, model, x))
            said[f"{world_size} ranks, {name}, grad"] = _refusal(partial(model, x))
        said[f"{world_size} ranks, compiled"] = _refusal(lambda: _without_graph(run, x))
        said[f"{world_size} ranks, compiled, grad"] = _refusal(lambda: run(x))
        for name, out in outs.items():
            backward = partial(out.sum().backward, retain_graph=True)
            said[f"{world_size} ranks, {name}, backward"] = _refusal(backward)
        others: dict[str, Callable[[], object]] = {
            "whole": lambda: full_state_dict(models["column"]),
            "whole of styles": lambda: full_state_dict(models["styles"]),
            "clip": lambda: clip_grad_norm_(models["column"], 1.0),
            "clip of styles": lambda: clip_grad_norm_(models["styles"], 1.0),
            "sum": lambda: sum_replicated_gradients(models["column"], group),
            "new layer": lambda: ColumnParallelLinear(48, 48, group=group),
        }
        for name, call in others.items():
            said[f"{world_size} ranks, {name}"] = _refusal(call)
        for name, data in pickled.items():
            said[f"{world_size} ranks, pickled {name}"] = _refusal(partial(_unpickled, data, x))
    torch.compiler.reset()
    return said


def unpickled_without_a_group(folder: str) -> str:
    """What a pickled layer says in a process without groups."""
    data = pickle.dumps(ColumnParallelLinear(4, 6))
    _begin_anew(folder, 1, 0)
    return _refusal(lambda: pickle.loads(data))
