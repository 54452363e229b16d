"""What the tests of the gated feed-forward module run inside the ranks of a pool of five."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import dp_tp_mesh
from rank_work import group_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import agmm
from agmm.nn import ColumnParallelLinear, GatedMLP, RowParallelLinear, full_state_dict
from agmm.nn import load_full_state_dict as load_full
from agmm.ops import recordings
from agmm.testing.cases import uneven_blocks
from agmm.testing.reference import relative_error

WIDTH, HIDDEN = 12, 60
LIMIT = 1e-10
Faults = list[str] | None


class Whole(torch.nn.Module):
    """The module of three linears, as transformers has it."""

    def __init__(self, bias: bool, activation: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(WIDTH, HIDDEN, bias, dtype=dtype)
        self.up_proj = torch.nn.Linear(WIDTH, HIDDEN, bias, dtype=dtype)
        self.down_proj = torch.nn.Linear(HIDDEN, WIDTH, bias, dtype=dtype)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: torch.Tensor = self.down_proj(activated(self.activation, gate) * up)
        return out


def activated(name: str, gate: torch.Tensor) -> torch.Tensor:
    if name == "silu_mul":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if "tanh" in name else "none")


def _close(label: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    error = relative_error(found, wanted)
    return [] if error < LIMIT else [f"{label}: error {error}"]


def _both(bias: bool, activation: str, **options: Any) -> tuple[Whole, GatedMLP]:
    torch.manual_seed(3)
    whole = Whole(bias, activation)
    torch.manual_seed(3)
    given: Any = activation
    sharded = GatedMLP(WIDTH, HIDDEN, bias, activation=given, dtype=torch.float64, **options)
    return whole, sharded


def against_whole(
    world_size: int, bias: bool, activation: str, compiled: bool, **options: Any
) -> Faults:
    """Faults of first values, outputs and all gradients, against the whole module's."""
    group = group_of(world_size)
    if group is None:
        return None
    whole, sharded = _both(bias, activation, group=group, **options)
    faults = [
        f"{name} differs from the first"
        for name, value in full_state_dict(sharded).items()
        if not torch.equal(value, whole.state_dict()[name])
    ]
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * world_size, 2, WIDTH, generator=generator, dtype=torch.float64)
    weigh = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    own = x.chunk(world_size)[rank].clone().requires_grad_()
    x.requires_grad_()
    wanted = whole(x)
    (wanted * weigh).sum().backward()
    torch.compiler.reset()
    call = torch.compile(sharded, backend="aot_eager", fullgraph=True) if compiled else sharded
    out = call(own)
    faults += _close("out", out, wanted.chunk(world_size)[rank])
    (out * weigh.chunk(world_size)[rank]).sum().backward()
    assert x.grad is not None and own.grad is not None
    faults += _close("dx", own.grad, x.grad.chunk(world_size)[rank])
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found = parameter.grad.full_tensor()
        gradient = whole.get_parameter(name).grad
        assert gradient is not None
        faults += _close(name, found, gradient)
    with torch.no_grad():
        faults += _close("without gradients", call(own), wanted.chunk(world_size)[rank])
    return faults


def calls(world_size: int, path: str) -> list[tuple[str, int, str | None, int]] | None:
    """The calls of one forward: op, weights, activation, count."""
    group = group_of(world_size)
    if group is None:
        return None
    _, sharded = _both(False, "silu_mul", group=group)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with torch.no_grad(), agmm.record(path):
        sharded(x)
    found = recordings.read(Path(path.replace("{rank}", str(dist.get_rank()))))
    return [(one.kind.op, len(one.kind.n), one.kind.activation, one.count) for one in found]


def checkpoints(world_size: int, bias: bool) -> Faults:
    """Faults of state dicts: those of the three linears, of the separate layers and of copies."""
    group = group_of(world_size)
    if group is None:
        return None
    whole, sharded = _both(bias, "silu_mul", group=group)
    faults = []
    if list(sharded.state_dict()) != list(whole.state_dict()):
        faults.append(f"names {list(sharded.state_dict())}")
    for name, value in sharded.state_dict().items():
        assert isinstance(value, DTensor)
        placement: Shard | Replicate = Shard(0)
        if name.startswith("down_proj"):
            placement = Shard(1) if name.endswith("weight") else Replicate()
        if value.placements != (placement,) or value.shape != whole.state_dict()[name].shape:
            faults.append(f"{name}: {value.placements}, {value.shape}")
    separate = torch.nn.ModuleDict(
        {
            "gate_proj": ColumnParallelLinear(WIDTH, HIDDEN, bias, group=group),
            "up_proj": ColumnParallelLinear(WIDTH, HIDDEN, bias, group=group),
            "down_proj": RowParallelLinear(HIDDEN, WIDTH, bias, group=group),
        }
    ).double()
    separate.load_state_dict(sharded.state_dict())
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    wanted = sharded(x)
    hidden = functional.silu(separate["gate_proj"](x)) * separate["up_proj"](x)
    faults += _close("the separate layers", separate["down_proj"](hidden), wanted)
    other = _both(bias, "silu_mul", group=group)[1]
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(whole.state_dict())
    faults += _close("a state dict of linears", other(x), wanted)
    load_full(other, {name: 2 * value for name, value in whole.state_dict().items()})
    for name, value in full_state_dict(other).items():
        faults += _close(f"doubled {name}", value, 2 * whole.state_dict()[name])
    for copied in (copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        faults += _close("a copy", copied(x), wanted)
    return faults


def with_fsdp() -> Faults:
    """Faults of the module under FSDP2 over other ranks, in a pool of four."""
    mesh = dp_tp_mesh(2, 2)
    whole, sharded = _both(True, "gelu_tanh_mul", device_mesh=mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    tp, dp = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
    out = sharded(x[dp].chunk(2)[tp])
    faults = _close("out", out, whole(x)[dp].chunk(2)[tp])
    out.sum().backward()
    (whole(x).sum() / 2).backward()  # FSDP2 takes the mean over its ranks
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradient = whole.get_parameter(name).grad
        assert gradient is not None
        faults += _close(name, parameter.grad.full_tensor(), gradient)
    return faults


def fp8(world_size: int, recipe: str, compiled: bool, width: int = 64, hidden: int = 32) -> Faults:
    """Faults against the separate layers of the same recipe.

    Args:
        width: of rows.
        hidden: features of a rank.
    """
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(3)
    sizes = width, hidden * world_size
    mlp = GatedMLP(*sizes, True, group=group, fp8=recipe)
    if recipe == "block":
        with torch.no_grad():
            for parameter in mlp.parameters():
                if parameter.dim() == 2:
                    assert isinstance(parameter, DTensor)
                    values = parameter.to_local()
                    values.copy_(uneven_blocks(values))
    layers = [ColumnParallelLinear(*sizes, group=group, fp8=recipe) for _ in range(2)]
    for layer, own in zip(layers, (mlp.gate_proj, mlp.up_proj), strict=True):
        layer.load_state_dict(own.state_dict())
    torch.compiler.reset()
    call = torch.compile(mlp, backend="aot_eager") if compiled else mlp
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(16, width, generator=generator)

    def separate(x: torch.Tensor) -> torch.Tensor:
        gate, up = (layer(x) for layer in layers)
        out: torch.Tensor = mlp.down_proj(functional.silu(gate) * up)
        return out

    plain = GatedMLP(*sizes, True, group=group)
    plain.load_state_dict(mlp.state_dict())
    results = []
    for function in (call, separate, plain):
        given = x.clone().requires_grad_()
        out = function(given)
        out.square().sum().backward()
        results.append((out.detach(), given.grad))
    up, other = mlp.up_proj.weight.grad, layers[1].weight.grad
    assert isinstance(up, DTensor) and isinstance(other, DTensor)
    (out, dx), (wanted, wanted_dx), (exact, exact_dx) = results
    assert dx is not None and wanted_dx is not None and exact_dx is not None
    of_plain = plain.up_proj.weight.grad
    assert isinstance(of_plain, DTensor)
    errors = {
        "out": relative_error(out, wanted),
        # The gradients of both weights are quantised as one to the backward of the module.
        "dx": relative_error(dx, wanted_dx) - 0.1,
        "gradient of up": relative_error(up.to_local(), other.to_local()) - 0.1,
        "out in fp8": relative_error(out, exact) - 0.1,
        "dx in fp8": relative_error(dx, exact_dx) - 0.2,
        "gradient of up in fp8": relative_error(up.to_local(), of_plain.to_local()) - 0.2,
    }
    faults = [f"{name}: error {error}" for name, error in errors.items() if error > 1e-5]
    with torch.no_grad():
        error = relative_error(call(x), results[0][0])
    return faults + ([] if error < 1e-5 else [f"without gradients: error {error}"])
