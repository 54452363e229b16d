"""What the GPU tests of the portable path run inside the ranks."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gpu_work import device, wait_for_the_end

import agmm
from agmm.errors import forget_warnings
from agmm.ops import kept
from agmm.runtime import capabilities, symmetric
from agmm.testing.reference import allowed_error, gathered_product, relative_error, scattered_sum


class Case(NamedTuple):
    """The sizes of a call, for each rank."""

    rows: int
    """The rows of a shard."""
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    def operands(self, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rows, K] of a rank, and its B."""
        generator = torch.Generator(device()).manual_seed(rank)
        A, B = (
            torch.randn(shape, generator=generator, device=device()).to(self.dtype)
            for shape in ((rows, self.k), (self.n, self.k))
        )
        return A, B.t()


CASES = [
    Case(1, 256, 64),
    Case(130, 264, 136),
    Case(1000, 896, 2048),
    Case(2300, 512, 1024, torch.float16),  # in two pieces
    Case(4096, 256, 256, torch.float32),  # in four, of a dtype that no kernel has
]
PORTABLE: dict[str, Any] = {"config": "portable", "strict": True}


def gathers(case: Case, group: dist.ProcessGroup | None = None) -> list[str]:
    """Faults of all-gathers with several weights, a bias, A, and of repeated calls."""
    group, faults = group or dist.group.WORLD, []
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shards = [case.operands(source, case.rows)[0] for source in range(world_size)]
    A, Bs = torch.cat(shards), [case.operands(0, 1)[1], case.operands(1, 1)[1].contiguous()]
    biases = [torch.linspace(-1, 1, case.n, device=device()).to(case.dtype), None]
    first: list[torch.Tensor] | None = None
    for turn in range(6):
        whole, outs = agmm.all_gather_matmul(
            shards[rank], Bs, group, bias=biases, return_A=True, **PORTABLE
        )
        first = first or [out.clone() for out in outs]
        if not torch.equal(whole, A):
            faults.append(f"call {turn}: A differs")
        if not all(map(torch.equal, outs, first)):
            faults.append(f"call {turn}: other bits than in the first")
    for out, B, bias in zip(first or [], Bs, biases, strict=True):
        wanted = gathered_product(A, B, bias)
        plain = A @ B if bias is None else torch.addmm(bias, A, B)
        if relative_error(out, wanted) > allowed_error(relative_error(plain, wanted)):
            faults.append(f"error {relative_error(out, wanted):.2e}")
    return faults


def scatters(case: Case, group: dist.ProcessGroup | None = None) -> list[str]:
    """Faults of reduce-scatters, and of repeated calls."""
    group, faults = group or dist.group.WORLD, []
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows = world_size * case.rows
    A, B = case.operands(rank, rows)
    wanted = scattered_sum(lambda source: case.operands(source, rows), rank, world_size)
    bias = torch.linspace(-1, 1, case.n, device=device()).to(case.dtype)
    first: torch.Tensor | None = None
    for turn in range(6):
        out = agmm.matmul_reduce_scatter(A, B, group, **PORTABLE)
        first = out.clone() if first is None else first
        if not torch.equal(out, first):
            faults.append(f"call {turn}: other bits than in the first")
    assert first is not None
    if relative_error(first, wanted.rows) > allowed_error(wanted.error, 1.5):
        faults.append(f"error {relative_error(first, wanted.rows):.2e}, {wanted.error:.2e} by mm")
    residual = torch.randn_like(first)
    added = agmm.matmul_reduce_scatter(
        *([A, A], [B, B], group), bias=bias, residual=residual, reduce_op="avg", **PORTABLE
    )
    exact = 2 * wanted.rows / world_size + bias.double() + residual.double()
    if relative_error(added, exact) > allowed_error(wanted.error, 2.0):
        faults.append(f"with bias and residual: error {relative_error(added, exact):.2e}")
    return faults


def all_reduces(case: Case, group: dist.ProcessGroup | None = None) -> list[str]:
    """Faults of all-reduces, of rows that the ranks share and that they do not share equally."""
    group, faults = group or dist.group.WORLD, []
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for rows in (size * case.rows, size * case.rows + 1):
        A, B = case.operands(rank, rows)
        out = agmm.matmul_all_reduce(A, B, group, config="portable")
        wanted = scattered_sum(partial(case.operands, rows=rows), 0, size, parts=1)
        if relative_error(out, wanted.rows) > allowed_error(wanted.error, 1.5):
            faults.append(f"{rows} rows: error {relative_error(out, wanted.rows):.2e}")
        of_all = [torch.empty_like(out) for _ in range(size)]
        dist.all_gather(of_all, out, group)
        if not all(torch.equal(out, other) for other in of_all):
            faults.append(f"{rows} rows: other bits on other ranks")
    return faults


def graphs_between_calls(group: dist.ProcessGroup | None = None) -> list[str]:
    """Faults of graphs that are replayed between eager calls, of which one more than another has
    captured each op twice."""
    group, faults = group or dist.group.WORLD, []
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    case = Case(512, 256, 512)
    shard, B = case.operands(rank, case.rows)
    A, _ = case.operands(rank, world_size * case.rows)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        out = agmm.all_gather_matmul(shard, B, group, **PORTABLE)
        return out, agmm.matmul_reduce_scatter(A, B, group, **PORTABLE)

    wanted = [out.clone() for out in both()]
    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        held = both()
    for turn in range(12):
        found = held
        if turn % 3:
            for out in held:
                out.fill_(torch.nan)
            graph.replay()
        else:
            found = both()
        torch.cuda.synchronize()
        if not all(map(torch.equal, found, wanted)):
            faults.append(f"turn {turn}: other bits")
    return faults


def on_two_streams() -> list[str]:
    """Faults of calls that come on two streams in turn, of sizes that make the slots grow."""
    group, faults = dist.group.WORLD, []
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    streams, made = [torch.cuda.Stream() for _ in range(2)], []
    for turn, rows in enumerate((64, 64, 512, 64, 3000, 64, 512, 64)):
        case = Case(rows, 128, 256)
        shard, B = case.operands(rank, rows)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 2]):
            made.append((case, agmm.all_gather_matmul(shard, B, group, **PORTABLE), B))
    torch.cuda.synchronize()
    for case, out, B in made:
        A = torch.cat([case.operands(source, case.rows)[0] for source in range(world_size)])
        wanted = gathered_product(A, B)
        if relative_error(out, wanted) > allowed_error(relative_error(A @ B, wanted)):
            faults.append(f"{case.rows} rows: error {relative_error(out, wanted):.2e}")
    return faults


def another_architecture() -> list[str]:
    """Faults of calls on GPUs that are taken to have no wgmma: they are served by copies, with one
    warning, and few rows are not."""
    why_not = capabilities.why_not
    reason = "device: found one of compute capability 8.0, wanted 9.0 for agmm's matmuls"

    def refused(feature: Any, on: torch.device) -> str | None:
        return reason if feature == capabilities.MATMULS else why_not(feature, on)

    faults, group = [], dist.new_group(list(range(dist.get_world_size())))
    case, size, rank = Case(1024, 256, 512), dist.get_world_size(), dist.get_rank()
    forget_warnings()
    with (
        mock.patch.object(capabilities, "why_not", refused),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        shard, B = case.operands(rank, case.rows)
        A, _ = case.operands(rank, size * case.rows)
        for _ in range(3):
            agmm.all_gather_matmul(shard, B, group)
            agmm.matmul_reduce_scatter(A, B, group)
        agmm.all_gather_matmul(shard, B, group, strict=True)
        assert symmetric.why_group_unfused(group, device()) is not None
    by = [call.by for call in agmm.status().calls if call.reason and reason in call.reason]
    if by.count("agmm's copies and the library's matmul") < 2:
        faults.append(f"served by {by}")
    told = [str(one.message) for one in caught if "portable" in str(one.message)]
    if len(told) != 1:
        faults.append(f"warnings {[str(one.message) for one in caught]}")
    if not kept.kept_calls.get(group):
        faults.append("no call was kept")
    return faults


def different(op: str) -> None:
    """Rank 0 calls with other columns than the rest; every rank must end with a message."""
    group = dist.group.WORLD
    for k in (64, 128 if dist.get_rank() == 0 else 64):
        A = torch.ones(64 * dist.get_world_size(), k, device=device()).bfloat16()
        B = torch.ones(k, 64, device=device()).bfloat16()
        if op == "gather":
            agmm.all_gather_matmul(A, B, group, **PORTABLE)
        else:
            A = torch.ones(k * dist.get_world_size(), 64, device=device()).bfloat16()
            agmm.matmul_reduce_scatter(A, B[:64], group, **PORTABLE)
    wait_for_the_end()


def missing(op: str) -> None:
    """Rank 1 does not make the second call; the others must end with a message."""
    group, size = dist.group.WORLD, dist.get_world_size()
    A, B = (torch.ones(m, 64, device=device()).bfloat16() for m in (64 * size, 64))
    call = agmm.all_gather_matmul if op == "gather" else agmm.matmul_reduce_scatter
    call(A, B, group, **PORTABLE)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(30)
    call(A, B, group, **PORTABLE)
    wait_for_the_end()
