"""What the tests of styles without sequence parallelism run inside the ranks of a pool of five."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from agmm.nn import ReplicatedColwiseParallel, RowwiseAllReduceParallel
from agmm.testing.reference import relative_error

STYLES: dict[str, dict[str, Any]] = {
    "both": {"up": ReplicatedColwiseParallel(), "down": RowwiseAllReduceParallel()},
    "DTensors": {
        "up": ReplicatedColwiseParallel(use_local_output=False),
        "down": RowwiseAllReduceParallel(use_local_output=False),
    },
    "column": {"up": ReplicatedColwiseParallel(), "down": RowwiseParallel()},
    "row": {"up": ColwiseParallel(), "down": RowwiseAllReduceParallel()},
}


class Feed(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(12, dtype=torch.float64)
        self.up = torch.nn.Linear(12, 60, bias, dtype=torch.float64)
        self.down = torch.nn.Linear(60, 8, bias, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.norm(x))
        if isinstance(up, DTensor):
            up = up.to_local()
        down: torch.Tensor = self.down(torch.tanh(up))
        return down


def against_whole(
    world_size: int, which: str, bias: bool, compiled: bool = False
) -> list[str] | None:
    """Faults of a sharded module, forward and backward."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(3)
    whole = Feed(bias)
    sharded = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(sharded, mesh, STYLES[which])
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(2, 3, 8, dtype=torch.float64)
    given = x.detach().clone().requires_grad_()
    wanted = whole(x)
    (wanted * scale).sum().backward()
    torch.compiler.reset()
    run = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    found = run(given)
    faults = []
    if which == "DTensors":
        if not isinstance(found, DTensor) or found.placements != (Replicate(),):
            return [f"out: {type(found)}"]
        found = found.to_local()
    (found * scale).sum().backward()
    torch.compiler.reset()
    pairs = {"out": (found, wanted), "x": (given.grad, x.grad)}
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        pairs[f"gradient of {name}"] = grad, other.grad
        if "norm" not in name and not isinstance(one, DTensor):
            faults.append(f"{name}: {type(one)}")
    for name, (one, other) in pairs.items():
        if one is None or other is None or relative_error(one.detach(), other.detach()) > 1e-10:
            faults.append(f"{name}: {one} for {other}")
    with torch.no_grad():
        again = sharded(x)
        again = again.to_local() if isinstance(again, DTensor) else again
        if relative_error(again, wanted.detach()) > 1e-10:
            faults.append("without gradients it is another one")
    assert isinstance(sharded.up.weight, DTensor) and sharded.up.weight.placements == (Shard(0),)
    return faults


def under_autocast(world_size: int) -> list[Any] | None:
    """The dtypes of an output, and of the gradients, under autocast."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(3)
    sharded = Feed(True).float()
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(sharded, mesh, STYLES["both"])
    with torch.autocast("cpu", torch.bfloat16):
        out = sharded(torch.randn(4, 12))
    out.sum().backward()
    return [out.dtype, *(None if p.grad is None else p.grad.dtype for p in sharded.parameters())]


def refusal(kind: str) -> str | None:
    """The message with which a style refuses a module or an input."""
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    row, column = RowwiseAllReduceParallel(), ReplicatedColwiseParallel()
    linear = torch.nn.Linear(8, 8)
    calls = {
        "module": lambda: parallelize_module(torch.nn.ReLU(), mesh, row),
        "row size": lambda: parallelize_module(torch.nn.Linear(7, 8), mesh, row),
        "column size": lambda: parallelize_module(torch.nn.Linear(8, 7), mesh, column),
        "features": lambda: parallelize_module(linear, mesh, row)(torch.ones(3, 8)),
        "column features": lambda: parallelize_module(linear, mesh, column)(torch.ones(3, 4)),
    }
    try:
        calls[kind]()
    except ValueError as error:
        return str(error)
    return "nothing was refused"
