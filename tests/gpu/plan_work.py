"""What the tests of converted plans run inside the ranks of a pool."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu

from agmm.nn import convert_plan
from agmm.testing.reference import relative_error

_WORDS, _HIDDEN, _BETWEEN = 768, 384, 1152
_LIMIT = 0.03
"""The relative error that bfloat16 may have against float32, in three products one behind the other
and in their sums. It is a choice."""


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(_HIDDEN, _BETWEEN, bias=False)
        self.w3 = torch.nn.Linear(_HIDDEN, _BETWEEN, bias=False)
        self.w2 = torch.nn.Linear(_BETWEEN, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_WORDS, _HIDDEN)
        self.norm = torch.nn.RMSNorm(_HIDDEN)
        self.feed = Feed()
        self.output = torch.nn.Linear(_HIDDEN, _WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        found: torch.Tensor = self.output(x + self.feed(self.norm(x)))
        return found


def _plan(sequence: bool) -> dict[str, Any]:
    """The plan in torch's styles."""
    by_columns: Any = ColwiseParallel()
    rows: Any = Shard(1) if sequence else Replicate()
    where: dict[str, Any] = {"output_layouts": rows, "use_local_output": False}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **where),
        "feed.w[13]": by_columns,
        "feed.w2": RowwiseParallel(**where),
        "norm": SequenceParallel(),
        "feed": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "output": ColwiseParallel(input_layouts=rows, use_local_output=False),
    }
    if not sequence:
        del plan["feed"], plan["norm"]
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["feed.w2"] = RowwiseParallel()
    return plan


def training(length: int, sequence: bool, device: str = "cuda") -> list[str]:
    """Faults of a step in bfloat16 under a converted plan, with words and a loss that the ranks
    share, against the whole model in float32."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = Model()
    sharded = copy.deepcopy(whole).to(device, torch.bfloat16)
    whole = copy.deepcopy(sharded).float()
    parallelize_module(sharded, mesh, convert_plan(sharded, mesh, _plan(sequence), strict=True))
    ids, wanted = torch.randint(_WORDS, (2, 2, length)).to(device)
    loss = cross_entropy(whole(ids).flatten(0, 1), wanted.flatten())
    loss.backward()
    with loss_parallel():
        found: Any = cross_entropy(sharded(ids).flatten(0, 1).float(), wanted.flatten())
        found.backward()
    pairs: dict[str, tuple[Any, Any]] = {"loss": (found.full_tensor(), loss)}
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        grad: Any = one.grad
        pairs[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad, other.grad
    return [
        f"{name}: error {error}"
        for name, (one, other) in pairs.items()
        if (error := relative_error(one.detach().float(), other.detach())) > _LIMIT
    ]
