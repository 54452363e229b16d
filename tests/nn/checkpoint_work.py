"""What the tests of checkpoints run inside the ranks: a sharded model against the whole one."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_groups import dp_tp_mesh
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agmm.errors import InvalidArgument
from agmm.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    sum_replicated_gradients,
)
from agmm.testing.reference import relative_error

WIDTH, OUTPUTS = 8, (24, 8, 16)
LIMIT = 1e-10
FULL = StateDictOptions(full_state_dict=True)
Layout = tuple[int, int, bool]
"""Data-parallel ranks, tensor-parallel ranks, and whether FSDP2 shards over the first."""


class Net(torch.nn.Module):
    """A norm, three projections of unlike widths, a way back for each, and the residual."""

    def __init__(self, make_in: Callable[..., Any], make_out: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.both = make_in(WIDTH, OUTPUTS)
        self.back = torch.nn.ModuleList(make_out(width, WIDTH) for width in OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.both(self.norm(x))
        parts = out if isinstance(out, tuple) else out.split(OUTPUTS, dim=-1)
        for back, part in zip(self.back, parts, strict=True):
            x = x + back(torch.tanh(part))
        return x


def _whole() -> torch.nn.Sequential:
    def linear(k: int, n: Any) -> torch.nn.Linear:
        return torch.nn.Linear(k, n if isinstance(n, int) else sum(n), dtype=torch.float64)

    torch.manual_seed(5)
    return torch.nn.Sequential(*(Net(linear, linear) for _ in range(2)))


def _mesh(layout: Layout) -> DeviceMesh:
    dp, tp, _ = layout
    return dp_tp_mesh(dp, tp)


def _sharded(mesh: DeviceMesh, layout: Layout, device: str = "cpu") -> Any:
    """A model with first values of its own."""
    where: Any = {"device_mesh": mesh["tp"], "dtype": torch.float64, "device": device}

    def column(k: int, n: Any) -> torch.nn.Module:
        return ColumnParallelLinear(k, n, **where)

    def row(k: int, n: int) -> torch.nn.Module:
        return RowParallelLinear(k, n, **where)

    torch.manual_seed(77)
    model = torch.nn.Sequential(*(Net(column, row) for _ in range(2)))
    if layout[2]:
        for net in model:
            fully_shard(net, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(32, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def _train_whole(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """The norms of the gradients; as large as the sum over the rows, not the mean."""
    norms = []
    for step in steps:
        x, target = _batch(step)
        optimizer.zero_grad()
        (model(x) - target).square().sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)))
        optimizer.step()
    return norms


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    mesh: DeviceMesh,
    layout: Layout,
) -> list[float]:
    dp, tp, fsdp = layout
    norms = []
    for step in steps:
        x, target = _batch(step)
        if fsdp:  # which takes the mean over its ranks
            x, target = (t.chunk(dp)[mesh.get_local_rank("dp")] for t in (x, target))
        x, target = (t.chunk(tp)[mesh.get_local_rank("tp")] for t in (x, target))
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() * (dp if fsdp else 1)
        loss.backward()
        sum_replicated_gradients(model, mesh["tp"])
        norms.append(float(clip_grad_norm_(model, 2.0)))
        optimizer.step()
    return norms


def _joined(state: dict[str, Any]) -> dict[str, Any]:
    """A dict of the layers' names under those of the whole: the outputs one below another."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        start, _, number = name.rpartition("_")
        if number.isdigit() and start.rpartition(".")[2] in ("weight", "bias"):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[start] = torch.cat([found[start], value]) if start in found else value
        else:
            found[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def _differences(label: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    if set(found) != set(wanted):
        return [f"{label}: found {sorted(found)}, wanted {sorted(wanted)}"]
    errors = {name: relative_error(found[name], value) for name, value in wanted.items()}
    return [f"{label}: {name} has error {error}" for name, error in errors.items() if error > LIMIT]


def _momenta(state: dict[str, Any], which: str) -> dict[str, Any]:
    return _joined({name: own[which] for name, own in state["state"].items()})


def _against(
    label: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    whole: torch.nn.Module,
    whole_optimizer: torch.optim.Optimizer,
) -> list[str]:
    """Faults of all values of a sharded model and of its optimizer."""
    wanted = whole.state_dict()
    faults = _differences(f"{label}, full", full_state_dict(model), wanted)
    torch_full: Any = get_model_state_dict(model, options=FULL)
    faults += _differences(f"{label}, torch's full", _joined(torch_full), wanted)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    wanted_moments: Any = get_optimizer_state_dict(whole, whole_optimizer)
    for which in ("exp_avg", "exp_avg_sq", "step"):
        wanted_which = {n: own[which] for n, own in wanted_moments["state"].items()}
        if which == "step":
            steps = {float(own[which]) for own in moments["state"].values()}
            if steps != {float(step) for step in wanted_which.values()}:
                faults.append(f"{label}: steps {steps}")
        else:
            found = _momenta(moments, which)
            faults += _differences(f"{label}, {which}", found, wanted_which)
    return faults


def resharded(folder: str, before: Layout, after: Layout) -> list[str]:
    """Faults of a model that trains, is saved, loaded into one with another layout and trains on,
    by files and by whole state dicts, against the whole model that trains without a break."""
    whole = _whole()
    whole_optimizer = _optimizer(whole)
    mesh = _mesh(before)
    model = _sharded(mesh, before)
    load_full_state_dict(model, whole.state_dict())
    optimizer = _optimizer(model)
    wanted = _train_whole(whole, whole_optimizer, range(3))
    found = _train(model, optimizer, range(3), mesh, before)
    faults = [] if _close(found, wanted) else [f"norms {found}, wanted {wanted}"]
    faults += _against("trained", model, optimizer, whole, whole_optimizer)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    dicts = (
        get_model_state_dict(model, options=FULL),
        get_optimizer_state_dict(model, optimizer, options=FULL),
    )

    mesh = _mesh(after)
    kept = copy.deepcopy((whole, whole_optimizer.state_dict()))
    for way in ("files", "dicts"):
        whole = copy.deepcopy(kept[0])
        whole_optimizer = _optimizer(whole)
        whole_optimizer.load_state_dict(copy.deepcopy(kept[1]))
        model = _sharded(mesh, after)
        optimizer = _optimizer(model)
        if way == "files":
            fresh: Any = {"model": get_model_state_dict(model)}
            fresh["optimizer"] = get_optimizer_state_dict(model, optimizer)
            dcp.load(fresh, checkpoint_id=folder)
            set_model_state_dict(model, fresh["model"])
            set_optimizer_state_dict(model, optimizer, fresh["optimizer"])
        else:
            set_model_state_dict(model, copy.deepcopy(dicts[0]), options=FULL)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(dicts[1]), options=FULL)
        faults += _against(f"loaded from {way}", model, optimizer, whole, whole_optimizer)
        wanted = _train_whole(whole, whole_optimizer, range(3, 5))
        found = _train(model, optimizer, range(3, 5), mesh, after)
        faults += [] if _close(found, wanted) else [f"{way}: norms {found}, wanted {wanted}"]
        faults += _against(f"{way}, trained on", model, optimizer, whole, whole_optimizer)
    return faults


def _close(found: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) < 1e-9 * abs(b) for a, b in zip(found, wanted, strict=True))


def _old_state(whole: torch.nn.Module, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """This rank's part of a whole model's state, as the layers had it when they held plain tensors
    and one weight for all outputs."""
    found = {}
    for name, value in whole.state_dict().items():
        owner, leaf = name.rpartition(".")[::2]
        if owner.endswith("both"):
            value = torch.cat([block.chunk(ranks)[rank] for block in value.split(OUTPUTS)])
        elif ".back." in name and leaf == "weight":
            value = value.chunk(ranks, dim=1)[rank]
        found[name] = value.clone()
    return found


def old_checkpoints(folder: str, way: str) -> list[str]:
    """Faults of a model that was loaded from what its layers saved as plain tensors."""
    layout: Layout = (1, dist.get_world_size(), False)
    mesh = _mesh(layout)
    whole = _whole()
    model = _sharded(mesh, layout)
    rank = dist.get_rank()
    state = _old_state(whole, rank, layout[1])
    if way == "files":  # a folder of its own for each rank, as no other kind was whole
        own = Path(folder) / str(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=own, no_dist=True)
        dcp_to_torch_save(own, own / "state.pt")
        state = torch.load(own / "state.pt")["model"]
    elif way == "whole":
        state = copy.deepcopy(whole.state_dict())
    model.load_state_dict(state, assign=way == "assigned")
    x, _ = _batch(0)
    own_rows = [t.chunk(layout[1])[rank] for t in (x, whole(x))]
    faults = _differences("state", full_state_dict(model), whole.state_dict())
    if relative_error(model(own_rows[0]).detach(), own_rows[1].detach()) > LIMIT:
        faults.append("the output differs")
    return faults


def copies(folder: str) -> list[str]:
    """Faults of copies of a trained model: each of them trains on as the model itself does."""
    layout: Layout = (1, dist.get_world_size(), False)
    mesh = _mesh(layout)
    model = _sharded(mesh, layout)
    _train(model, _optimizer(model), range(2), mesh, layout)
    state = copy.deepcopy(model.state_dict())
    path = Path(folder) / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    loaded = _sharded(mesh, layout)
    loaded.load_state_dict(torch.load(path))
    torch.save(model, path)
    empty = _sharded(mesh, layout, device="meta").to_empty(device="cpu")
    empty.load_state_dict(state)
    made = {
        "deep copy": copy.deepcopy(model),
        "pickled": torch.load(path, weights_only=False),
        "pickled plainly": pickle.loads(pickle.dumps(model)),
        "state dict": loaded,
        "empty": empty,
        "moved": copy.deepcopy(model).to(torch.bfloat16).to(torch.float64),
    }
    made["moved"].load_state_dict(state)
    faults = []
    norms = _train(model, _optimizer(model), range(2, 4), mesh, layout)
    wanted = full_state_dict(model)
    for name, one in made.items():
        if _train(one, _optimizer(one), range(2, 4), mesh, layout) != norms:
            faults.append(f"{name}: other norms")
        faults += _differences(name, full_state_dict(one), wanted)
        for net in one:
            if len(net.both.operands()[0]) != 1:
                faults.append(f"{name}: a matmul for each output")
            if not all(joined.whole() is not None for joined in net.both._joined.values()):
                faults.append(f"{name}: a matmul for each output when it is compiled")
    return faults


def first_values(layout: Layout) -> list[str]:
    """Faults of the first values of layers that were made without memory."""
    mesh = _mesh(layout)
    model = _sharded(mesh, layout, device="meta")
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for net in model:
        for layer in (net.norm, net.both, *net.back):
            layer.reset_parameters()
    return _differences("made", full_state_dict(model), _whole().state_dict())


def bad_load(layout: Layout) -> tuple[str, bool]:
    """What a load of a bad whole state dict says, and whether the module is as it was."""
    mesh = _mesh(layout)
    model = _sharded(mesh, layout)
    before = full_state_dict(model)
    state = {name: value + 1 for name, value in before.items()}
    last = list(state)[-1]
    state[last] = state[last][:-1]
    try:
        load_full_state_dict(model, state)
    except InvalidArgument as e:
        after = full_state_dict(model)
        return str(e), all(torch.equal(before[name], after[name]) for name in before)
    return "", False


def inner_call(layout: Layout) -> str:
    """What a layer says that is called without the module which fully_shard was given."""
    mesh = _mesh(layout)
    model = _sharded(mesh, layout)
    try:
        model[0].both(torch.ones(2, WIDTH, dtype=torch.float64))
    except InvalidArgument as e:
        return str(e)
    return ""


def changed_before_the_backward() -> str:
    layout: Layout = (1, dist.get_world_size(), False)
    model = _sharded(_mesh(layout), layout)
    loss = model(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    with torch.no_grad():
        model[0].both.weight_1.mul_(2)
    try:
        loss.backward()
    except RuntimeError as e:
        return str(e)
    return ""
