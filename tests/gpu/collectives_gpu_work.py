"""What the tests of `agmm.collectives` and `agmm.check_nan` on GPUs run inside the ranks of a
pool."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from gpu_work import group_of, last_ranks

import agmm

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3), (3, 1, 5), (1001,), (300_001,)]


def _inputs(
    kind: str, shape: tuple[int, ...], world_size: int, dim: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Of each rank: whole numbers, whose sums are exact in any order."""
    sizes = list(shape)
    if kind == "reduce_scatter":
        sizes[dim] *= world_size
    generators = [torch.Generator("cuda").manual_seed(100 * seed + r) for r in range(world_size)]
    return [
        torch.randint(-4, 5, sizes, generator=generator, device="cuda").to(dtype)
        for generator in generators
    ]


def _wanted(kind: str, every: list[torch.Tensor], op: str, dim: int, rank: int) -> torch.Tensor:
    if kind == "all_gather":
        return torch.cat([x.reshape(1) if x.dim() == 0 else x for x in every], dim)
    total = torch.stack(every).double().sum(0)
    total = (total / len(every) if op == "avg" else total).to(every[0].dtype)
    return total.chunk(len(every), dim)[rank] if kind == "reduce_scatter" else total


def _call(kind: str, x: torch.Tensor, group: Any, op: str, dim: int, **options: Any) -> Any:
    if kind == "all_gather":
        return agmm.collectives.all_gather(x, group, dim=dim, **options)
    if kind == "reduce_scatter":
        return agmm.collectives.reduce_scatter(x, group, op=op, dim=dim, **options)
    return agmm.collectives.all_reduce(x, group, op=op, **options)


def values(world_size: int, kind: str, dtype: torch.dtype) -> list[str] | None:
    """Faults, in words: new results, given ones, in place, in the background."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, (shape, op) in enumerate(itertools.product(_SHAPES, ("sum", "avg"))):
        for dim in range(max(1, len(shape))) if kind != "all_reduce" else (0,):
            if kind == "reduce_scatter" and not shape:
                continue
            every = _inputs(kind, shape, world_size, dim, dtype, seed)
            wanted, x = _wanted(kind, every, op, dim, rank), every[rank]
            given, strided = (torch.full_like(wanted, torch.nan) for _ in range(2))
            strided = torch.stack([strided, strided], -1)[..., 0]
            work = _call(kind, x, group, op, dim, async_op=True)
            _call(kind, x, group, op, dim, out=given)
            _call(kind, x, group, op, dim, out=strided)
            outs = [_call(kind, x, group, op, dim), given, strided, work.wait()]
            if kind == "all_reduce":
                outs.append(_call(kind, x, group, op, dim, out=x))
            for i, out in enumerate(outs):
                # An average may be rounded twice by the backend.
                close = torch.allclose(out.double(), wanted.double(), rtol=2**-7, atol=0)
                if out.shape != wanted.shape or not (close if op == "avg" else out.equal(wanted)):
                    faults.append(f"rank {rank}: {kind} {op} {shape} along {dim}: result {i}")
    return faults


def in_graphs(world_size: int) -> list[str] | None:
    """Replays in turn with eager calls, with new data each."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    x = torch.zeros(world_size * 64, device="cuda")
    for kind in KINDS:
        _call(kind, x, group, "sum", 0)
        torch.cuda.synchronize()
        dist.barrier(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = _call(kind, x, group, "sum", 0)
        for turn in range(20):
            x.fill_(turn + rank)
            graph.replay()
            eager = _call(kind, x, group, "sum", 0)
            torch.cuda.synchronize()
            if not torch.equal(captured, eager) or not float(eager.sum()) > 0:
                faults.append(f"rank {rank}: {kind}, turn {turn}")
        del graph
    return faults


def nan_warned(world_size: int) -> None:
    """Rank 1 of the group sends a NaN in every op, twice."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return
    rank = dist.get_rank(group)
    shard = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    if rank == 1:
        shard[3, 5] = torch.nan
    agmm.check_nan("warn")
    try:
        for _ in range(2):
            agmm.all_gather_matmul(shard, shard, group)
            agmm.matmul_reduce_scatter(shard.repeat(world_size, 1), shard, group)
            agmm.collectives.all_reduce(shard, group)
            torch.cuda.synchronize()
    finally:
        agmm.check_nan("off")  # says what came


def nan_raised(world_size: int) -> list[str] | None:
    """Every rank has one, so none waits for another."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    shard = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    bad = shard.clone()
    bad[3, 5] = torch.nan
    calls = [
        lambda x: agmm.all_gather_matmul(x, shard, group),
        lambda x: agmm.matmul_reduce_scatter(x.repeat(world_size, 1), shard, group),
        lambda x: agmm.collectives.all_gather(x, group),
    ]
    found = []
    for call in calls:
        call(shard)  # kept
        agmm.check_nan("raise")
        try:
            call(shard)
            call(bad)
        except agmm.AgmmError as error:
            found.append(str(error).split(":")[0] + str(error).split("NaN at ")[1].split(" of")[0])
        finally:
            agmm.check_nan("off")
        call(shard)
    return found
