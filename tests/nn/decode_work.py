"""What the tests of layers without sequence parallelism run inside the ranks of a pool of five."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_work import group_of

import agmm
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.testing.reference import relative_error

HIDDEN, FFN, EPS = 12, 60, 1e-6
_LIMIT = 1e-12
"""The largest relative error of float64 sums of so few products, with room to spare."""


class Whole(torch.nn.Module):
    """The whole feed-forward sublayer, with its residual and the norm behind it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        wide: dict[str, Any] = {"bias": bias, "dtype": torch.float64}
        self.gate = torch.nn.Linear(HIDDEN, FFN, **wide)
        self.up = torch.nn.Linear(HIDDEN, FFN, **wide)
        self.down = torch.nn.Linear(FFN, HIDDEN, **wide)
        self.norm = torch.nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)) + residual
        return torch.nn.functional.rms_norm(total, (HIDDEN,), self.norm, EPS), total


class Sharded(torch.nn.Module):
    """The sublayer by agmm's layers."""

    def __init__(self, whole: Whole, bias: bool, group: dist.ProcessGroup) -> None:
        super().__init__()
        where: dict[str, Any] = {
            "bias": bias,
            "group": group,
            "sequence_parallel": False,
            "dtype": torch.float64,
        }
        self.gate_up = ColumnParallelLinear(HIDDEN, [FFN, FFN], **where)
        self.down = RowParallelLinear(FFN, HIDDEN, **where)
        names = {"gate": "gate_up", "up": "gate_up", "down": "down"}
        numbers = {"gate": "_0", "up": "_1", "down": ""}
        values = {
            f"{names[name]}.{kind}{numbers[name]}": tensor.detach()
            for name in names
            for kind, tensor in getattr(whole, name).named_parameters()
        }
        self.load_state_dict(values)
        self.norm = torch.nn.Parameter(whole.norm.detach().clone())

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = self.gate_up(x)
        found: tuple[torch.Tensor, torch.Tensor] = self.down.normed(
            torch.nn.functional.silu(gate) * up, residual, self.norm, EPS
        )
        return found


def _of_all(parameter: Any) -> torch.Tensor:
    grad = parameter.grad
    full: torch.Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full


def against_whole(world_size: int, bias: bool) -> list[str] | None:
    """Faults of the sharded sublayer, forward and backward."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(4)
    whole = Whole(bias)
    sharded, faults = Sharded(whole, bias, group), []

    def check(name: str, found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
        assert found is not None and wanted is not None, name
        error = relative_error(found.detach(), wanted.detach())
        if not (found.shape == wanted.shape and error < _LIMIT):
            faults.append(f"{name}: {found.shape} for {wanted.shape}, off by {error}")

    x = torch.randn(3, 2, HIDDEN, dtype=torch.float64)
    scale = torch.randn(3, 2, HIDDEN, dtype=torch.float64)
    inputs = []
    for module in (whole, sharded):
        given = x.clone().requires_grad_(), scale.clone().requires_grad_()
        normed, total = module(*given)
        ((normed * scale).sum() + total.sin().sum()).backward()
        inputs.append((given, normed, total))
    (wanted_given, *wanted), (given, *found) = inputs
    for name, one, other in zip(("norm", "residual"), found, wanted, strict=True):
        check(name, one, other)
    for name, one, other in zip(("x", "residual"), given, wanted_given, strict=True):
        check(f"gradient of {name}", one.grad, other.grad)
    for name, parameter in whole.named_parameters():
        own = {"gate": "gate_up", "up": "gate_up"}.get(name.split(".")[0])
        if own is not None:
            kind, number = name.split(".")[1], "0" if name.startswith("gate") else "1"
            name = f"{own}.{kind}_{number}"
        check(f"gradient of {name}", _of_all(sharded.get_parameter(name)), parameter.grad)
    with torch.no_grad():
        check("no rows", sharded(x[:0], scale[:0])[1], scale[:0])
        alone = sharded.down(torch.ones(2, FFN // world_size, dtype=torch.float64))
    check("down alone", alone, whole.down(torch.ones(2, FFN, dtype=torch.float64)))
    return faults


def _layer(kind: type, group: dist.ProcessGroup, **options: Any) -> Any:
    return kind(32, 32, group=group, sequence_parallel=False, **options)


def refusals() -> list[str] | None:
    """What the layers say to arguments that do not go without sequence parallelism."""
    group = group_of(2)
    if group is None:
        return None
    x, residual, weight = torch.ones(2, 16), torch.ones(2, 32), torch.ones(32)

    def of_flag() -> None:
        RowParallelLinear(32, 32, group=group, sequence_parallel=1)  # type: ignore[arg-type]

    def of_gradient() -> None:
        _layer(RowParallelLinear, group).normed(x, residual, weight, quantize_out="rowwise")

    calls = [
        lambda: _layer(RowParallelLinear, group, fp8="rowwise"),
        lambda: _layer(ColumnParallelLinear, group, fp8="rowwise"),
        lambda: _layer(ColumnParallelLinear, group, save_gathered=True),
        of_flag,
        lambda: RowParallelLinear(32, 32, group=group).normed(x, residual, weight),
        lambda: _layer(RowParallelLinear, group).normed(x, residual, weight[:3]),
        of_gradient,
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except agmm.InvalidArgument as error:
            said.append(str(error))
    return said
