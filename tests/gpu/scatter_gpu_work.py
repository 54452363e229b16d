"""What the tests of `agmm.matmul_reduce_scatter` on GPUs run inside the ranks of a pool."""

from __future__ import annotations

import random
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_work import group_of, last_ranks

import agmm
from agmm import async_tp
from agmm.ops import scatter_plan
from agmm.ops.plain_scatter import PlainScatter
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import MATMUL_ALL_REDUCE
from agmm.planning.transports import LAGGED
from agmm.runtime.group_gpus import group_facts
from agmm.testing.reference import allowed_error, relative_error


def _whole(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose products are exact in float32."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device=device).to(dtype)


def _operands(
    rank: int,
    rows: tuple[int, ...],
    n: int,
    ks: tuple[int, ...],
    dtype: torch.dtype,
    column_major: bool,
    seed: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    As, Bs = [], []
    for i, k in enumerate(ks):
        of = 1000 * seed + 10 * rank + i
        As.append(_whole(*rows, k, seed=of, dtype=dtype))
        B = _whole(n, k, seed=of + 500, dtype=dtype)
        Bs.append(B.t() if column_major else B.t().contiguous())
    return As, Bs


def expected(
    world_size: int,
    rank: int,
    products: list[tuple[list[torch.Tensor], list[torch.Tensor]]],
    scatter_dim: int,
    is_average: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum with the kernel's roundings: the own part is not rounded, the others' are as they
    come."""
    dtype = products[0][0][0].dtype
    order = [(rank - distance) % world_size for distance in range(world_size)]
    total: Any = None
    for r in order:
        As, Bs = products[r]
        exact: Any = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
        part = exact.chunk(world_size, scatter_dim)[rank]
        total = part.float() if total is None else total + part.to(dtype).float()
    if is_average:
        total = total * (1 / world_size)
    if residual is not None:
        total = total + residual.float()
    if bias is not None:
        total = total + bias.float()
    found: torch.Tensor = total.to(dtype)
    return found


def products(
    world_size: int,
    shapes: list[tuple[int, int, tuple[int, ...]]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    leading: tuple[int, ...] = (),
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: bool = False,
    column_major: bool = True,
    calls: int = 3,
) -> list[str] | None:
    """Faults, in words. Shapes are (rows of a rank, N, K of each product). Beside a bias stands a
    residual."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, (size, n, ks) in enumerate(shapes):
        rows = list(leading)
        rows.insert(scatter_dim, world_size * size)
        for turn in range(calls):
            every = [
                _operands(r, tuple(rows), n, ks, dtype, column_major, 10 * seed + turn)
                for r in range(world_size)
            ]
            of_bias = _whole(n, seed=seed, dtype=dtype) if bias else None
            As, Bs = every[rank]
            residual = None
            if bias:
                part = list(rows)
                part[scatter_dim] = size
                residual = _whole(*part, n, seed=50 + turn + 100 * rank, dtype=dtype)
            with mock.patch.object(PlainScatter, "by_library", side_effect=AssertionError):
                out = agmm.matmul_reduce_scatter(
                    As if len(ks) > 1 else As[0],
                    Bs if len(ks) > 1 else Bs[0],
                    group,
                    scatter_dim=scatter_dim,
                    reduce_op=reduce_op,
                    bias=of_bias,
                    residual=residual,
                    strict=True,
                )
            is_average = reduce_op == "avg"
            wanted = expected(world_size, rank, every, scatter_dim, is_average, of_bias, residual)
            wrong = (out != wanted) | out.isnan()
            if out.shape != wanted.shape or wrong.any():
                faults.append(f"rank {rank}: {size}, {n}, {ks}, call {turn}: {int(wrong.sum())}")
    return faults


def all_reduces(
    world_size: int, shapes: list[tuple[int, int, int]], *, bias: bool = False
) -> list[str] | None:
    """Faults of `agmm.matmul_all_reduce` by the kernel that sends finished tiles, in words. Shapes
    are (rows in all, N, K). Calls in turn with scatters, and in graphs; all ranks have the same
    bits. Beside a bias stands a residual."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults, dtype = dist.get_rank(group), [], torch.bfloat16
    sms = group_facts(group, torch.device("cuda", torch.cuda.current_device())).sm_count
    plan = scatter_plan.AllReducePlan(LAGGED, kernels_of(MATMUL_ALL_REDUCE, "bfloat16")[0], sms)
    for seed, (rows, n, k) in enumerate(shapes):
        shared = -(-rows // world_size)
        of_bias = _whole(n, seed=seed, dtype=dtype) if bias else None
        residual = _whole(rows, n, seed=50 + seed, dtype=dtype) if bias else None
        for turn in range(3):
            every = [
                _operands(r, (rows,), n, (k,), dtype, True, 10 * seed + turn)
                for r in range(world_size)
            ]
            (A,), (B,) = every[rank]

            def call(
                A: torch.Tensor = A,
                B: torch.Tensor = B,
                bias: torch.Tensor | None = of_bias,
                residual: torch.Tensor | None = residual,
            ) -> torch.Tensor:
                settings: Any = {"bias": bias, "residual": residual, "strict": True}
                with mock.patch.object(scatter_plan, "all_reduce_plan", return_value=plan):
                    return agmm.matmul_all_reduce(A, B, group, **settings)

            out = call()

            def pad(tensor: torch.Tensor, missing: int = shared * world_size - rows) -> Any:
                return torch.nn.functional.pad(tensor, (0, 0, 0, missing))

            padded = [([pad(a) for a in As], Bs) for As, Bs in every]
            parts = [None] * world_size if residual is None else pad(residual).chunk(world_size)
            wanted = torch.cat(
                [
                    expected(world_size, r, padded, 0, False, of_bias, part)
                    for r, part in enumerate(parts)
                ]
            )[:rows]
            wrong = int((out != wanted).sum())  # NaN too
            if wrong:
                faults.append(
                    f"rank {rank}: {rows}, {n}, {k}, call {turn}: {wrong} of {out.numel()}"
                )
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            dist.barrier(group)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = call()
            for _ in range(3):
                captured.fill_(torch.nan)
                graph.replay()
                again = call()
                if not (torch.equal(captured, out) and torch.equal(again, out)):
                    faults.append(f"rank {rank}: {rows}, {n}, {k}: a replay or a repeated call")
    return faults


def stress(world_size: int, calls: int, seed: int) -> list[str] | None:
    """Calls back to back, with other data than the one before, and whole ranks late at random."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, sets = dist.get_rank(group), 3
    shape = (world_size * 256,), 8192, (1024,), torch.bfloat16, True
    data = [[_operands(r, *shape, seed + i) for r in range(world_size)] for i in range(sets)]
    wanted = [expected(world_size, rank, every, 0, False, None) for every in data]
    same, own = random.Random(seed), random.Random(seed + 1 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    which = 0
    for _ in range(calls):
        which = (which + same.randrange(1, sets)) % sets
        if own.random() < 0.2:
            torch.cuda._sleep(own.randrange(1, 400_000))
        As, Bs = data[which][rank]
        out = agmm.matmul_reduce_scatter(As[0], Bs[0], group, strict=True)
        wrong += (out != wanted[which]).sum()  # NaN too
    return [f"rank {rank}: {int(wrong)} wrong elements"] if int(wrong) else []


def in_graphs(world_size: int) -> list[str] | None:
    """Replays in turn with eager calls, with new data each; equal data has equal bits."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    A = torch.randn(world_size * 130, 264, device="cuda").bfloat16()
    B = torch.randn(392, 264, device="cuda").bfloat16().t()
    datas = [torch.randn_like(A) for _ in range(3)]
    first = []
    for data in datas:
        A.copy_(data)
        first.append(agmm.matmul_reduce_scatter(A, B, group, strict=True).clone())
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = agmm.matmul_reduce_scatter(A, B, group, strict=True)
    for turn in range(30):
        A.copy_(datas[turn % 3])
        captured.fill_(torch.nan)
        graph.replay()
        if not torch.equal(captured, first[turn % 3]):
            faults.append(f"rank {rank}: replay {turn}")
        A.copy_(datas[(turn + 1) % 3])
        if not torch.equal(agmm.matmul_reduce_scatter(A, B, group), first[(turn + 1) % 3]):
            faults.append(f"rank {rank}: eager call {turn}")
    return faults


def gradients(world_size: int) -> list[str] | None:
    """The gradients of operands and bias, against float64."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank = dist.get_rank(group)
    every = [
        _operands(r, (world_size * 24,), 64, (72,), torch.bfloat16, True, 3)
        for r in range(world_size)
    ]
    A, B = (t[0].clone().requires_grad_() for t in every[rank])
    bias = _whole(64, seed=5, dtype=torch.bfloat16).requires_grad_()
    douts = [_whole(24, 64, seed=90 + r, dtype=torch.bfloat16) for r in range(world_size)]
    agmm.matmul_reduce_scatter(A, B, group, bias=bias, strict=True).backward(douts[rank])
    dout = torch.cat(douts)
    wanted = {
        "A": (A.grad, dout.double() @ B.detach().double().t()),
        "B": (B.grad, A.detach().double().t() @ dout.double()),
        "bias": (bias.grad, dout.double().sum(0)),
    }
    faults = []
    for name, (found, exact) in wanted.items():
        assert found is not None
        if relative_error(found, exact) > allowed_error(relative_error(exact.bfloat16(), exact)):
            faults.append(f"rank {rank}: {name}")
    return faults


def gradients_of_a_shared_gather(world_size: int) -> list[str] | None:
    """The gradients of a shard under three weights: their products are scattered as one sum, by a
    kernel."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, k, ns, rows = dist.get_rank(group), 72, (64, 40, 136), 130
    dtype = torch.bfloat16
    A = _whole(world_size * rows, k, seed=1, dtype=dtype)
    every = []  # of each rank: the gradients of its outputs, and its weights
    for r in range(world_size):
        douts = [
            _whole(world_size * rows, n, seed=100 * r + i, dtype=dtype) for i, n in enumerate(ns)
        ]
        weights = [_whole(n, k, seed=100 * r + 50 + i, dtype=dtype) for i, n in enumerate(ns)]
        every.append((douts, weights))
    shard = A[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    douts, weights = every[rank]
    leaves = [weight.clone().requires_grad_() for weight in weights]
    outs = agmm.all_gather_matmul(
        shard, [leaf.t() for leaf in leaves], group, save_gathered=True, strict=True
    )
    others = ("by_library", "by_torch")
    with (
        mock.patch.object(PlainScatter, others[0], side_effect=AssertionError),
        mock.patch.object(PlainScatter, others[1], side_effect=AssertionError),
    ):
        torch.autograd.backward(outs, douts)
    assert shard.grad is not None
    faults = []
    wanted = expected(world_size, rank, every, 0, False, None)
    if not torch.equal(shard.grad, wanted):
        faults.append(f"rank {rank}: {int((shard.grad != wanted).sum())} of the shard")
    for i, (leaf, dout) in enumerate(zip(leaves, douts, strict=True)):
        exact = dout.double().t() @ A.double()
        assert leaf.grad is not None
        if relative_error(leaf.grad, exact) > allowed_error(
            relative_error(exact.bfloat16(), exact)
        ):
            faults.append(f"rank {rank}: weight {i}")
    return faults


def by_async_tp(world_size: int) -> list[str] | None:
    """torch's op, computed by agmm: no call is left to torch, of which it would warn."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    A = torch.randn(2, world_size * 130, 264, device="cuda").bfloat16()
    B = torch.randn(392, 264, device="cuda").bfloat16().t()
    with warnings.catch_warnings(), async_tp.enable():
        warnings.simplefilter("error")
        for reduce_op in ("sum", "avg"):
            found = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                A, B, reduce_op, 1, group.group_name
            )
            own = agmm.matmul_reduce_scatter(A, B, group, reduce_op=reduce_op, scatter_dim=1)
            if not torch.equal(found, own):
                faults.append(f"rank {rank}: {reduce_op}")
    return faults
