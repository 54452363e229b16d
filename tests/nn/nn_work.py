"""What the tests of the layers run inside the ranks of a pool of five."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_groups import dp_tp_mesh
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import agmm
from agmm.errors import forget_warnings
from agmm.nn import (
    ColumnParallelLinear,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
    SharedGatherParallel,
    full_state_dict,
    gathered,
    load_full_state_dict,
    sum_replicated_gradients,
)
from agmm.testing.reference import relative_error

LIMIT = 1e-10
_SEED = 11


def _close(label: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    error = relative_error(found, wanted)
    return [] if error < LIMIT else [f"{label}: error {error}"]


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Feed(torch.nn.Module):
    """Norm, two projections, their product, the way back; of whole or sharded layers."""

    def __init__(self, make_in: Callable[..., Any], make_out: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(12, dtype=torch.float64)
        self.both = make_in()
        self.back = make_out()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(self.norm(x))
        first, second = both if isinstance(both, tuple) else both.chunk(2, dim=-1)
        out: torch.Tensor = x + self.back(torch.tanh(first) * second)
        return out


def _feeds(
    group: dist.ProcessGroup, bias: bool, hidden: int = 60, **where: Any
) -> tuple[Feed, Feed]:
    """The whole module and the sharded one, both made under the same seed."""
    where = where or {"group": group}
    torch.manual_seed(_SEED)
    whole = Feed(
        lambda: torch.nn.Linear(12, 2 * hidden, bias, dtype=torch.float64),
        lambda: torch.nn.Linear(hidden, 12, bias, dtype=torch.float64),
    )
    torch.manual_seed(_SEED)
    sharded = Feed(
        lambda: ColumnParallelLinear(12, [hidden, hidden], bias, dtype=torch.float64, **where),
        lambda: RowParallelLinear(hidden, 12, bias, dtype=torch.float64, **where),
    )
    return whole, sharded


def layers_against_whole(world_size: int, rows: int, bias: bool, compiled: bool) -> Any:
    """Faults of out, weights and all gradients of sharded layers, against the whole module's."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    whole, sharded = _feeds(group, bias)
    faults = []
    for name, value in full_state_dict(sharded).items():
        if not torch.equal(value, whole.state_dict()[name]):
            faults.append(f"{name} differs from the first")
    x = _random(world_size * rows, 2, 12, seed=1).requires_grad_()
    scale = _random(world_size * rows, 2, 12, seed=2)
    own = slice(rank * rows, (rank + 1) * rows)
    shard = x.detach()[own].clone().requires_grad_()
    wanted = whole(x)
    (wanted * scale).sum().backward()
    torch.compiler.reset()
    run = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    found = run(shard)
    (found * scale[own]).sum().backward()
    torch.compiler.reset()
    sum_replicated_gradients(sharded, group)
    assert x.grad is not None and shard.grad is not None
    faults += _close("out", found, wanted[own])
    faults += _close("x", shard.grad, x.grad[own])
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for parameter in sharded.parameters():
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.copy_(parameter.grad)
    for name, value in full_state_dict(sharded).items():
        gradient = gradients[name]
        assert gradient is not None
        faults += _close(f"gradient of {name}", value, gradient)
    return [f"rank {rank} of {world_size}: {fault}" for fault in faults]


def compiled_without_gradients(world_size: int, fp8: str | None, bias: bool) -> list[str] | None:
    """Faults of compiled layers that need no gradients, against the same layers eager."""
    group = group_of(world_size)
    if group is None:
        return None
    sizes = [16 * world_size, 16 * world_size]
    dtype = torch.float64 if fp8 is None else torch.float32
    made: dict[str, Any] = {"bias": bias, "group": group, "fp8": fp8, "dtype": dtype}
    torch.manual_seed(_SEED)
    both = ColumnParallelLinear(32, sizes, **made)
    one = ColumnParallelLinear(32, sizes[0], **made)
    back = RowParallelLinear(sizes[0], 32, **made)
    layers = torch.nn.ModuleList([both, one, back])

    def block(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        first, second = both(x)
        found: torch.Tensor = back(first + 2 * second + 3 * one(x))
        return found, both.world_size

    shard = _random(4, 2, 32, seed=1 + dist.get_rank(group)).to(dtype)
    wanted, _ = block(shard)
    faults = []
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        torch.compiler.reset()
        with mode():
            found, ranks = run(shard)
        faults += _close(name, found, wanted) + [name] * (ranks != world_size)
    torch.compiler.reset()
    # Outputs of a graph that are views of each other are refused beside parameters as DTensors.
    alone = torch.compile(both, fullgraph=True, backend="aot_eager")
    for i, (out, eager) in enumerate(zip(alone(shard), both(shard), strict=True)):
        faults += _close(f"output {i} of a layer alone", out, eager)
    torch.compiler.reset()
    layers.requires_grad_(False)
    faults += _close("frozen", run(shard)[0], wanted)
    given = shard.clone().requires_grad_()
    (compiled,) = torch.autograd.grad(run(given)[0].sum(), given)
    (eager_grad,) = torch.autograd.grad(block(given)[0].sum(), given)
    faults += _close("x of frozen layers", compiled, eager_grad)
    torch.compiler.reset()
    return faults


def state_round_trip(world_size: int) -> list[str] | None:
    """Faults of a load of a whole state dict, and of copies of the module."""
    group = group_of(world_size)
    if group is None:
        return None
    _, sharded = _feeds(group, True)
    torch.manual_seed(99)
    other, _ = _feeds(group, True)
    for i, parameter in enumerate(other.parameters()):
        parameter.data = _random(*parameter.shape, seed=i)
    state = other.state_dict()
    load_full_state_dict(sharded, state)
    faults = []
    copies = {
        "both.": copy.deepcopy(sharded.both),
        "back.": pickle.loads(pickle.dumps(sharded.back)),
    }
    for prefix, layer in {"": sharded, **copies}.items():
        for name, value in full_state_dict(layer).items():
            if not torch.equal(value, state[prefix + name]):
                faults.append(f"{prefix}{name} differs")
    for name in ("weight_0", "weight_1"):
        part = _part(sharded.both.get_parameter(name))
        if part.shape != (60 // world_size, 12):
            faults.append(f"{name} has the part {tuple(part.shape)}")
    return faults


def bad_state(kind: str) -> tuple[str, bool]:
    """What a load of a bad state dict says, and whether the module is as it was."""
    group = group_of(2)
    if group is None:
        return "", True
    whole, sharded = _feeds(group, True)
    state = {name: value + 1 for name, value in whole.state_dict().items()}
    if kind == "missing":
        del state["back.weight"]
    elif kind == "shape":
        state["both.weight"] = state["both.weight"][:60]
    elif kind == "unknown":
        state["third.weight"] = torch.ones(1)
    before = copy.deepcopy(sharded.state_dict())
    try:
        load_full_state_dict(sharded, state)
    except agmm.InvalidArgument as e:
        after = sharded.state_dict()
        return str(e), all(torch.equal(_part(before[n]), _part(after[n])) for n in before)
    return "no error", False


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Special(torch.nn.Linear):
    """A subclass whose forward is not nn.Linear's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Whole(torch.nn.Module):
    """A parametrization that leaves no part of the weight to a rank."""

    def forward(self, weight: DTensor) -> DTensor:
        return weight.redistribute(placements=[Replicate()])


def bad_layer(kind: str) -> str:
    group = group_of(4)
    if group is None:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu")
    calls: dict[str, Callable[[], object]] = {
        "out_features": lambda: ColumnParallelLinear(8, 10, group=group),
        "one of several": lambda: ColumnParallelLinear(8, [8, 2], group=group),
        "no outputs": lambda: ColumnParallelLinear(8, [], group=group),
        "in_features": lambda: RowParallelLinear(10, 8, group=group),
        "both": lambda: RowParallelLinear(8, 8, group=group, device_mesh=mesh),
        "input": lambda: ColumnParallelLinear(8, 8, group=group)(torch.ones(2, 7)),
        "row input": lambda: RowParallelLinear(8, 8, group=group)(torch.ones(4, 8)),
        "dimension": lambda: parallelize_module(
            torch.nn.Linear(8, 8), mesh, GatherColwiseParallel(sequence_dim=5)
        )(torch.ones(4, 8)),
        "rows": lambda: RowParallelLinear(8, 8, group=group)(torch.ones(6, 2)),
        "dtype": lambda: ColumnParallelLinear(8, 8, group=group)(torch.ones(2, 8).bfloat16()),
        "one dimension": lambda: RowParallelLinear(8, 8, group=group)(torch.ones(2)),
        "style subclass": lambda: parallelize_module(Special(8, 8), mesh, RowwiseScatterParallel()),
        "shared style subclass": lambda: parallelize_module(
            torch.nn.Sequential(torch.nn.Linear(8, 8), Special(8, 8)),
            mesh,
            SharedGatherParallel("0", "1"),
        ),
        "second style": lambda: parallelize_module(
            parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel()),
            mesh,
            GatherColwiseParallel(),
        ),
        "shared style name": lambda: parallelize_module(
            torch.nn.Sequential(), mesh, SharedGatherParallel("wq")
        ),
        "style features": lambda: parallelize_module(
            torch.nn.Linear(8, 8), mesh, GatherColwiseParallel(sequence_dim=0)
        )(torch.ones(4, 7)),
        "dimension of features": lambda: parallelize_module(
            torch.nn.Linear(8, 8), mesh, RowwiseScatterParallel(sequence_dim=-1)
        )(torch.ones(4, 2)),
        "style": lambda: parallelize_module(torch.nn.ReLU(), mesh, GatherColwiseParallel()),
        "style size": lambda: parallelize_module(
            torch.nn.Linear(8, 10), mesh, GatherColwiseParallel()
        ),
        "row style size": lambda: parallelize_module(
            torch.nn.Linear(10, 8), mesh, RowwiseScatterParallel()
        ),
        "no names": lambda: SharedGatherParallel(),
        "sparse": lambda: ColumnParallelLinear(8, 8, group=group)(torch.ones(2, 8).to_sparse()),
        "none": lambda: RowParallelLinear(8, 8, group=group)(None),
        "dtensor": lambda: ColumnParallelLinear(8, 8, group=group)(
            DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
        ),
        "vmap": lambda: torch.vmap(ColumnParallelLinear(8, 8, group=group))(torch.ones(3, 2, 8)),
        "row weight norm": lambda: weight_norm(RowParallelLinear(8, 8, group=group))(
            torch.ones(4, 2)
        ),
        "column weight": lambda: register_parametrization(
            ColumnParallelLinear(8, 16, group=group), "weight", Whole()
        )(torch.ones(4, 8)),
        "row style weight norm": lambda: weight_norm(
            parallelize_module(torch.nn.Linear(8, 8), mesh, RowwiseScatterParallel(sequence_dim=0))
        )(torch.ones(4, 2)),
        "style weight": lambda: register_parametrization(
            parallelize_module(torch.nn.Linear(8, 8), mesh, GatherColwiseParallel(sequence_dim=0)),
            "weight",
            Whole(),
        )(torch.ones(4, 8)),
        "row style none": lambda: parallelize_module(
            torch.nn.Linear(8, 8), mesh, RowwiseScatterParallel()
        )(None),
        "style sparse": lambda: parallelize_module(
            torch.nn.Linear(8, 8), mesh, GatherColwiseParallel(sequence_dim=0)
        )(torch.ones(2, 8).to_sparse()),
    }
    try:
        calls[kind]()
    except agmm.InvalidArgument as e:
        return str(e)
    return "no error"


class _Gate(torch.nn.Module):
    """The product of two activations, each of which may change what it gets."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.act = torch.nn.ReLU(inplace=inplace)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        gate, up = both
        out: torch.Tensor = self.act(gate) * self.act(up)
        return out


def activations_in_place(with_fsdp: bool) -> list[str] | None:
    """Faults of a model whose activations change what the layers return, against one whose do not,
    and what it warns of."""
    world_size = dist.get_world_size()
    mesh = dp_tp_mesh(1, world_size)
    where: Any = {"device_mesh": mesh["tp"], "dtype": torch.float64}
    grads = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inplace in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                ColumnParallelLinear(8, [2 * world_size] * 2, **where),
                _Gate(inplace),
                RowParallelLinear(2 * world_size, 8, **where),
                torch.nn.ReLU(inplace=inplace),
            )
            if with_fsdp:
                for module in (model[0], model[2], model):
                    fully_shard(module, mesh=mesh["dp"])
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(2, 8, generator=generator, dtype=torch.float64).requires_grad_()
            model(x).square().sum().backward()
            found = [x.grad, *(parameter.grad for parameter in model.parameters())]
            grads.append([g.full_tensor() if isinstance(g, DTensor) else g for g in found])
    faults = [str(warning.message) for warning in caught]
    for i, (one, other) in enumerate(zip(*grads, strict=True)):
        if one is None or other is None or not torch.equal(one, other):
            faults.append(f"gradient {i} differs")
    return faults


def mesh_of_two_dimensions() -> list[str]:
    mesh = DeviceMesh("cpu", torch.arange(5).view(5, 1), mesh_dim_names=("tp", "dp"))
    messages = []
    for call in (
        lambda: ColumnParallelLinear(5, 5, device_mesh=mesh),
        lambda: RowwiseScatterParallel()._apply(torch.nn.Linear(5, 5), mesh),
    ):
        try:
            call()
        except agmm.InvalidArgument as e:
            messages.append(str(e))
    layer = ColumnParallelLinear(5, 5, device_mesh=mesh["tp"])
    return [*messages, layer.extra_repr()]


def layer_facts(world_size: int) -> dict[str, Any] | None:
    group = group_of(world_size)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    column = ColumnParallelLinear(8, [12, 24], group=group)
    single = ColumnParallelLinear(8, 12, False, device_mesh=mesh, dtype=torch.bfloat16)
    row = RowParallelLinear(12, 8, group=group.group_name)
    meta = RowParallelLinear(12, 8, group=group, device="meta")
    outs = column(torch.ones(2, 8))
    one = single(torch.ones(2, 8, dtype=torch.bfloat16))
    return {
        "column": repr(column),
        "single": repr(single),
        "row": repr(row),
        "meta": meta.weight.is_meta and meta.weight.to_local().shape == (8, 12 // world_size),
        "shapes": [tuple(out.shape) for out in (*outs, one, row(outs[0]))],
        "dtype": one.dtype,
    }


class Attention(torch.nn.Module):
    """Shaped as torchtitan's: [batch, sequence, features] in and out, heads on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = torch.nn.Linear(8, 24, bias=True, dtype=torch.float64)
        self.wk = torch.nn.Linear(8, 12, bias=False, dtype=torch.float64)
        self.wv = torch.nn.Linear(8, 12, bias=True, dtype=torch.float64)
        self.wo = torch.nn.Linear(24, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        projected: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8, dtype=torch.float64)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.attention(self.norm(x))
        return out


class FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(8, 12, dtype=torch.float64)
        self.w3 = torch.nn.Linear(8, 12, dtype=torch.float64)
        self.w2 = torch.nn.Linear(12, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class TitanBlock(torch.nn.Module):
    """A block with the names that docs/layers.md uses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(8, dtype=torch.float64)
        self.attention = Attention()
        self.ffn_norm = torch.nn.LayerNorm(8, dtype=torch.float64)
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


def _documented() -> list[str]:
    page = Path(__file__).resolve().parents[2] / "docs" / "layers.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def documented_plan() -> float:
    """The error of a model that was sharded as docs/layers.md says."""
    group = group_of(2)
    if group is None:
        return 0.0
    torch.manual_seed(_SEED)
    whole = TitanBlock()
    block = copy.deepcopy(whole)
    exec(_documented()[0], {"block": block, "mesh": DeviceMesh.from_group(group, "cpu")})
    x = _random(2, 6, 8, seed=1)
    rank = dist.get_rank(group)
    return relative_error(block(x.chunk(2, 1)[rank]), whole(x).detach().chunk(2, 1)[rank])


def documented_layers() -> list[str]:
    """Faults of the gradients of the module in docs/layers.md; of all five ranks."""
    rank = dist.get_rank()
    (code,) = (one for one in _documented() if "class SwiGLU" in one)
    definition, use = code.split("model = SwiGLU", 1)
    torch.manual_seed(_SEED)
    names: dict[str, Any] = {"hidden": 12, "ffn": 20, "x_shard": torch.randn(10, 12).chunk(5)[rank]}
    exec(definition, names)
    names["whole_model"] = names["SwiGLU"](12, 20)
    state = full_state_dict(names["whole_model"])
    names["whole_model"] = mock.Mock(state_dict=lambda: state)
    exec(f"model = SwiGLU{use}", names)
    checkpoint, model = names["checkpoint"], names["model"]
    faults = [name for name, value in state.items() if not torch.equal(checkpoint[name], value)]
    return faults + [name for name, p in model.named_parameters() if p.grad is None]


def _plan(shared: bool, sequence_dim: int, use_local_output: bool) -> dict[str, Any]:
    options: Any = {"sequence_dim": sequence_dim}
    plan: dict[str, Any] = {
        "norm": SequenceParallel(**options),
        "attention.wo": RowwiseScatterParallel(use_local_output=use_local_output, **options),
    }
    if shared:
        return {**plan, "attention": SharedGatherParallel("wq", "wk", "wv", **options)}
    return {**plan, **{f"attention.w{n}": GatherColwiseParallel(**options) for n in "qkv"}}


def styles_against_whole(
    world_size: int, batch: int, shared: bool, compiled: bool = False, local: bool = True
) -> tuple[list[str], int] | None:
    """Faults of a model that was sharded by a plan, and how many gathers its forward made."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    rows = 3
    torch.manual_seed(_SEED)
    whole = Block()
    with torch.no_grad():
        whole.norm.weight.copy_(_random(8, seed=3))
    sharded = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(sharded, mesh, _plan(shared, 1, local))
    x = _random(batch, world_size * rows, 8, seed=1).requires_grad_()
    scale = _random(batch, world_size * rows, 8, seed=2)
    own = slice(rank * rows, (rank + 1) * rows)
    shard = x.detach()[:, own].clone().requires_grad_()
    wanted = whole(x)
    (wanted * scale).sum().backward()
    torch.compiler.reset()
    run = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
    given: torch.Tensor = shard
    if not local:
        given = DTensor.from_local(shard, mesh, [Shard(1)])
    gather = mock.Mock(wraps=agmm.all_gather_matmul)
    counted = mock.patch.object(gathered, "all_gather_matmul", gather)
    with contextlib.nullcontext() if compiled else counted:  # a mock cannot be traced
        found = run(given)
    if isinstance(found, DTensor):
        assert found.placements == (Shard(1),) and not local
        found = found.to_local()
    (found * scale[:, own]).sum().backward()
    torch.compiler.reset()
    assert x.grad is not None and shard.grad is not None
    faults = _close("out", found, wanted[:, own]) + _close("x", shard.grad, x.grad[:, own])
    for (name, one), (_, other) in zip(
        sharded.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert isinstance(one, DTensor) and isinstance(one.grad, DTensor) and other.grad is not None
        faults += _close(f"gradient of {name}", one.grad.full_tensor(), other.grad)
    state = full_state_dict(sharded)
    faults += [n for n, value in whole.state_dict().items() if not torch.equal(value, state[n])]
    load_full_state_dict(sharded, {name: value + 1 for name, value in state.items()})
    for name, value in full_state_dict(sharded).items():
        if not torch.equal(value, state[name] + 1):
            faults.append(f"{name} differs after the load")
    bias = sharded.attention.wo.bias
    assert isinstance(bias, DTensor) and bias.placements == (Replicate(),)
    return [f"rank {rank} of {world_size}: {fault}" for fault in faults], gather.call_count


def gathered_before(world_size: int) -> tuple[list[str], list[str]] | None:
    """Faults of a plan that keeps torch's `PrepareModuleInput`, and what it warns of."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(_SEED)
    whole = FeedForward()
    sharded = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(group, "cpu")
    prepared = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    by_columns, by_rows = GatherColwiseParallel(), RowwiseScatterParallel()
    plan = {"": prepared, "w1": by_columns, "w3": by_columns, "w2": by_rows}
    parallelize_module(sharded, mesh, plan)
    x = _random(2, 2 * world_size, 8, seed=1)
    own = slice(2 * dist.get_rank(group), 2 * dist.get_rank(group) + 2)
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sharded(x[:, own])
    return _close("out", found, whole(x)[:, own]), [str(one.message) for one in caught]


def shared_outputs_are_not_stale(world_size: int) -> list[bool] | None:
    """Whether each projection belongs to the tensor that it was called with."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(_SEED)
    whole = Attention()
    sharded = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(sharded, mesh, SharedGatherParallel("wq", "wk", sequence_dim=0))
    rank = dist.get_rank(group)
    good = []

    def check(name: str, x: torch.Tensor) -> None:
        linear, weight = sharded.get_submodule(name), whole.get_submodule(name)
        wanted = weight(x.repeat(world_size, 1)).chunk(world_size, -1)[rank]
        good.append(torch.allclose(linear(x), wanted, atol=1e-12))

    one, two = _random(2, 8, seed=1), _random(2, 8, seed=2)
    for name, x in (("wq", one), ("wk", two), ("wq", two), ("wq", two), ("wk", one), ("wk", one)):
        check(name, x)
    return good
