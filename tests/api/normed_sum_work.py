"""What the tests of `agmm.matmul_all_reduce_rms_norm` run inside the ranks of a pool, on CPUs and
GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm.ops.quantize import quantised
from agmm.runtime.scaling import BY_NAME

EPS = 1e-5
SHAPES = (((1,), 24, 16), ((0, 3), 16, 8), ((5,), 40, 33), ((2, 3), 64, 48), ((130,), 32, 96))
"""The leading sizes, N and K of a rank."""


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


class Operands:
    """The operands of one rank of a group."""

    def __init__(
        self,
        shape: tuple[tuple[int, ...], int, int],
        dtype: torch.dtype,
        rank: int,
        device: str = "cpu",
    ) -> None:
        leading, n, k = shape
        self.A = _numbers((*leading, k), dtype, 10 + rank, device)
        self.B = _numbers((n, k), dtype, 20 + rank, device).t()
        self.bias = _numbers((n,), dtype, 3, device)
        self.residual = _numbers((*leading, n), dtype, 4, device)
        self.weight = _numbers((n,), dtype, 5, device)

    def call(self, group: dist.ProcessGroup, **options: Any) -> Any:
        return agmm.matmul_all_reduce_rms_norm(
            *(self.A, self.B, self.residual, self.weight, EPS, group), bias=self.bias, **options
        )


def _exact(every: list[Operands]) -> torch.Tensor:
    total = every[0].residual.double() + every[0].bias.double()
    for one in every:
        total = total + one.A.double() @ one.B.double()
    return total


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def wrong(
    group: dist.ProcessGroup,
    shape: tuple[tuple[int, ...], int, int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[str]:
    """Faults, in words."""
    every = [Operands(shape, dtype, rank, device) for rank in range(group.size())]
    own, faults, label = every[dist.get_rank(group)], [], f"{shape} {dtype}"
    with torch.no_grad():
        normed, total = own.call(group)
        again = own.call(group)
    # The products that travel are rounded, the sum with its residual is, and so is the norm.
    limit = (3.0 + group.size()) * torch.finfo(dtype).eps + 1e-6 * (dtype.itemsize < 8)
    if not _error(total, _exact(every)) < limit:
        faults.append(f"{label}: the sum is off by {_error(total, _exact(every))}")
    exact = total.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * own.weight.double()
    if not _error(normed, exact) < limit:
        faults.append(f"{label}: the norm is off by {_error(normed, exact)}")
    if not (torch.equal(normed, again[0]) and torch.equal(total, again[1])):
        faults.append(f"{label}: another call has other bits")
    for name, tensor in (("norm", normed), ("residual", total)):
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor, group=group)
        if not all(torch.equal(one, tensor) for one in gathered):
            faults.append(f"{label}: the ranks have other bits of the {name}")
    return faults + _quantised_wrong(own, normed, group, label)


def _quantised_wrong(
    own: Operands, normed: torch.Tensor, group: dist.ProcessGroup, label: str
) -> list[str]:
    if normed.dtype == torch.float64 or normed.numel() == 0:
        return []
    faults = []
    for kind in ("rowwise", "block"):
        (values, scale), _ = own.call(group, quantize_out=kind)
        wanted, scales = quantised(normed.flatten(0, -2), BY_NAME[kind].a, values.dtype)
        if values.dtype != torch.float8_e4m3fn or values.shape != normed.shape:
            faults.append(f"{label}, {kind}: {values.shape} {values.dtype}")
        is_same = torch.equal(values.view(torch.uint8).view(-1), wanted.view(torch.uint8).view(-1))
        if not (is_same and torch.equal(scale.flatten(0, -2), scales)):
            faults.append(f"{label}: {kind} is not the norm's")
    return faults


COUNTS = (1, 2, 5, 33, 64)


def rows_alone(
    group: dist.ProcessGroup, dtype: torch.dtype, device: str = "cpu", n: int = 24
) -> list[str]:
    """Faults where rows of batch-invariant calls depend on how many others there are."""
    own = Operands(((max(COUNTS),), n, 64), dtype, dist.get_rank(group), device)
    faults = []

    def of_rows(count: int) -> Any:
        return agmm.matmul_all_reduce_rms_norm(
            *(own.A[:count].clone(), own.B, own.residual[:count].clone(), own.weight, EPS, group),
            batch_invariant=True,
        )

    whole = of_rows(max(COUNTS))
    for count in COUNTS:
        found = of_rows(count)
        for name, one, all_rows in zip(("norm", "residual"), found, whole, strict=True):
            if not torch.equal(one, all_rows[:count]):
                faults.append(f"{dtype}: the {name} of the first {count} rows has other bits")
    return faults


def gradients(group: dist.ProcessGroup) -> list[str]:
    """Faults where the gradients are not those of the parts."""
    rank = dist.get_rank(group)
    own, other = (Operands(((2, 3), 6, 4), torch.float64, rank) for _ in range(2))
    names = ("A", "B", "bias", "residual", "weight")
    for operands in (own, other):
        for name in names:
            getattr(operands, name).requires_grad_()
    normed, total = own.call(group)
    (normed.sin().sum() + total.cos().sum()).backward()
    summed = agmm.matmul_all_reduce(
        other.A, other.B, group, bias=other.bias, residual=other.residual
    )
    parts = torch.nn.functional.rms_norm(summed, (6,), other.weight, EPS)
    (parts.sin().sum() + summed.cos().sum()).backward()
    faults = []
    for name in names:
        found, wanted = (getattr(operands, name).grad for operands in (own, other))
        if found is None or not torch.equal(found, wanted):
            faults.append(f"{name}: {found} for {wanted}")
    return faults


def compiled(group: dist.ProcessGroup) -> list[str]:
    """Faults where the graph has not one op, or other bits than the eager call."""
    own, graphs = Operands(((4,), 6, 8), torch.float32, dist.get_rank(group)), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    with torch.no_grad():
        found = torch.compile(lambda: own.call(group), backend=backend, fullgraph=True)()
        eager = own.call(group)
    faults = [] if all(map(torch.equal, found, eager)) else ["other values"]
    targets = [target for target in graphs[0] if "agmm" in target]
    wanted = ["agmm._matmul_all_reduce_rms_norm.default"]
    return faults if targets == wanted else [*faults, str(graphs)]
