"""What the tests of rows that ranks cannot share evenly, and of vocabularies that they share, run
inside the ranks of a pool of five: a whole model, from token ids to its loss."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu

import agmm
from agmm.errors import forget_warnings
from agmm.nn import GatherColwiseParallel, RowwiseScatterParallel, SharedGatherParallel
from agmm.testing.reference import relative_error

_HIDDEN, _LIMIT = 16, 1e-10


class Feed(torch.nn.Module):
    def __init__(self, hidden: int = _HIDDEN, between: int = 32) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(hidden, between, dtype=torch.float64)
        self.w3 = torch.nn.Linear(hidden, between, dtype=torch.float64)
        self.w2 = torch.nn.Linear(between, hidden, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return found


class Model(torch.nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, _HIDDEN, dtype=torch.float64)
        self.norms = torch.nn.ModuleList(
            torch.nn.LayerNorm(_HIDDEN, dtype=torch.float64) for _ in range(2)
        )
        self.feed = Feed()
        self.output = torch.nn.Linear(_HIDDEN, words, bias=False, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.feed(self.norms[0](x))
        found: torch.Tensor = self.output(self.norms[1](x))
        return found


def _plan(shared: bool, words: int, ranks: int) -> dict[str, Any]:
    output: Any = GatherColwiseParallel(use_local_output=False)
    if words % ranks:
        output = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    feed: dict[str, Any] = {
        "feed.w1": GatherColwiseParallel(use_local_output=False),
        "feed.w3": GatherColwiseParallel(use_local_output=False),
    }
    if shared:
        feed = {"feed": SharedGatherParallel("w1", "w3")}
    return {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "norms.*": SequenceParallel(),
        **feed,
        "feed.w2": RowwiseScatterParallel(use_local_output=False),
        "output": output,
    }


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model(world_size: int, words: int, length: int, shared: bool, tied: bool) -> list[str] | None:
    """Faults of a step of a model whose embedding and output share out their words, and whose
    residual stream is a DTensor."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(3)
    whole = Model(words)
    if tied:
        whole.output.weight = whole.embedding.weight
    sharded = copy.deepcopy(whole)
    parallelize_module(sharded, mesh, _plan(shared, words, world_size))
    if tied:  # each style has made a parameter of its own
        assert sharded.output.weight is not sharded.embedding.weight
        sharded.output.weight = sharded.embedding.weight
    ids, wanted = torch.randint(0, words, (2, 2, length))
    wanted[0, 0] = -100
    logits = whole(ids)
    loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
    loss.backward()
    with loss_parallel():
        found = sharded(ids)
        found_loss = cross_entropy(found.flatten(0, 1), wanted.flatten())
        found_loss.backward()
    pairs = {"logits": (_full(found), logits), "loss": (_full(found_loss), loss)}
    others = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        pairs[f"gradient of {name}"] = _full(parameter.grad), others[name].grad
    return [
        f"{name}: {one} for {other}"
        for name, (one, other) in pairs.items()
        if one is None or other is None or relative_error(one.detach(), other.detach()) > _LIMIT
    ]


def scattered(
    world_size: int, length: int, dim: int, local: bool, compiled: bool = False
) -> list[Any] | None:
    """Faults of one scatter style, and what it warns of."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    torch.manual_seed(4)
    whole = torch.nn.Linear(8, 6, dtype=torch.float64)
    style = RowwiseScatterParallel(sequence_dim=dim, use_local_output=local)
    sharded: Any = parallelize_module(copy.deepcopy(whole), mesh, style)
    x = torch.randn(*((2, length) if dim == 1 else (length, 2)), 8, dtype=torch.float64)
    features = x.chunk(world_size, -1)[rank].clone().requires_grad_()
    scale = torch.randn(*x.shape[:-1], 6, dtype=torch.float64)
    given = x.clone().requires_grad_()
    wanted = whole(given)
    (wanted * scale).sum().backward()
    part = DTensor.from_local(wanted, mesh, [Replicate()]).redistribute(mesh, [Shard(dim)])
    own = DTensor.from_local(scale, mesh, [Replicate()]).redistribute(mesh, [Shard(dim)])
    if compiled:
        torch.compiler.reset()
        sharded = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = sharded(features)
        except agmm.InvalidArgument as error:
            return [str(error)]
        sharded(features)
    shard = found if local else found.to_local()
    (shard * own.to_local()).sum().backward()
    faults: list[Any] = [str(warning.message) for warning in caught]
    if not local and found.shape != wanted.shape:
        faults.append(f"{found.shape} of the whole")
    assert given.grad is not None and whole.weight.grad is not None
    pairs: dict[str, tuple[Any, Any]] = {
        "output": (shard, part.to_local()),
        "x": (features.grad, given.grad.chunk(world_size, -1)[rank]),
        "weight": (_full(sharded.weight.grad), whole.weight.grad),
        "bias": (_full(sharded.bias.grad), whole.bias.grad),
    }
    for name, (one, other) in pairs.items():
        if one.shape != other.shape or not torch.allclose(one, other):
            faults.append(f"{name}: {one} for {other}")
    return faults


def gathered_compiled(length: int) -> list[str] | None:
    """Faults of two gathers of a DTensor whose shards differ in size, compiled."""
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(6)
    feed = Feed()
    x = torch.randn(2, length, _HIDDEN, dtype=torch.float64)
    given = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
    plan: dict[str, Any] = {"": SharedGatherParallel("w1", "w3")}
    plan["w2"] = RowwiseScatterParallel(use_local_output=False)
    sharded: Any = parallelize_module(copy.deepcopy(feed), mesh, plan)
    torch.compiler.reset()
    found = torch.compile(sharded, fullgraph=True, backend="aot_eager")(given)
    (found.to_local() * 2).sum().backward()
    wanted = feed(x)
    (wanted * 2).sum().backward()
    pairs = {"output": (_full(found), wanted)}
    for (name, one), other in zip(sharded.named_parameters(), feed.parameters(), strict=True):
        pairs[name] = _full(one.grad), other.grad
    return [
        name for name, (one, other) in pairs.items() if relative_error(one, other.detach()) > _LIMIT
    ]


def refused(kind: str) -> str:
    """What a strict style says of rows that two ranks cannot share evenly."""
    group = group_of(2)
    if group is None:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu")
    style: Any = GatherColwiseParallel(strict=True)
    x: Any = DTensor.from_local(torch.ones(2, 7, 8), mesh, [Replicate()])
    if kind == "scatter":
        style = RowwiseScatterParallel(strict=True, use_local_output=False)
        x = torch.ones(2, 7, 4)
    linear = parallelize_module(torch.nn.Linear(8, 8), mesh, style)
    linear(x[:, :6])
    try:
        linear(x)
    except agmm.Unsupported as error:
        return str(error)
    return "no error"


def in_fp8(length: int) -> list[str] | None:
    """Faults of fp8 styles, whose scales of rows depend on no other row."""
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(5)
    whole = Feed(16, 32).float()
    outs = []
    x = torch.randn(2, length, 16)
    even = torch.cat([x, torch.ones(2, length % 2, 16)], 1)
    for given in (x, even):
        sharded = copy.deepcopy(whole)
        options: dict[str, Any] = {"fp8": "rowwise"}
        plan = {"w1": GatherColwiseParallel(**options), "w3": GatherColwiseParallel(**options)}
        by_rows = RowwiseScatterParallel(use_local_output=False, **options)
        parallelize_module(sharded, mesh, {**plan, "w2": by_rows})
        whole_x = DTensor.from_local(given, mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
        outs.append(_full(sharded(whole_x))[:, :length])
    return [] if torch.equal(*outs) else [f"{outs[0]} for {outs[1]}"]
