"""What the tests of packed linears run inside the ranks of a pool of five: an attention with one
linear for queries, keys and values."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from agmm.nn import (
    PackedColwiseParallel,
    ReplicatedColwiseParallel,
    RowwiseAllReduceParallel,
    RowwiseScatterParallel,
    SharedGatherParallel,
    UnpackedLinear,
    convert_plan,
    full_state_dict,
    load_full_state_dict,
)
from agmm.testing.reference import relative_error

HEADS, GROUPS, SIZE, HIDDEN = 8, 4, 4, 24
SIZES = [HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]
_LIMIT = 2e-5


class Attention(torch.nn.Module):
    """Grouped queries."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, sum(SIZES), bias=bias)
        self.proj = torch.nn.Linear(SIZES[0], HIDDEN, bias=bias)
        self.heads, self.groups = HEADS, GROUPS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        batch, length, _ = x.size()
        sizes = [n * SIZE for n in (self.heads, self.groups, self.groups)]
        q, k, v = (
            part.reshape(batch, length, -1, SIZE).transpose(1, 2)
            for part in qkv.split(sizes, dim=-1)
        )
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        return found


def _whole(bias: bool) -> Attention:
    torch.manual_seed(3)
    return Attention(bias)


def _sharded(whole: Attention, mesh: DeviceMesh, sequence: bool, by_style: bool) -> Attention:
    found = copy.deepcopy(whole)
    found.heads, found.groups = HEADS // mesh.size(), GROUPS // mesh.size()
    plan: dict[str, Any]
    if by_style:
        last = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
        plan = {"qkv": PackedColwiseParallel(SIZES), "proj": last}
        if sequence:
            plan[""] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        plan = dict(convert_plan(found, mesh, plan, strict=True))
    else:
        found.qkv = UnpackedLinear(found.qkv, SIZES)  # type: ignore[assignment]
        names = [f"qkv.{i}" for i in range(3)]
        plan = {"": SharedGatherParallel(*names), "proj": RowwiseScatterParallel()}
        if not sequence:
            plan = {name: ReplicatedColwiseParallel() for name in names}
            plan["proj"] = RowwiseAllReduceParallel()
    parallelize_module(found, mesh, {name: style for name, style in plan.items() if name})
    if "" in plan:
        parallelize_module(found, mesh, plan[""])
    return found


def attention(world_size: int, bias: bool, sequence: bool, by_style: bool) -> list[str] | None:
    """Faults of a step, of what is saved and of what is loaded."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    whole = _whole(bias)
    sharded = _sharded(whole, mesh, sequence, by_style)
    x = torch.randn(2, 4 * world_size, HIDDEN, generator=torch.Generator().manual_seed(4))
    wanted = whole(x)
    wanted.square().sum().backward()
    part = slice(4 * rank, 4 * (rank + 1)) if sequence else slice(None)
    found = sharded(x[:, part])
    # Where all ranks have all rows, the gradient of each is that of the whole.
    found.square().sum().backward()
    faults = [f"output: {e}"] if (e := relative_error(found, wanted[:, part])) > _LIMIT else []

    saved = full_state_dict(sharded)
    faults += [n for n, v in whole.state_dict().items() if not torch.equal(saved.pop(n), v)]
    faults += saved
    grads = _gradients(sharded)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        error = relative_error(grads[name], parameter.grad)
        if error > _LIMIT:
            faults.append(f"gradient of {name}: {error}")

    changed = {name: 2 * value for name, value in whole.state_dict().items()}
    load_full_state_dict(sharded, changed)
    saved = full_state_dict(sharded)
    return faults + [f"loaded {n}" for n, v in changed.items() if not torch.equal(saved[n], v)]


def _gradients(sharded: Attention) -> dict[str, torch.Tensor]:
    """The gradients of the whole, under the names of the packed linear."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor), name
        value = grad.full_tensor()
        if name.startswith("qkv."):
            name = f"qkv.{name.rpartition('.')[2]}"
            value = torch.cat([found[name], value]) if name in found else value
        found[name] = value
    return found
