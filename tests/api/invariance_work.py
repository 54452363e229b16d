"""What the tests of batch invariance run inside the ranks of a pool, on CPUs and GPUs."""

from __future__ import annotations

import warnings
from functools import partial
from unittest import mock

import rank_work
import torch
import torch.distributed as dist
from rank_groups import fresh_group

import agmm
from agmm import _env, nn
from agmm.ops import kept, small_collectives
from agmm.planning import call_plans
from agmm.planning.cost_model.collectives import MOST_BYTES
from agmm.runtime import groups

COUNTS = (1, 2, 3, 4, 5, 8, 31, 33, 64, 100)
"""Numbers of rows, the first of which are the same ones."""


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def _group(world_size: int, device: str) -> dist.ProcessGroup | None:
    if device == "cpu":
        return rank_work.group_of(world_size)
    import gpu_work  # which is there beside the GPU tests alone

    return gpu_work.group_of(gpu_work.last_ranks(world_size))


_others: dict[int, dist.ProcessGroup] = {}
"""Groups whose ranks take themselves to be on hosts of their own, by world size."""


class Operands:
    """The operands of one rank, with as many rows as the largest call has."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, rank: int, device: str) -> None:
        most = max(COUNTS)
        self.A = _random((most, k), dtype, 10 + rank, device)
        self.B = _random((n, k), dtype, 20 + rank, device).t()
        self.bias = _random((n,), dtype, 3, device)
        self.residual = _random((most, n), dtype, 4, device)

    def rows(self, chosen: slice, group: dist.ProcessGroup, strict: bool = False) -> torch.Tensor:
        """The result for these rows."""
        return agmm.matmul_all_reduce(
            *(self.A[chosen].clone(), self.B, group),
            bias=self.bias,
            residual=self.residual[chosen].clone(),
            batch_invariant=True,
            strict=strict,
        )


def _rounded_in_order(
    operands: list[Operands], dtype: torch.dtype, *, rounds_twice: bool
) -> torch.Tensor:
    """The sum by its definition, of products in the sums' dtype, which few elements round
    otherwise."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    products = [(one.A.double() @ one.B.double()).to(dtype).to(wide) for one in operands]
    total = products[0]
    for product in products[1:]:
        total = total + product
    if rounds_twice:
        return total.to(dtype) + operands[0].bias + operands[0].residual
    return (total + operands[0].bias + operands[0].residual).to(dtype)


def rows_alone(
    world_size: int, sizes: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> list[str] | None:
    """Faults found, in words: rows whose bits depend on other rows, on their place or on the
    carrier of the sum; and a sum that is wrong."""
    group = _group(world_size, device)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    every = [Operands(*sizes, dtype, r, device) for r in range(world_size)]
    own = every[rank]
    whole = own.rows(slice(0, max(COUNTS)), group)
    for count in COUNTS:
        if not torch.equal(own.rows(slice(0, count), group), whole[:count]):
            faults.append(f"the first {count} rows have other bits")
    for first, count in ((1, 1), (7, 5), (40, 33), (99, 1)):
        found = own.rows(slice(first, first + count), group)
        if not torch.equal(found, whole[first : first + count]):
            faults.append(f"{count} rows from {first} on have other bits at another place")
    again = [own.rows(slice(0, 5), group) for _ in range(3)]  # kept, on GPUs
    if not all(torch.equal(one, whole[:5]) for one in again):
        faults.append("a kept call has other bits")
    wanted = _rounded_in_order(every, dtype, rounds_twice=device != "cpu")
    off = (whole.double() - wanted.double()).norm() / wanted.double().norm()
    if not off < 0.5 * torch.finfo(dtype).eps + 1e-6 * (dtype.itemsize < 8):
        faults.append(f"the sum is off by {off}")
    gathered = [torch.empty_like(whole) for _ in range(world_size)]
    dist.all_gather(gathered, whole, group=group)
    if not all(torch.equal(one, whole) for one in gathered):
        faults.append("the ranks have other bits")
    return faults


def by_other_ways(world_size: int, dtype: torch.dtype) -> list[str] | None:
    """Faults found: the backend's sum, a compiled call and one without memory for slots have the
    bits of the CPU backend's."""
    group = rank_work.group_of(world_size)
    first = dist.get_world_size() - world_size
    other = _others.get(world_size) or dist.new_group(list(range(first, dist.get_world_size())))
    _others[world_size] = other
    if group is None:
        return None
    agmm.errors.forget_warnings()
    own, faults = Operands(24, 40, dtype, dist.get_rank(group), "cpu"), []
    wanted = own.rows(slice(0, 7), group, strict=True)
    scatter = partial(agmm.matmul_reduce_scatter, own.A[:96], own.B, bias=own.bias)
    part = scatter(group, batch_invariant=True, strict=True)
    with (
        mock.patch.object(groups, "host_id", return_value=f"host {dist.get_rank()}"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = own.rows(slice(0, 7), other)
        by_backend = scatter(other, batch_invariant=True)
    if world_size > 1 and not any("unfused path" in str(one.message) for one in caught):
        faults.append("the unfused path was taken in silence")
    if not torch.equal(found, wanted):
        faults.append("the backend's sum has other bits")
    if not torch.equal(by_backend, part):
        faults.append("the backend's scatter has other bits")
    torch.compiler.reset()
    compiled = torch.compile(lambda: own.rows(slice(0, 7), group), backend="aot_eager")
    if not torch.equal(compiled(), wanted):
        faults.append("a compiled call has other bits")
    torch.compiler.reset()
    return faults


def by_differing_environments() -> str:
    """The error of a planned call in a group of which rank 0 has another environment."""
    group = fresh_group()
    value = "off" if dist.get_rank() == 0 else "on"
    with mock.patch.object(_env, "batch_invariant_at_start", value):
        try:
            call_plans.agree(group, torch.device("cpu"))
        except agmm.AgmmError as error:
            return str(error)
    return "none"


def by_other_ways_on_gpus(world_size: int, dtype: torch.dtype) -> list[str] | None:
    """Faults found: sums of products that the backend gathers, of more bytes than agmm's kernels
    are meant to serve, and of captured calls have the bits of agmm's kernels."""
    group = _group(world_size, "cuda")
    if group is None:
        return None
    own, faults = Operands(264, 1032, dtype, dist.get_rank(group), "cuda"), []
    wanted = own.rows(slice(0, 7), group, strict=True)
    kept.kept_calls.clear()
    with mock.patch.object(small_collectives, "why_not", return_value="not by a kernel"):
        if not torch.equal(own.rows(slice(0, 7), group), wanted):
            faults.append("the backend's sum has other bits")
    own.rows(slice(0, 7), group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = own.rows(slice(0, 7), group)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(captured, wanted):
            faults.append("a captured call has other bits")
    copies = 1 + (MOST_BYTES // wanted.nbytes)
    many = agmm.matmul_all_reduce(
        *(own.A[:7].repeat(copies, 1), own.B, group),
        bias=own.bias,
        residual=own.residual[:7].repeat(copies, 1),
        batch_invariant=True,
    )
    if not torch.equal(many, wanted.repeat(copies, 1)):
        faults.append("many rows have other bits")
    return faults


def rows_of_a_layer(
    world_size: int, sizes: tuple[int, int], dtype: torch.dtype, device: str
) -> list[str] | None:
    """Faults found of a column-wise linear for decoding: rows whose bits depend on other rows, a
    captured call with other bits, and a product that is wrong."""
    group = _group(world_size, device)
    if group is None:
        return None
    (n, k), most, faults = sizes, max(COUNTS), []
    layer = nn.ColumnParallelLinear(
        *(k, n * world_size),
        group=group,
        sequence_parallel=False,
        device=device,
        dtype=dtype,
    )
    x = _random((most, k), dtype, 5, device)
    with mock.patch.object(_env, "batch_invariant_at_start", "on"), torch.no_grad():
        whole = layer(x)
        for first, count in (*((0, count) for count in COUNTS), (7, 5), (40, 33), (99, 1)):
            rows = slice(first, first + count)
            if not torch.equal(layer(x[rows].clone()), whole[rows]):
                faults.append(f"{count} rows from {first} on have other bits")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = layer(x)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(captured, whole):
            faults.append("a captured call has other bits")
    weights, (bias, *_) = layer.operands()
    assert bias is not None
    wanted = x.double() @ weights[0].double() + bias.double()
    off = (whole.double() - wanted).norm() / wanted.norm()
    if not off < torch.finfo(dtype).eps:
        faults.append(f"the product is off by {off}")
    return faults


def scattered_rows(world_size: int, dtype: torch.dtype, device: str = "cpu") -> list[str] | None:
    """Faults found of a matmul + reduce-scatter: rows whose bits depend on other rows, a backend's
    or a compiled call with other bits, and a sum that is wrong."""
    group = _group(world_size, device)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    every = [Operands(72, 136, dtype, r, device) for r in range(world_size)]
    own = every[rank]

    def scattered(rows: int, strict: bool = False) -> torch.Tensor:
        """The first rows of the sum, of all ranks."""
        part = rows // world_size
        found = agmm.matmul_reduce_scatter(
            *(own.A[:rows].clone(), own.B, group),
            bias=own.bias,
            residual=own.residual[rank * part : (rank + 1) * part].clone(),
            batch_invariant=True,
            strict=strict,
        )
        parts = [torch.empty_like(found) for _ in range(world_size)]
        dist.all_gather(parts, found, group=group)
        return torch.cat(parts)

    whole = scattered(96, strict=device == "cpu")
    for times in (1, 2, 11, 16):
        rows = times * world_size
        if not torch.equal(scattered(rows), whole[:rows]):
            faults.append(f"the first {rows} rows have other bits")
    wanted = _rounded_in_order(every, dtype, rounds_twice=device != "cpu")[:96]
    off = (whole.double() - wanted.double()).norm() / wanted.double().norm()
    if not off < 0.5 * torch.finfo(dtype).eps + 1e-6 * (dtype.itemsize < 8):
        faults.append(f"the sum is off by {off}")
    if device == "cpu":
        torch.compiler.reset()
        compiled = torch.compile(
            lambda: agmm.matmul_reduce_scatter(own.A[:96], own.B, group, batch_invariant=True),
            backend="aot_eager",
        )
        eager = agmm.matmul_reduce_scatter(own.A[:96], own.B, group, batch_invariant=True)
        if not torch.equal(compiled(), eager):
            faults.append("a compiled call has other bits")
        torch.compiler.reset()
    return faults
