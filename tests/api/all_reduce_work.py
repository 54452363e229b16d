"""What the tests of `agmm.matmul_all_reduce` run inside the ranks of a pool."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import rank_work
import torch
import torch.distributed as dist
from scatter_work import in_order

import agmm
from agmm.ops import kept, plain_all_reduce, scatter_plan, small_collectives
from agmm.ops.pipeline import serve
from agmm.ops.plain_scatter import PlainScatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning.problems import KernelConfig
from agmm.planning.transport_names import parse
from agmm.runtime import collectives
from agmm.runtime.calls import Call
from agmm.runtime.workspaces import cpu_workspace
from agmm.testing.reference import relative_error

_Shape = tuple[int, ...]  # M, ..., N, K


def _group(world_size: int) -> dist.ProcessGroup | None:
    torch.use_deterministic_algorithms(True)
    return rank_work.group_of(world_size)


def _random(shape: _Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _operands(
    shape: _Shape, world_size: int, dtype: torch.dtype, seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    *rows, n, k = shape
    return [
        (
            _random((*rows, k + r), dtype, 1000 * seed + 10 * r),
            _random((n, k + r), dtype, 1000 * seed + 10 * r + 1).t(),
        )
        for r in range(world_size)
    ]


def _of_all(out: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(out) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, out, group=group)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def products(
    world_size: int, shapes: list[_Shape], dtype: torch.dtype, bias: bool
) -> list[str] | None:
    """Faults found, in words; each rank has its own K_local."""
    group = _group(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for seed, shape in enumerate(shapes):
        every = _operands(shape, world_size, dtype, seed)
        b = _random(shape[-2:-1], dtype, seed + 5) if bias else None
        A, B = every[rank]
        A = torch.stack([A, A], -1)[..., 0] if seed % 2 else A
        out = agmm.matmul_all_reduce(A, B, group, bias=b, strict=True)
        again = agmm.matmul_all_reduce(A, B, group, bias=b, strict=True)
        exact = torch.stack([A.double() @ B.double() for A, B in every]).sum(0)
        exact = exact if b is None else exact + b.double()
        parts = [A.to(wide) @ B.to(wide) for A, B in every]
        plain = in_order(parts, -1, dtype, 1, b)
        cancelled = torch.stack(parts).double().abs().sum(0).norm() / exact.norm()
        allowed = relative_error(plain, exact)
        if exact.norm() > 0:
            allowed += 4 * torch.finfo(dtype).eps * max(1.0, float(cancelled))
        label = f"{shape} {dtype} on rank {rank} of {world_size}"
        error = relative_error(out, exact)
        if not error <= allowed or out.dtype != dtype or out.shape != exact.shape:
            faults.append(f"{label}: {out.shape} {out.dtype}, error {error}, allowed {allowed}")
        if not out.is_contiguous() or out._is_view():
            faults.append(f"{label}: strides {out.stride()}")
        if not all(torch.equal(_bits(one), _bits(out)) for one in _of_all(out, group)):
            faults.append(f"{label}: the ranks have other bits")
        if not torch.equal(_bits(again), _bits(out)):
            faults.append(f"{label}: the next call has other bits")
    return faults


def by_kernels(world_size: int, bias: bool) -> list[str] | None:
    """Faults of calls as on GPUs, for whose kernels the CPU backend stands in: as planned by one
    kernel, by a scatter and a gather, or unfused; the first call, and the one that is kept. Beside
    a bias stands a residual."""
    group = _group(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    called: list[str] = []
    kernel = KernelConfig.parse("128x128x64_1x1_pingpong")

    def call_with(found: KernelConfig, *_: Any, all_reduce_sms: int = 0) -> Callable[..., Any]:
        assert found == kernel and all_reduce_sms in (0, 132)

        def made(As: Any, Bs: Any, bias: Any, residual: Any) -> torch.Tensor:
            words = Call("matmul_all_reduce", A=As, B=Bs)
            called.append("lagged" if all_reduce_sms else "scatter")
            if all_reduce_sms:
                found = cpu_workspace(group).matmul_all_reduce(As[0], Bs[0], bias, words)
                if residual is not None:  # of which a kernel sends the sum
                    shards = [torch.empty_like(residual) for _ in range(world_size)]
                    dist.all_gather(shards, residual, group)
                    found += torch.cat(shards)
                return found
            scatter = PlainScatter(As, Bs, bias, group, ScatterSettings(), residual=residual)
            return scatter.by_cpu(words)

        return made

    def gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return collectives.start_all_gather(shard, group.group_name, 0)()

    def prepare_again(kind: str, *_: Any, **__: Any) -> Any:
        return SumOfTheBackend(group) if kind == "all_reduce" else None

    generator = torch.Generator().manual_seed(world_size)
    for rows in (1, world_size, 2 * world_size + 1):
        A, B = (
            torch.randint(-8, 9, size, generator=generator).float() for size in ((rows, 6), (6, 4))
        )
        b = torch.arange(4.0) if bias else None
        residual = A[:, None, :4].clone() if bias else None
        wanted = world_size * (world_size + 1) / 2 * (A @ B) + (0 if b is None else b + A[:, :4])
        ways: list[tuple[str, bool]] = [
            ("lagged", False),
            ("lagged", True),
            ("scatter", False),
            ("unfused", False),
            ("unfused", True),  # the scatter serves, since the unfused path is refused
        ]
        for way, strict in ways:
            called.clear()
            by_one = kernel if way == "lagged" else None
            plan = scatter_plan.AllReducePlan(parse(way), by_one, 132, kernel)
            with (
                mock.patch.object(plain_all_reduce, "call_with", call_with),
                mock.patch.object(scatter_plan, "why_not_native", return_value=None),
                mock.patch.object(scatter_plan, "all_reduce_plan", return_value=plan) as asked,
                mock.patch.object(small_collectives, "why_not", return_value=None),
                mock.patch.object(small_collectives, "gather", gather),
                mock.patch.object(small_collectives, "prepare_again", prepare_again),
            ):
                given: tuple[Any, ...] = A.view(-1, 1, 6), (1.0 + rank) * B, b
                call = plain_all_reduce.PlainAllReduce(
                    *(A.view(-1, 1, 6), (1.0 + rank) * B, b), group, strict, residual
                )
                if residual is not None:
                    given = *given, residual
                call.device = torch.device("cuda", 0)
                kept.kept_calls.pop(group, None)
                out = serve(call, "kind")
                found = called.copy()
                again = kept.call_kept(group, "kind", *given)
            label = f"rank {rank}: {rows} rows, planned {way}, strict {strict}"
            wanted_calls = [] if (way, strict) == ("unfused", False) else [way]
            if strict and way == "unfused":
                wanted_calls = ["scatter"]
            if found != wanted_calls:
                faults.append(f"{label}: {found}")
            if asked.call_args.args[0] != -(-rows // world_size) * world_size:
                faults.append(f"{label}: asked for {asked.call_args.args[0]} rows")
            if not torch.equal(out, wanted.view(-1, 1, 4)):
                faults.append(f"{label}: wrong")
            # A scatter whose gather agmm cannot make again is not kept under strict; nor are rows
            # that have to be filled up.
            is_kept = wanted_calls != ["scatter"] or not strict
            if wanted_calls and rows % world_size:
                is_kept = False
            if (again is not None) != is_kept:
                faults.append(f"{label}: kept {again is not None}")
            if again is not None and not torch.equal(again, wanted.view(-1, 1, 4)):
                faults.append(f"{label}: wrong where it is kept")
    return faults


class SumOfTheBackend:
    """A `small_collectives.CollectiveCall`."""

    is_ready = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x is out
        dist.all_reduce(out, group=self._group)


def defined_bits(world_size: int, rows: int, dtype: torch.dtype, bias: bool) -> bool | None:
    """Whether a result has the very bits of its definition, row by row: the owner's part is not
    rounded. For K = 1, whose products are exact in the sums' type."""
    group = _group(world_size)
    if group is None:
        return None
    rank, wide = dist.get_rank(group), torch.float32
    every = [
        (_random((rows, 1), dtype, 7 + r), _random((1, 9), dtype, 70 + r))
        for r in range(world_size)
    ]
    b = _random((9,), dtype, 5) if bias else None
    out = agmm.matmul_all_reduce(*every[rank], group, bias=b, strict=True)
    parts = [A.to(wide) @ B.to(wide) for A, B in every]
    shared = -(-rows // world_size)
    wanted = torch.empty_like(out)
    for owner in range(world_size):
        own = slice(owner * shared, min((owner + 1) * shared, rows))
        wanted[own] = in_order([part[own] for part in parts], owner, dtype, 1, b)
    return torch.equal(out, wanted)


def in_bands(world_size: int, rows: list[int]) -> list[tuple[bool, bool]] | None:
    """Whether each sum is right, and whether the slots are as large as said."""
    group = _group(world_size)
    if group is None:
        return None
    rank, found = dist.get_rank(group), []
    for seed, m in enumerate(rows):
        generator = torch.Generator().manual_seed(seed)
        A = torch.randint(-8, 9, (m, 2), generator=generator).double()
        B = torch.randint(-8, 9, (2, 3), generator=generator).double()
        agmm.release(group)
        said = agmm.workspace_bytes((m, 3), torch.float64, world_size, op="matmul_all_reduce")
        agmm.reserve(group, said)
        before = cpu_workspace(group).slot_bytes
        out = agmm.matmul_all_reduce(A, (1.0 + rank) * B, group, strict=True)
        enough = cpu_workspace(group).slot_bytes == before == said
        found.append((torch.equal(out, world_size * (world_size + 1) / 2 * (A @ B)), enough))
    return found


def repeated(world_size: int, calls: int, delay_us: int) -> list[str] | None:
    """Calls whose data changes in between, each rank late in turn, with other ops among them."""
    group = _group(world_size)
    if group is None:
        return None
    rank, kinds, dtype = dist.get_rank(group), 5, torch.bfloat16
    workspace = cpu_workspace(group)
    rows = 197  # in several pieces of up to 5 ranks
    A = torch.empty(rows, 33, dtype=dtype)
    every = [
        (_random((rows, 33), dtype, 10 * kind + rank), _random((33, 6), dtype, 100 * kind + rank))
        for kind in range(kinds)
    ]

    def step(kind: int) -> torch.Tensor:
        A.copy_(every[kind][0])
        out = agmm.matmul_all_reduce(A, every[kind][1], group, strict=True)
        A.fill_(torch.nan)
        return out

    wanted = [step(kind) for kind in range(kinds)]
    draw, faults = random.Random(rank), []
    with mock.patch.object(type(workspace), "poison", True):
        for call in range(calls):
            if rank == call * world_size // calls and call % 4 == 0:
                time.sleep(draw.random() * delay_us * 1e-6)
            if call % 7 == 3:
                shard = torch.full((2, 3), float(call + rank))
                found = agmm.all_gather_matmul(shard, torch.eye(3), group)
                ranks = torch.arange(float(world_size)).repeat_interleave(2)[:, None]
                if not torch.equal(found, (call + ranks).expand(-1, 3)):
                    faults.append(f"gather {call} on rank {rank} differs")
            if not torch.equal(_bits(step(call % kinds)), _bits(wanted[call % kinds])):
                faults.append(f"call {call} on rank {rank} has other bits")
    return faults


def compiled(world_size: int) -> bool | None:
    """Whether a compiled call, forward and backward, has the bits of an eager one."""
    group = _group(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    A = _random((5, 8), torch.float32, rank).requires_grad_()
    B = _random((8, 3), torch.float32, 9 + rank).requires_grad_()

    def function(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return agmm.matmul_all_reduce(A, B, group, strict=True).relu()

    torch.compiler.reset()
    found, wanted = torch.compile(function, fullgraph=True)(A, B), function(A, B)
    grads = [torch.autograd.grad(out.sum(), (A, B)) for out in (found, wanted)]
    torch.compiler.reset()
    return torch.equal(found, wanted) and all(map(torch.equal, *grads))


def without_kernel(world_size: int) -> list[float] | None:
    """The result for a type that agmm does not sum: the backend does it, along the unfused path."""
    group = _group(world_size)
    if group is None:
        return None
    A, B = torch.ones(3, 2, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int32)
    with mock.patch("agmm.ops.pipeline.fall_back") as warned:
        out = agmm.matmul_all_reduce(A, B, group, bias=torch.arange(2, dtype=torch.int32))
    assert warned.call_count == 1
    return out[-1].tolist()
