"""What the tests of gradients of partly sharded models run inside the ranks of a pool of five."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import agmm
from agmm.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
    parameter_groups,
    sum_replicated_gradients,
)


class Tied(torch.nn.Module):
    """Two norms that share their weight, a third one of its own, and a sharded layer."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.RMSNorm(4) for _ in range(3))
        self.second.weight = self.first.weight
        self.layer = ColumnParallelLinear(4, 6 * dist.get_world_size(group), group=group)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)

    def found(self) -> list[float]:
        norms = (self.first, self.third)
        grads = [_part(owner.weight.grad) for owner in (*norms, self.layer)]
        return [float(grad.sum() / grad.numel()) for grad in grads]


def summed(exclude: list[str]) -> list[float] | str | None:
    """The gradients of the tied norm, of the third one and of the layer; 1 before."""
    group = group_of(3)
    if group is None:
        return None
    module = Tied(group)
    try:
        sum_replicated_gradients(module, DeviceMesh.from_group(group, "cpu"), exclude=exclude)
    except agmm.InvalidArgument as e:
        return str(e)
    return module.found()


def summed_over_other_ranks() -> list[list[float]] | None:
    """The gradients of DTensors: sharded over ranks across those of the group, over those of the
    group itself, and over both."""
    if dist.get_rank() == 4:
        for ranks in ([0, 1], [2, 3]):
            dist.new_group(ranks)
        for ranks in ([0, 2], [1, 3]):
            dist.new_group(ranks)
        return None
    rank = dist.get_rank()
    tp_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dp_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    tp, dp = tp_groups[rank // 2], dp_groups[rank % 2]
    meshes = [
        DeviceMesh.from_group(dp, "cpu"),
        DeviceMesh.from_group(tp, "cpu"),
        DeviceMesh.from_group(
            [dp, tp], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")
        ),
    ]
    placements: list[Any] = [[Shard(0)], [Replicate()], [Shard(0), Replicate()]]
    module = torch.nn.Module()
    for i, (mesh, placement) in enumerate(zip(meshes, placements, strict=True)):
        whole = DTensor.from_local(torch.zeros(2), mesh, placement, run_check=False)
        parameter = torch.nn.Parameter(whole)
        grad = torch.full((2,), 1.0 + rank)
        parameter.grad = DTensor.from_local(grad, mesh, placement, run_check=False)
        module.register_parameter(f"p{i}", parameter)
    sum_replicated_gradients(module, tp)
    return [_part(p.grad).tolist() for p in module.parameters()]


def summed_with_missing_ones() -> dict[str, list[float] | None]:
    """The gradients of parameters that are missing on some of the ranks 3 and 4; elsewhere they are
    1 on rank 3 and 2 on rank 4."""
    group = group_of(2)
    if group is None:
        return {}
    rank = dist.get_rank(group)
    parameters = {
        "both": torch.zeros(3),
        "first": torch.zeros(2, 3),
        "none": torch.zeros(4),
        "second": torch.zeros(5, dtype=torch.bfloat16),
        "large": torch.zeros(1200, 1000),
        "transposed on one": torch.zeros(2, 3),
        "empty": torch.zeros(0),
        "frozen": torch.zeros(3),
        "last": torch.zeros(3),
    }
    module = torch.nn.ParameterDict({n: torch.nn.Parameter(p) for n, p in parameters.items()})
    module["frozen"].requires_grad_(False)
    absent = {"none", "frozen", "second" if rank == 0 else "first"}
    for name, parameter in module.items():
        if name not in absent:
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
    if rank == 0:
        module["transposed on one"].grad = torch.ones(3, 2).t()
    for _ in range(2):
        sum_replicated_gradients(module, group)
    found: dict[str, list[float] | None] = {}
    for name, parameter in module.items():
        grad = parameter.grad
        found[name] = None if grad is None else sorted(set(grad.flatten().tolist()))
    return found


def summed_where_ranks_differ(kind: str) -> str:
    """What the ranks 2 to 4 say where the last one's module is another."""
    group = group_of(3)
    if group is None:
        return ""
    module = torch.nn.ModuleDict({name: torch.nn.RMSNorm(4) for name in ("image", "text")})
    module["words"] = torch.nn.Embedding(3, 4)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    exclude: list[str] = []
    if dist.get_rank(group) == 2:
        changes: dict[str, Callable[[], Any]] = {
            "another": lambda: module.update({"audio": torch.nn.RMSNorm(4)}),
            "fewer": lambda: module.pop("text"),
            "none": module.clear,
            "shape": lambda: module.update({"text": torch.nn.RMSNorm(5)}),
            "dtype": lambda: module.update({"text": torch.nn.RMSNorm(4, dtype=torch.float64)}),
            "device": lambda: module.update({"text": torch.nn.RMSNorm(4, device="meta")}),
            "order": lambda: module.update({"image": module.pop("image")}),
            "frozen": lambda: module["text"].requires_grad_(False).zero_grad(),
            "exclude": lambda: exclude.append("text"),
            "unknown": lambda: exclude.append("txt"),
            "sparse": lambda: setattr(module["words"].weight, "grad", torch.ones(3, 4).to_sparse()),
        }
        changes[kind]()
    try:
        sum_replicated_gradients(module, group, exclude=exclude)
    except agmm.InvalidArgument as error:
        return str(error)
    return "no error"


def _part(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _filled(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """A gradient of the whole parameter's shape, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def clipped(world_size: int, norm_type: float, max_norm: float, by_list: bool) -> list[str] | None:
    """Faults of the norm and of the clipped gradients, against torch's of the whole model."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(3)
    where: Any = {"group": group, "dtype": torch.float64}
    model: Any = torch.nn.Sequential(
        torch.nn.LayerNorm(8, dtype=torch.float64),
        ColumnParallelLinear(8, [12, 24], **where),
        RowParallelLinear(12, 8, **where),
    )
    model.append(torch.nn.Linear(8, 8, bias=False, dtype=torch.float64))
    model[3].weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    model.register_parameter("tied", model[3].weight)
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    wholes = []
    for seed, parameter in enumerate(model.parameters()):
        if parameter is model.unused:
            continue
        whole = _filled(parameter, seed)
        wholes.append(torch.nn.Parameter(torch.zeros_like(whole)))
        wholes[-1].grad = whole.clone()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        else:
            parameter.grad = whole.clone()
    wanted = torch.nn.utils.clip_grad_norm_(wholes, max_norm, norm_type)
    given: Any = [*model.parameters(), model.tied] if by_list else model
    found = clip_grad_norm_(given, max_norm, norm_type)
    faults = []
    if abs(float(found) - float(wanted)) > 1e-12 * float(wanted):
        faults.append(f"norm {float(found)}, wanted {float(wanted)}")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad, whole in zip(grads, wholes, strict=True):
        assert whole.grad is not None
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if not torch.allclose(full, whole.grad, rtol=1e-12, atol=0):
            faults.append(f"a gradient of shape {tuple(full.shape)} differs")
    return faults


def clip_of_an_embedding() -> tuple[float, float]:
    """The norm of the gradient of an embedding that torch's row-wise style divides, whose gradient
    every rank has whole, and the whole embedding's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = torch.nn.Embedding(20, 8)
    divided = copy.deepcopy(whole)
    parallelize_module(divided, mesh, RowwiseParallel(input_layouts=Replicate()))
    tokens = torch.arange(12)
    for embedding in (whole, divided):
        embedding(tokens).square().sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    return clip_grad_norm_(divided, 1e9).item(), wanted.item()


def clip_of_few_bits(world_size: int) -> tuple[float, torch.dtype] | None:
    """The norm of 4096 ones in bfloat16, which has no number between 64 and 64.5."""
    group = group_of(world_size)
    if group is None:
        return None
    layer = ColumnParallelLinear(64, 65, False, group=group, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    norm = clip_grad_norm_(layer, 1e9)
    return float(norm), norm.dtype


def refused_clips() -> list[str]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([float("inf"), 1.0])
    found = []
    calls: list[Callable[[], object]] = [
        lambda: clip_grad_norm_([parameter], 1.0, 0.0),
        lambda: clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as e:
            found.append(f"{type(e).__name__}: {e}")
    return [*found, str(parameter.grad.tolist())]


def stepped(in_groups: bool, at_once: str) -> list[bool] | str | None:
    """Whether AdamW, which updates all parameters of a group at once as it does on GPUs, updates a
    norm and a sharded layer as one by one; or what it raises."""
    group = group_of(2)
    if group is None:
        return None
    found = []
    ways: list[dict[str, Any]] = [{at_once: True}, {"foreach": False}]
    for how in ways:
        torch.manual_seed(0)
        module = Tied(group)
        given: Any = parameter_groups(module) if in_groups else module.parameters()
        optimizer = torch.optim.AdamW(given, lr=0.1, **how)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        found.append([_part(parameter).detach() for parameter in module.parameters()])
    return [torch.allclose(one, other) for one, other in zip(*found, strict=True)]
