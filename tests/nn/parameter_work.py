"""What the tests of parameters run inside the ranks: one action after another on agmm's layers, and
on torch.nn.Linear under torch's own styles."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import dp_tp_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize, prune
from torch.utils.hooks import unserializable_hook

from agmm.nn import (
    ColumnParallelLinear,
    Experts,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
    parameter_groups,
    sum_replicated_gradients,
)
from agmm.testing.reference import relative_error

K, N, ROWS, EXPERTS = 32, 64, 4, 4
"""Features in, features out of all outputs together, rows on each rank, and experts."""


class Net(torch.nn.Module):
    """Layers with the same input, under names as they stand in a model."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs: list[torch.Tensor] = []
        for layer in self.layers:
            out = layer(x)
            outs += out if isinstance(out, tuple) else [out]
        return tuple(outs)


def _mesh() -> DeviceMesh:
    return dp_tp_mesh(1, dist.get_world_size())["tp"]


def _styled(k: int, n: int, style: Any) -> torch.nn.Module:
    return parallelize_module(torch.nn.Linear(k, n), _mesh(), style)


class FixedExperts(Experts):
    """Experts of choices that depend on the number of the row alone."""

    in_features = K

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ids, topk = choices(x)
        return super().forward(x, ids, topk)


def choices(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, and their weights."""
    ids = (torch.arange(x.shape[0])[:, None] * 3 + torch.arange(2)) % EXPERTS
    return ids, torch.tensor([0.25, 0.75]).expand(x.shape[0], 2)


MAKERS: dict[str, Callable[[], torch.nn.Module]] = {
    "column": lambda: ColumnParallelLinear(K, N, device_mesh=_mesh()),
    "outputs": lambda: ColumnParallelLinear(K, [N // 2, N // 2], device_mesh=_mesh()),
    "row": lambda: RowParallelLinear(N, K, device_mesh=_mesh()),
    "fp8": lambda: ColumnParallelLinear(
        K, [2 * N, 2 * N], device_mesh=_mesh(), fp8="tensorwise", bias=False
    ),
    "experts": lambda: FixedExperts(K, N, EXPERTS, device_mesh=_mesh()),
    "sliced experts": lambda: FixedExperts(K, N, EXPERTS, sliced=True, device_mesh=_mesh()),
    "gather style": lambda: _styled(K, N, GatherColwiseParallel(sequence_dim=0)),
    "scatter style": lambda: _styled(N, K, RowwiseScatterParallel(sequence_dim=0)),
    "torch's gather": lambda: _styled(K, N, ColwiseParallel(input_layouts=Shard(0))),
    "torch's scatter": lambda: _styled(N, K, RowwiseParallel(output_layouts=Shard(0))),
}


def make(kind: str) -> Net:
    """A model of one layer; a tied one of two, which share their weights' first."""
    torch.manual_seed(3)
    layers: list[Any] = [MAKERS[kind.removeprefix("tied ")]()]
    if kind.startswith("tied "):
        layers.append(MAKERS[kind.removeprefix("tied ")]())
        name, shared = next(layers[0].named_parameters())
        setattr(layers[1], name, shared)
    return Net(*layers)


# --- what is done to a model: each returns the model that is looked at afterwards ---


def _clones(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _loaded(model: Any, **options: Any) -> Any:
    model.load_state_dict(_clones(model), **options)
    return model


def _loaded_with_parameters(model: Any) -> Any:
    """The model with the parameters of another one, which both then share."""
    other = copy.deepcopy(model)
    model.load_state_dict(other.state_dict(keep_vars=True), assign=True)
    own = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one is given for one, given in own)
    return model


def _loaded_with_swap(model: Any) -> Any:
    with _swapping():
        return _loaded(model)


def _loaded_from_file(model: Any) -> Any:
    model.load_state_dict(_saved(model.state_dict(), weights_only=True))
    return model


def _saved(value: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _moved_with_swap(model: Any) -> Any:
    with _swapping():
        return model.to(torch.float64).to(torch.float32)


def _emptied(model: Any) -> Any:
    state = _clones(model)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    return model


def _frozen(model: Any) -> Any:
    return model.requires_grad_(False).requires_grad_(True)


def _averaged(model: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update_parameters(model)
    return average.module


def _swapped_tensors(model: Any) -> Any:
    for parameter in model.parameters():
        other = torch.nn.Parameter(parameter.detach().clone() + 1)
        torch.utils.swap_tensors(parameter, other)
    return model


def _replaced(by: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each parameter is replaced by another."""

    def act(model: Any) -> Any:
        for layer, name in _owned(model):
            setattr(layer, name, by(layer.get_parameter(name)))
        return model

    return act


def _owned(model: Any, without: str = "none") -> list[tuple[Any, str]]:
    """The layers, and the names of their parameters."""
    return [
        (layer, name)
        for layer in model.layers
        for name, _ in layer.named_parameters(recurse=False)
        if not name.startswith(without)
    ]


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _parametrised(model: Any) -> Any:
    for layer, name in _owned(model, "bias"):
        parametrize.register_parametrization(layer, name, Doubled())
    return model


def _parametrised_and_back(model: Any) -> Any:
    names = _owned(model, "bias")
    _parametrised(model)
    for layer, name in names:
        parametrize.remove_parametrizations(layer, name)
    return model


def _one_parametrised(model: Any) -> Any:
    layer, name = _owned(model, "bias")[0]
    parametrize.register_parametrization(layer, name, Doubled())
    return model


def _pruned(model: Any) -> Any:
    for layer, name in _owned(model, "bias"):
        prune.identity(layer, name)
        prune.remove(layer, name)
    return model


def _weakly_held(model: Any) -> Any:
    model.held = [weakref.ref(parameter) for parameter in model.parameters()]
    _loaded(model)
    assert all(ref() is not None for ref in model.held)
    del model.held
    return model


def _with_optimizer(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _backward(model, _input(model))
    optimizer.step()
    model, optimizer = copy.deepcopy((model, optimizer))
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    other.load_state_dict(_saved(optimizer.state_dict(), weights_only=True))
    other.step()
    return model


def _each_parameter(by: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each parameter and its gradient are copied by themselves."""

    def act(model: Any) -> Any:
        _backward(model, _input(model))
        for parameter in model.parameters():
            found = by(parameter)
            assert torch.equal(_local(found), _local(parameter))
            assert torch.equal(_local(by(parameter.grad)), _local(parameter.grad))
            assert torch.equal(_local(by(parameter.detach())), _local(parameter))
            with torch.no_grad():
                parameter.copy_(found)
        model.zero_grad()
        return model

    return act


def _called_with_parameters(model: Any) -> Any:
    """Called with other parameters in their place."""
    x = _input(model)
    given = {name: value.detach() * 2 for name, value in model.named_parameters()}
    out = torch.func.functional_call(model, given, (x,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for one, other in zip(out, model(x), strict=True):
        assert relative_error(one, other) < 0.2
    return model


def _with_hooks_on_the_state(model: Any) -> Any:
    """The state goes out and comes in under another name."""

    def out(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in [n for n in state if n.startswith(prefix)]:
            state[f"{prefix}old.{name.removeprefix(prefix)}"] = state.pop(name)

    def back(module: Any, state: Any, prefix: str, *others: Any) -> None:
        for name in [n for n in state if n.startswith(prefix + "old.")]:
            state[prefix + name.removeprefix(prefix + "old.")] = state.pop(name)

    for layer in model.layers:
        layer.register_state_dict_post_hook(out)
        layer.register_load_state_dict_pre_hook(back)
    return _loaded(model)


def _under_inference_mode(model: Any) -> Any:
    with torch.inference_mode():
        model(_input(model))
    return model


def _scaled(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = torch.stack([out.square().sum() for out in model(_input(model))]).sum()
    scaler.scale(loss).backward()
    before = [_local(p).clone() - 0.1 * _local(p.grad) / 4 for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for wanted, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(_local(parameter), wanted)
    model.zero_grad()
    return model


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "load": _loaded,
    "load, not strict": lambda model: _loaded(model, strict=False),
    "load by assigning": lambda model: _loaded(model, assign=True),
    "load by assigning parameters": _loaded_with_parameters,
    "load by swapping": _loaded_with_swap,
    "load from a file": _loaded_from_file,
    "load under weak references": _weakly_held,
    "load through hooks": _with_hooks_on_the_state,
    "inference mode": _under_inference_mode,
    "to itself": lambda model: model.to("cpu").float(),
    "to float64 and back": lambda model: model.double().float(),
    "to float64 and back by swapping": _moved_with_swap,
    "half and back": lambda model: model.half().float(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "to_empty": _emptied,
    "frozen and thawed": _frozen,
    "train and eval": lambda model: model.eval().train(),
    "apply": lambda model: model.apply(lambda module: None),
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": _saved,
    "average": _averaged,
    "swap_tensors": _swapped_tensors,
    "replaced parameters": _replaced(lambda p: torch.nn.Parameter(p.detach().clone() * 2)),
    "parameters replaced by copies": _replaced(copy.deepcopy),
    "parametrised": _parametrised,
    "one parametrised": _one_parametrised,
    "parametrised and back": _parametrised_and_back,
    "pruned": _pruned,
    "optimizer": _with_optimizer,
    "deep copy of each": _each_parameter(copy.deepcopy),
    "pickle of each": _each_parameter(lambda p: pickle.loads(pickle.dumps(p))),
    "file of each": _each_parameter(lambda p: _saved(p, weights_only=True)),
    "functional_call": _called_with_parameters,
    "scaler": _scaled,
}


# --- what is looked at ---


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _input(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """This rank's rows, or its features of all rows."""
    generator = torch.Generator().manual_seed(seed)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(ROWS * ranks, _features(model), generator=generator)
    return x.chunk(ranks, -1 if _is_row(model) else 0)[rank].contiguous()


def _features(model: Any) -> int:
    return int(model.layers[0].in_features)


def _is_row(model: Any) -> bool:
    return _features(model) == N


def _backward(model: Any, x: torch.Tensor) -> None:
    torch.stack([out.square().sum() for out in model(x)]).sum().backward()


@torch.no_grad()
def _wanted(model: Any) -> list[torch.Tensor]:
    """The outputs on this rank, from the parts that the parameters hold."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = _input(model)
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    found = []
    for layer in model.layers:
        if isinstance(layer, Experts):
            found.append(_sum_over_experts(layer, x))
            continue
        for name in ["_0", "_1"] if hasattr(layer, "weight_0") else [""]:
            weight = _local(getattr(layer, f"weight{name}"))
            bias = getattr(layer, f"bias{name}", None)
            out = (x if _is_row(model) else torch.cat(parts)) @ weight.t()
            if _is_row(model):
                dist.all_reduce(out)
                out = out.chunk(ranks)[rank]
            found.append(out if bias is None else out + _local(bias))
    return found


def _sum_over_experts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The result of experts, from the parts that the ranks hold."""
    dim = 1 if layer.way.sliced else 0
    wholes = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        own = _local(getattr(layer, name)).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        wholes.append(torch.cat(parts, 2 if dim and name == "down_proj" else dim))
    ids, topk = choices(x)
    found = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        gate, up, down = (whole[ids[:, choice]] for whole in wholes)
        wide = [torch.einsum("rnk,rk->rn", weight, x) for weight in (gate, up)]
        hidden = torch.nn.functional.silu(wide[0]) * wide[1]
        found += topk[:, choice, None] * torch.einsum("rnk,rk->rn", down, hidden)
    return found


def _is_right(model: Any, run: Any, limit: float) -> bool:
    pairs = zip(run(_input(model)), _wanted(model), strict=True)
    return max(relative_error(found.detach(), wanted) for found, wanted in pairs) < limit


def _noted(fired: list[int], i: int) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        fired.append(i)

    unserializable_hook(hook)  # or torch warns where parameters are copied
    return hook


def survived(kind: str, action: str, is_compiled: bool) -> dict[str, Any]:
    """What is there after an action: the parameters themselves, their hooks and attributes, and
    right products, before and after a step, eager and compiled."""
    model: Any = make(kind)
    limit = 0.2 if "fp8" in kind else 1e-5
    fired: list[int] = []
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(_noted(fired, i))
        parameter.register_hook(_noted(fired, -1 - i))
        parameter.decay = i
    before = list(model.parameters())
    compiled: Any = None
    if is_compiled:
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(_input(model))
    try:
        after = ACTIONS[action](model)
    except Exception as error:
        return {"works": False, "error": f"{type(error).__name__}: {error}"}
    own = list(after.parameters())
    facts: dict[str, Any] = {
        "works": True,
        "as many": len(own) == len(before),  # what was tied is tied
        "identity": all(one is other for one, other in zip(before, own, strict=False)),
        "attributes": [getattr(p, "decay", None) for p in own] == list(range(len(before))),
        "trains": all(p.requires_grad for p in own),
    }
    if is_compiled and after is not model:
        compiled = torch.compile(after, backend="aot_eager")
    for when in ("then", "after a step"):
        facts[f"eager, {when}"] = _is_right(after, after, limit)
        if is_compiled:
            facts[f"compiled, {when}"] = _is_right(after, compiled, limit)
        fired.clear()
        after.zero_grad()
        _backward(after, _input(after))
        facts[f"hooks, {when}"] = sorted(fired) == list(range(-len(before), len(before)))
        facts[f"gradients, {when}"] = all(p.grad is not None for p in own)
        torch.optim.SGD(own, lr=0.01).step()
    if is_compiled:
        torch.compiler.reset()
    return facts


def lost(kind: str, reference: str, is_compiled: bool, which: slice) -> list[str]:
    """What torch's layer has after one of these actions and agmm's has not."""
    faults = []
    for action in list(ACTIONS)[which]:
        wanted, found = survived(reference, action, False), survived(kind, action, is_compiled)
        names = [name for name, fact in wanted.items() if fact is True]
        if any(found.get(name) is not True for name in names):
            faults.append(f"{action}: found {found}, wanted {names} of {reference}")
        if not all(fact for name, fact in found.items() if name.startswith(("eager", "compiled"))):
            faults.append(f"{action}: found {found}, wanted right products")
    return faults


# --- what has no counterpart in torch's layers ---


def made_under_inference_mode(kind: str) -> list[str]:
    """Faults of a model that was made under inference_mode, and then trains."""
    with torch.inference_mode():
        model: Any = make(kind)
        model(_input(model))
    faults = []
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for when in ("at first", "after a step"):
        for name, run in (("eager", model), ("compiled", compiled)):
            if not _is_right(model, run, 1e-5):
                faults.append(f"{name}, {when}")
        x = _input(model).requires_grad_()
        _backward(model, x)
        if x.grad is None or any(p.grad is None for p in model.parameters()):
            faults.append(f"gradients, {when}")
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    copied = copy.deepcopy(model)
    with torch.inference_mode():
        there_and_back = copy.deepcopy(model).double().float()
    for name, one in (("copied", copied), ("copied and moved under it", there_and_back)):
        if not _is_right(one, one, 1e-5):
            faults.append(name)
    torch.compiler.reset()
    return faults


class Mixed(torch.nn.Module):
    """A norm of plain or replicated parameters before two layers, the second of which is
    replicated in part."""

    def __init__(self, mesh: DeviceMesh, replicated: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(K)
        if replicated:
            parallelize_module(self, mesh, {"norm": SequenceParallel(sequence_dim=0)})
        self.up = ColumnParallelLinear(K, [N, N], device_mesh=mesh)
        self.down = RowParallelLinear(N, K, device_mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        gate, up = self.up(x.to_local() if isinstance(x, DTensor) else x)
        out: torch.Tensor = self.down(torch.tanh(gate) * up)
        return out


def scaled_steps(norm: str, grouped: bool, bad: str | None) -> list[str]:
    """Faults of a step by GradScaler: it is taken with the gradients unscaled, or, where one rank
    has a gradient that is not finite, by no rank.

    Args:
        norm: what the norm's parameters are: "plain", "replicated", or "sharded" by FSDP2 over
            other ranks than those of the layers, which it shards too.
        grouped: whether the optimizer is given `parameter_groups`.
        bad: the parameter with such a gradient.
    """
    torch.manual_seed(2)
    tp = dist.get_world_size() // (2 if norm == "sharded" else 1)
    mesh = dp_tp_mesh(dist.get_world_size() // tp, tp)
    model = Mixed(mesh["tp"], norm == "replicated")
    if norm == "sharded":
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(parameter_groups(model) if grouped else model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss = model(torch.randn(ROWS, K, generator=generator)).square().sum()
    scaler.scale(loss).backward()
    sum_replicated_gradients(model, mesh["tp"])
    if bad is not None and dist.get_rank() == dist.get_world_size() - 1:
        grad = model.get_parameter(bad).grad
        assert grad is not None
        _local(grad).view(-1)[0] = float("inf")
    parameters = dict(model.named_parameters())
    wanted = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
            grad = grad.redistribute(placements=parameter.placements)  # that of a norm is partial
        assert grad is not None
        step = torch.zeros(()) if bad else 0.1 * _local(grad) / 8
        wanted[name] = _local(parameter) - step
    scaler.step(optimizer)
    scaler.update()
    faults = [
        name
        for name, parameter in parameters.items()
        if not torch.allclose(_local(parameter), wanted[name], atol=1e-6)
    ]
    if scaler.get_scale() != (4.0 if bad else 8.0):
        faults.append(f"scale {scaler.get_scale()}")
    return faults
