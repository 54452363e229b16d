"""What the tests of gated feed-forward modules under styles run inside the ranks of a pool of
five."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import agmm
from agmm.errors import InvalidArgument
from agmm.nn import (
    GatedGatherParallel,
    GatherColwiseParallel,
    PackedColwiseParallel,
    RowwiseScatterParallel,
    convert_plan,
    full_state_dict,
    gated_plan,
    load_full_state_dict,
)
from agmm.ops import recordings
from agmm.testing.reference import relative_error

WIDTH, HIDDEN, LIMIT = 12, 32, 1e-10
Faults = list[str] | None


class Llama(torch.nn.Module):
    """Three linears and a module of the activation, as in transformers."""

    names = ("gate_proj", "up_proj", "down_proj")
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, bias: bool = False, act_fn: torch.nn.Module | None = None) -> None:
        super().__init__()
        gate, up, down = self.names
        self.add_module(gate, torch.nn.Linear(WIDTH, HIDDEN, bias, dtype=torch.float64))
        self.add_module(up, torch.nn.Linear(WIDTH, HIDDEN, bias, dtype=torch.float64))
        self.add_module(down, torch.nn.Linear(HIDDEN, WIDTH, bias, dtype=torch.float64))
        self.act_fn = torch.nn.SiLU() if act_fn is None else act_fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gemma(Llama):
    def __init__(self) -> None:
        super().__init__(True, torch.nn.GELU(approximate="tanh"))


class Titan(Llama):
    """Other names, and a function in the place of a module."""

    names = ("w1", "w3", "w2")
    w1: Any
    w2: Any
    w3: Any

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Phi(torch.nn.Module):
    """One linear for gate and up."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(WIDTH, 2 * HIDDEN, bias, dtype=torch.float64)
        self.down_proj = torch.nn.Linear(HIDDEN, WIDTH, bias, dtype=torch.float64)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * functional.gelu(gate))


KINDS: dict[str, type[torch.nn.Module]] = {"llama": Llama, "gemma": Gemma, "titan": Titan}
KINDS |= {"phi": Phi}


class _Model(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = torch.nn.RMSNorm(WIDTH, dtype=torch.float64)
        self.mlp = KINDS[kind]()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


def _by_plan_of_torch(model: Any, mesh: DeviceMesh, sequence: bool) -> dict[str, Any]:
    """The plan that a model has without agmm, converted."""
    names = [name for name, _ in model.mlp.named_children() if name not in ("act_fn",)]
    is_packed = len(names) == 2
    first = ColwiseParallel(output_layouts=Replicate()) if is_packed else ColwiseParallel()
    last = RowwiseParallel(
        input_layouts=Replicate() if is_packed else Shard(-1),
        output_layouts=Shard(1) if sequence else Replicate(),
    )
    plan: dict[str, Any] = {f"mlp.{name}": first for name in names[:-1]}
    if sequence:
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return dict(convert_plan(model, mesh, plan | {f"mlp.{names[-1]}": last}, strict=True))


def against_whole(world_size: int, kind: str, way: str, path: str) -> tuple[list[str], Any] | None:
    """Faults of a step and of checkpoints against the whole model, and agmm's calls forward: each
    with its op, its weights and its activation."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    whole = _Model(kind)
    model = copy.deepcopy(whole)
    sequence = way != "all rows"
    plan = gated_plan(model) if way == "own" else _by_plan_of_torch(model, mesh, sequence)
    parallelize_module(model, mesh, plan)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 4 * world_size, WIDTH, generator=generator, dtype=torch.float64)
    own = x.chunk(world_size, 1)[rank] if sequence else x
    own = own.clone().requires_grad_()
    x.requires_grad_()
    wanted = whole(x)
    wanted.square().sum().backward()
    with torch.no_grad(), agmm.record(path):
        model(own)
    out = model(own)
    out.square().sum().backward()
    assert x.grad is not None and own.grad is not None
    faults = []
    for label, found, given in (("out", out, wanted), ("dx", own.grad, x.grad)):
        error = relative_error(found, given.chunk(world_size, 1)[rank] if sequence else given)
        faults += [f"{label}: error {error}"] if error > LIMIT else []
    calls = recordings.read(Path(path.replace("{rank}", str(dist.get_rank()))))
    made = [(one.kind.op, len(one.kind.n), one.kind.activation) for one in calls]
    return faults + _faults_of_parameters(whole, model), made


def _faults_of_parameters(whole: torch.nn.Module, model: torch.nn.Module) -> list[str]:
    """Faults of gradients and of checkpoints."""
    saved = full_state_dict(model)
    faults = [f"saved {list(saved)}"] if set(saved) != set(whole.state_dict()) else []
    faults += [
        f"saved {name}"
        for name, value in whole.state_dict().items()
        if not torch.equal(saved[name], value)
    ]
    grads: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        assert isinstance(parameter.grad, DTensor), name
        value, pieces = parameter.grad.full_tensor(), name.split(".")
        if pieces[-2].isdigit():
            name = ".".join([*pieces[:-2], pieces[-1]])
            value = torch.cat([grads[name], value]) if name in grads else value
        grads[name] = value
    for name, value in grads.items():
        gradient = whole.get_parameter(name).grad
        assert gradient is not None
        error = relative_error(value, gradient)
        if error > LIMIT:
            faults.append(f"gradient of {name}: {error}")
    changed = {name: 2 * value for name, value in whole.state_dict().items()}
    load_full_state_dict(model, changed)
    saved = full_state_dict(model)
    return faults + [f"loaded {n}" for n, v in changed.items() if not torch.equal(saved[n], v)]


def with_a_hook(world_size: int, what: str) -> list[str] | None:
    """Faults where the module cannot use the parameters of its linears by itself."""
    group = group_of(world_size)
    if group is None:
        return None
    whole = _Model("phi" if what == "packed" else "llama")
    model = copy.deepcopy(whole)
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), gated_plan(model))
    mlp: Any = model.mlp
    seen: list[torch.Size] = []

    def note(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(out.shape)
        return 2 * out

    if what == "replaced":
        mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.Dropout(0.0))
        mlp.up_proj.register_forward_hook(note)
    else:
        getattr(mlp, "gate_up_proj" if what == "packed" else "up_proj").register_forward_hook(note)
    getattr(whole.mlp, "gate_up_proj" if what == "packed" else "up_proj").register_forward_hook(
        lambda _, __, out: 2 * out
    )
    x = torch.randn(2, 4 * world_size, WIDTH, dtype=torch.float64, generator=torch.manual_seed(7))
    rank = dist.get_rank(group)
    error = relative_error(model(x.chunk(world_size, 1)[rank]), whole(x).chunk(world_size, 1)[rank])
    faults = [] if len(seen) == 1 else [f"hook called {len(seen)} times"]
    return faults if error < LIMIT else [*faults, f"error {error}"]


def other_ways(world_size: int, what: str) -> list[str] | None:
    """Faults of a forward that is compiled, in fp8, or of a plan whose linears gather alone."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    whole = _Model("titan")
    if what == "fp8":
        whole.mlp = Titan()
        for name in Titan.names:
            size = 64 * world_size
            first, last = (size, 64) if name == "w2" else (64, size)
            whole.mlp.add_module(name, torch.nn.Linear(first, last, False))
        whole.norm = torch.nn.RMSNorm(64)
    model = copy.deepcopy(whole)
    plan: dict[str, Any] = {f"mlp.{name}": GatherColwiseParallel() for name in ("w1", "w3")}
    plan = convert_plan(model, mesh, plan | {"mlp.w2": RowwiseScatterParallel()})
    faults = [] if list(plan) == ["mlp.w2", "mlp"] else [f"plan {list(plan)}"]
    if what == "fp8":
        plan = gated_plan(model, fp8="rowwise")
    parallelize_module(model, mesh, plan)
    x = torch.randn(2, 16 * world_size, whole.norm.weight.numel(), generator=torch.manual_seed(8))
    x = x.to(whole.norm.weight.dtype)
    call: Any = model
    if what == "compiled":
        torch.compiler.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = call(x.chunk(world_size, 1)[rank])
    out.sum().backward()
    error = relative_error(out, whole(x).chunk(world_size, 1)[rank])
    return faults if error < (0.05 if what == "fp8" else LIMIT) else [*faults, f"error {error}"]


def refused(kind: str) -> str:
    """What is said of a style that cannot be applied."""
    group = group_of(2)
    if group is None:
        return ""
    where: dict[str, tuple[torch.nn.Module, ParallelStyle]] = {
        "gated": (torch.nn.Sequential(), GatedGatherParallel()),
        "fp8": (Llama(), GatedGatherParallel(fp8="rowwise", save_preactivation=False)),
        "sizes": (torch.nn.Linear(4, 32), PackedColwiseParallel([15, 17])),
        "sum": (torch.nn.Linear(4, 32), PackedColwiseParallel([16, 4])),
    }
    with pytest.raises(InvalidArgument) as error:
        parallelize_module(where[kind][0], DeviceMesh.from_group(group, "cpu"), where[kind][1])
    return str(error.value)
