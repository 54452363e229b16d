"""What the tests of layers with experts run inside the ranks, beside an unsharded model of plain
torch that computes one expert after the other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_groups import dp_tp_mesh, mesh_over
from rank_work import group_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from agmm.nn import (
    Choices,
    MoE,
    full_state_dict,
    load_balance_loss,
    load_full_state_dict,
    parameter_groups,
    sum_replicated_gradients,
)
from agmm.nn.router import load_of
from agmm.testing.reference import relative_error

HIDDEN, INNER, EXPERTS, SHARED, TOKENS = 6, 8, 8, 8, 24
"""The sizes of the models, and the tokens of all ranks together."""
STEPS = 6
EXACT = 1e-9
Faults = list[str] | None


class Kind(NamedTuple):
    """A mixture of experts, and how it is divided."""

    k: int = 2
    score: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    has_choice_bias: bool = False
    shared: bool = False
    sliced: bool = False
    activation: str = "silu_mul"
    options: tuple[tuple[str, Any], ...] = ()
    """What the unsharded model has no use for."""
    wide: int = 1
    """How many times as large the features are."""

    def make(self, dtype: torch.dtype = torch.float64, **where: Any) -> MoE:
        """The layer, with the first values of a seed."""
        torch.manual_seed(7)
        given: Any = {**self._asdict(), **dict(self.options)}
        del given["options"], given["shared"], given["wide"]
        given["shared_features"] = SHARED * self.wide if self.shared else None
        wide = self.wide
        return MoE(HIDDEN * wide, INNER * wide, EXPERTS, dtype=dtype, **given, **where)


class Whole(torch.nn.Module):
    """The unsharded model, with the names of parameters that the layer has."""

    def __init__(self, kind: Kind, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.kind = kind
        for name, value in values.items():
            self.register_parameter(name.replace(".", "-"), torch.nn.Parameter(value.clone()))

    def named(self, name: str) -> torch.Tensor:
        return self.get_parameter(name.replace(".", "-"))

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            n.replace("-", "."): p.grad for n, p in self.named_parameters() if p.grad is not None
        }

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The results of [tokens, hidden], and the loss that balances experts."""
        kind = self.kind
        logits = x @ self.named("router.weight").t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if kind.score == "softmax" else logits.sigmoid()
        ids = (scores if bias is None else scores + bias).topk(kind.k, -1).indices
        topk = scores.gather(1, ids)
        if kind.normalised:
            topk = topk / topk.sum(-1, keepdim=True)
        topk = topk * kind.scale
        out = torch.zeros_like(x)
        for choice in range(kind.k):
            rows = [self._expert(row, int(e)) for row, e in zip(x, ids[:, choice], strict=True)]
            out = out + topk[:, choice, None].to(x.dtype) * torch.stack(rows)
        if kind.shared:
            out = out + self._gated(x, "shared_expert.{}_proj.weight", None)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        shares = counts.to(scores.dtype) / ids.numel()
        return out, EXPERTS * (shares * scores.mean(0)).sum(), counts

    def _expert(self, row: torch.Tensor, expert: int) -> torch.Tensor:
        return self._gated(row, "experts.{}_proj", expert)

    def _gated(self, x: torch.Tensor, names: str, expert: int | None) -> torch.Tensor:
        parts = [self.named(names.format(part)) for part in ("gate", "up", "down")]
        gate, up, down = parts if expert is None else [part[expert] for part in parts]
        found = x @ gate.t()
        if self.kind.activation == "gelu_tanh_mul":
            found = functional.gelu(found, approximate="tanh")
        else:
            found = functional.silu(found)
        return (found * (x @ up.t())) @ down.t()


def _close(
    label: str, found: torch.Tensor, wanted: torch.Tensor, limit: float = EXACT
) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{label}: found {tuple(found.shape)}, wanted {tuple(wanted.shape)}"]
    error = relative_error(found.detach(), wanted.detach())
    return [] if error < limit else [f"{label}: error {error}"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _batch(step: int, dtype: torch.dtype, wide: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, HIDDEN * wide, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.tanh(x.roll(1, 1) * 2).to(dtype)


def _choice_bias(kind: Kind, layer: MoE) -> torch.Tensor | None:
    if not kind.has_choice_bias:
        return None
    bias: torch.Tensor = layer.router.choice_bias
    bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS, device=bias.device))
    return bias.to(torch.float64)


def training(world_size: int, kind: Kind, dtype: torch.dtype) -> Faults:
    """Faults of steps of training on CPU ranks."""
    group = group_of(world_size)
    return None if group is None else training_faults(group, kind, dtype, "cpu")


def training_faults(
    group: dist.ProcessGroup, kind: Kind, dtype: torch.dtype, device: str
) -> list[str]:
    """Faults of steps of training: the losses, the parameters at last, and the load."""
    world_size, rank = group.size(), group.rank()
    limit = EXACT if dtype == torch.float64 else 0.05
    layer = kind.make(dtype, group=group, device=device)
    values = full_state_dict(layer)
    bias = _choice_bias(kind, layer)
    values.pop("router.choice_bias", None)
    whole = Whole(kind, values)
    optimizers = [
        torch.optim.SGD(parameter_groups(model), lr=0.5, momentum=0.5) for model in (layer, whole)
    ]
    faults, losses = [], []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, target = (t.to(device) for t in _batch(0, dtype, kind.wide))
        out, balance, counts = whole(x, bias)
        loss = (out - target).square().mean() + 0.1 * balance
        loss.backward()
        own_x, own_target = (t.chunk(world_size)[rank] for t in (x, target))
        own_out, load = layer(own_x, return_load=True)
        own_loss = (own_out - own_target).square().sum() / target.numel()
        own_loss = own_loss + 0.1 * load_balance_loss(load, group)
        own_loss.backward()
        sum_replicated_gradients(layer, group)
        sums = torch.cat([own_loss.detach()[None].double(), load.tokens_per_expert.double()])
        dist.all_reduce(sums, group=group)
        faults += _close(f"loss of step {step}", sums[0], loss.double(), limit)
        if dtype == torch.float64:
            faults += _close(f"load of step {step}", sums[1:], counts.double())
            faults += _gradient_faults(layer, whole)
        losses.append(float(loss))
        for optimizer in optimizers:
            optimizer.step()
    for name, value in full_state_dict(layer).items():
        if name != "router.choice_bias":
            faults += _close(name, value, whole.named(name), limit)
    if losses[-1] > losses[0]:
        faults.append(f"found losses {losses}, wanted ones that become smaller")
    return faults


def _gradient_faults(layer: torch.nn.Module, whole: Whole) -> list[str]:
    wanted, faults = whole.gradients(), []
    for name, parameter in layer.named_parameters():
        grad: Any = parameter.grad
        if isinstance(parameter, DTensor) and not isinstance(grad, DTensor):
            faults.append(f"gradient of {name}: found {type(grad).__name__}, wanted a DTensor")
            continue
        found = grad.full_tensor() if isinstance(grad, DTensor) else grad
        faults += _close(f"gradient of {name}", found, wanted[name])
    return faults


def uneven(world_size: int, compiled: bool) -> Faults:
    """Faults where the ranks hold different numbers of tokens, one of them none, in a shape of
    several dimensions, with a router of the caller's own that drops choices."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, counts = group.rank(), [3 * r for r in range(world_size)]
    torch.manual_seed(3)
    table = torch.randint(-2, EXPERTS, (sum(counts), 3))
    topk = torch.rand(sum(counts), 3, dtype=torch.float64)
    x = torch.randn(sum(counts), HIDDEN, dtype=torch.float64)
    begin = sum(counts[:rank])
    own = slice(begin, begin + counts[rank])

    class Router(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return topk[own], table[own]

    torch.manual_seed(7)
    layer = MoE(HIDDEN, INNER, EXPERTS, router=Router(), group=group, dtype=torch.float64)
    whole = Whole(Kind(), full_state_dict(layer))
    torch.compiler.reset()
    call: Any = layer
    if compiled:
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    given = x[own].view(-1, 3, HIDDEN)
    out, load = call(given, tokens_per_rank=counts, return_load=True)
    wanted = torch.zeros_like(x)
    for t, row in enumerate(table.tolist()):
        for choice, expert in enumerate(row):
            if expert >= 0:
                wanted[t] += topk[t, choice] * whole._expert(x[t], expert)
    faults = _close("out", out, wanted[own].view(given.shape)) if counts[rank] else []
    ids = table[own]
    if load.tokens_per_expert.tolist() != torch.bincount(ids[ids >= 0], minlength=EXPERTS).tolist():
        faults.append(f"found a load of {load.tokens_per_expert.tolist()}")
    return faults


def compiled_is_eager(world_size: int, kind: Kind) -> Faults:
    """Faults of the compiled layer, without a break in the graph."""
    group = group_of(world_size)
    if group is None:
        return None
    layer, (x, target) = kind.make(group=group), _batch(0, torch.float64)
    own_x, own_target = (t.chunk(world_size)[group.rank()] for t in (x, target))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for call in (layer, compiled):
        layer.zero_grad()
        out, load = call(own_x, return_load=True)
        ((out - own_target).square().sum() + load.scores_per_expert.square().sum()).backward()
        found.append([out, load.tokens_per_expert, *(p.grad for p in layer.parameters())])
    torch.compiler.reset()
    faults = []
    for i, (one, other) in enumerate(zip(*found, strict=True)):
        faults += _close(f"result {i}", _local(other), _local(one), 1e-12)
    return faults


def checkpoints(folder: str, sliced: bool) -> Faults:
    """Faults of checkpoints in a pool of four: copies, whole values, and files that other ranks
    and the other way of dividing take up."""
    mesh, kind = dp_tp_mesh(2, 2), Kind(sliced=sliced, shared=True)
    layer = kind.make(device_mesh=mesh["tp"])
    values = full_state_dict(layer)
    x = _batch(0, torch.float64)[0].chunk(2)[mesh["tp"].get_local_rank()]
    wanted = layer(x)
    faults = [
        f"{name}: found {tuple(value.shape)}"
        for name, value in values.items()
        if name.startswith("experts") and sorted(value.shape) != sorted((EXPERTS, INNER, HIDDEN))
    ]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        faults += _close("a copy", copied(x), wanted)
    other = kind.make(device_mesh=mesh["tp"])
    kept = list(other.parameters())
    other.load_state_dict({name: 2 * value for name, value in values.items()})
    faults += [f for n, v in full_state_dict(other).items() for f in _close(n, v, 2 * values[n])]
    load_full_state_dict(other, values)
    faults += _close("loaded whole", other(x), wanted)
    if any(one is not parameter for one, parameter in zip(kept, other.parameters(), strict=True)):
        faults.append("found other parameters after they were loaded")
    dcp.save(get_model_state_dict(layer), checkpoint_id=folder)
    wide = mesh_over(tuple(range(4)))
    moved = kind._replace(sliced=not sliced).make(device_mesh=wide)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.zero_()
    state = get_model_state_dict(moved)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(moved, state)
    return faults + [f for n, v in full_state_dict(moved).items() for f in _close(n, v, values[n])]


def with_fsdp(sliced: bool) -> Faults:
    """Faults under FSDP2 over other ranks, in a pool of four."""
    mesh, kind = dp_tp_mesh(2, 2), Kind(sliced=sliced, shared=True)
    layer = kind.make(device_mesh=mesh["tp"])
    whole = Whole(kind, full_state_dict(layer))
    fully_shard(layer, mesh=mesh["dp"])
    tp, dp = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    x = _batch(0, torch.float64)[0]
    out = layer(x.chunk(2)[dp].chunk(2)[tp])
    wanted = whole(x, None)[0]
    faults = _close("out", out, wanted.chunk(2)[dp].chunk(2)[tp])
    out.square().sum().backward()
    sum_replicated_gradients(layer, mesh["tp"])
    (wanted.square().sum() / 2).backward()  # FSDP2 takes the mean over its ranks
    faults += _gradient_faults(layer, whole)
    values = full_state_dict(layer)
    return faults + [f for n, v in values.items() for f in _close(n, v, whole.named(n))]


# --- modules of others, under the style ---


class Packed(torch.nn.Module):
    """Experts as transformers stores them."""

    is_transposed = False
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: torch.nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()
        shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            drawn = torch.randn(EXPERTS, *shape, dtype=torch.float64) / 3
            drawn = drawn.transpose(1, 2).contiguous() if self.is_transposed else drawn
            self.register_parameter(name, torch.nn.Parameter(drawn))

    def matrices(self, expert: int) -> list[torch.Tensor]:
        found = [self.gate_up_proj[expert], self.down_proj[expert]]
        wide, down = [one.t() for one in found] if self.is_transposed else found
        return [*wide.chunk(2), down]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up, down = self.matrices(expert)
            share = torch.where(ids == expert, topk, 0).sum(1)
            out = out + share[:, None] * ((functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t())
        return out


class Transposed(Packed):
    """Experts whose matrices are [K, N]."""

    is_transposed = True


class Titan(Packed):
    """Experts as torchtitan stores them."""

    def __init__(self) -> None:
        super().__init__()
        gate, up = self.gate_up_proj.detach().chunk(2, 1)
        self.w1, self.w3 = torch.nn.Parameter(gate.clone()), torch.nn.Parameter(up.clone())
        self.w2 = self.down_proj
        del self.gate_up_proj, self.down_proj, self.act_fn

    def matrices(self, expert: int) -> list[torch.Tensor]:
        return [self.w1[expert], self.w3[expert], self.w2[expert]]


class Inner(Packed):
    """Experts as torchtitan 0.3 stores them."""

    def __init__(self) -> None:
        super().__init__()
        gate, up = self.gate_up_proj.detach().chunk(2, 1)
        self.w1_EFD, self.w3_EFD = (torch.nn.Parameter(one.clone()) for one in (gate, up))
        self.w2_EDF = self.down_proj
        del self.gate_up_proj, self.down_proj, self.act_fn

    def matrices(self, expert: int) -> list[torch.Tensor]:
        return [self.w1_EFD[expert], self.w3_EFD[expert], self.w2_EDF[expert]]


class Routed(torch.nn.Module):
    """Experts inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_experts = Inner()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner_experts(x, ids, topk)
        return found


MODULES: dict[str, Callable[[], Any]] = {
    "packed": Packed,
    "transposed": Transposed,
    "titan": Titan,
    "routed": Routed,
}


def styled(
    which: str, world_size: int, make: Callable[..., Any], options: dict[str, Any]
) -> Faults:
    """Faults of a module under the style, beside the module itself."""
    mesh = mesh_over(tuple(range(world_size)))
    if mesh.get_coordinate() is None:
        return None
    torch.manual_seed(5)
    whole = MODULES[which]()
    model: Any = torch.nn.ModuleDict({"experts": copy.deepcopy(whole)})
    parallelize_module(model, mesh, {"experts": make(**options)})
    rank = mesh.get_local_rank()
    x, cot = _batch(1, torch.float64)
    ids = torch.randint(EXPERTS, (TOKENS, 3))
    topk = torch.rand(TOKENS, 3, dtype=torch.float64)
    own = [t.chunk(world_size)[rank].clone() for t in (x, ids, topk)]
    leaves = [(own[0], own[2]), (x, topk)]
    for leaf in (leaf for pair in leaves for leaf in pair):
        leaf.requires_grad_()
    faults = []
    out: Any
    if which == "routed":  # tokens of two dimensions
        folded = (one.unflatten(0, (2, -1)) for one in (own[0], own[2], own[1]))
        out = model["experts"](*folded, torch.zeros(EXPERTS))
    elif which == "titan":  # the router's weights first, and its counts behind
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        out = model["experts"](own[0], own[2], own[1], num_tokens_per_expert=counts)
    else:
        out = model["experts"](own[0], top_k_index=own[1], top_k_weights=own[2])
    if options.get("use_local_output") is False:
        faults += [] if out.placements == (Shard(0),) else [f"found {out.placements}"]
        out = out.to_local()
    out = out.flatten(0, -2)
    wanted = whole(x, ids, topk)
    faults += _close("out", out, wanted.chunk(world_size)[rank])
    (out * cot.chunk(world_size)[rank]).sum().backward()
    (wanted * cot).sum().backward()
    for name, found, leaf in zip(("x", "topk"), *leaves, strict=True):
        assert found.grad is not None and leaf.grad is not None
        faults += _close(f"gradient of {name}", found.grad, leaf.grad.chunk(world_size)[rank])
    found_grads = _full_gradients(model)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        if name in found_grads:
            faults += _close(f"gradient of {name}", found_grads[name], parameter.grad)
    values = full_state_dict(model)
    wanted_names = [f"experts.{name}" for name, _ in whole.named_parameters()]
    if sorted(values) != sorted(wanted_names):
        return [*faults, f"found {sorted(values)}, wanted {sorted(wanted_names)}"]
    for name, value in values.items():
        faults += _close(name, value, whole.get_parameter(name.removeprefix("experts.")))
    load_full_state_dict(model, {name: value / 2 for name, value in values.items()})
    for name, value in full_state_dict(model).items():
        faults += _close(f"half of {name}", value, values[name] / 2)
    return faults


def _full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the whole; of gate and up that were taken apart as one."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name.removeprefix("experts.")] = grad.full_tensor()
    if "gate_proj" in found:
        gate, up, down = (found[f"{name}_proj"] for name in ("gate", "up", "down"))
        dim = 1 if gate.shape[1] == INNER and down.shape[2] == INNER else 2
        return {"gate_up_proj": torch.cat([gate, up], dim), "down_proj": down}
    return found


def load_of_ranks() -> Faults:
    """Faults of a loss that balances experts, of which the ranks have different choices."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    scores = torch.full((4, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    even = Choices(scores[:, :1], torch.arange(rank * 4, rank * 4 + 4)[:, None] % EXPERTS, scores)
    one = Choices(scores[:, :1], torch.zeros(4, 1, dtype=torch.int64), scores)
    faults = []
    for name, choices in (("even", even), ("one", one)):
        part = load_balance_loss(load_of(choices, EXPERTS))
        faults += _close(name, part, torch.tensor(1 / ranks, dtype=torch.float64))
    return faults
