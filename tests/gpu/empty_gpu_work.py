"""Calls without elements on GPUs, on some ranks or on all, inside the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from gpu_work import device, everyone, group_of, integers, last_ranks, wait_for_the_end

import agmm

K, N = 512, 256


@cache  # captures make none
def _numbers(*shape: int) -> torch.Tensor:
    return integers(shape, 3)


def _weight() -> torch.Tensor:
    return _numbers(N, K).t()


@cache
def _fp8(*shape: int) -> torch.Tensor:
    return _numbers(*shape).to(torch.float8_e4m3fn)


@cache
def _one() -> torch.Tensor:
    return torch.ones((), device=device())


OPS: dict[str, Callable[[int, Any], torch.Tensor]] = {
    "gather": lambda rows, group: agmm.all_gather_matmul(
        _numbers(rows, K), _weight(), group, strict=True
    ),
    "gather by a kernel of its own": lambda rows, group: agmm.all_gather_matmul(
        _numbers(rows, K), _weight(), group, config="gather"
    ),
    "gather of fp8": lambda rows, group: agmm.all_gather_scaled_matmul(
        _fp8(rows, K), _fp8(N, K).t(), _one(), _one(), group, strict=True
    ),
    "scatter": lambda rows, group: agmm.matmul_reduce_scatter(
        _numbers(rows * group.size(), K), _weight(), group, strict=True
    ),
    "all-reduce of fp8": lambda rows, group: agmm.scaled_matmul_all_reduce(
        _fp8(rows, K), _fp8(N, K).t(), _one(), _one(), group, strict=True
    ),
    "scatter of fp8": lambda rows, group: agmm.scaled_matmul_reduce_scatter(
        _fp8(rows * group.size(), K), _fp8(N, K).t(), _one(), _one(), group, strict=True
    ),
    "all-reduce": lambda rows, group: agmm.matmul_all_reduce(
        _numbers(rows, K), _weight(), group, strict=True
    ),
    "all_gather": lambda rows, group: agmm.collectives.all_gather(
        _numbers(rows, K), group, strict=True
    ),
    "reduce_scatter": lambda rows, group: agmm.collectives.reduce_scatter(
        _numbers(rows * group.size(), K), group, strict=True
    ),
    "all_reduce, later": lambda rows, group: agmm.collectives.all_reduce(
        _numbers(rows, K), group, async_op=True, strict=True
    ).wait(),
}


def on_all_ranks(world_size: int) -> list[str] | None:
    """Faults of calls without elements between calls that have some: eager, and in graphs."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    faults = []
    for name, op in OPS.items():
        before = op(128, group)
        for _ in range(3):
            if op(0, group).numel():
                faults.append(f"{name}: elements")
        if not torch.equal(op(128, group), before):
            faults.append(f"{name}: differs behind calls without elements")
        torch.cuda.synchronize()
        dist.barrier(group)
        if name == "all_reduce, later":
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            op(0, group)
            captured = op(128, group)
            op(0, group)
        for _ in range(3):
            captured.fill_(torch.nan)
            graph.replay()
            op(0, group)
            if not torch.equal(captured, before):
                faults.append(f"{name}: a replay differs")
    return faults


def on_one_rank(name: str) -> None:
    """Rank 1 calls without rows where the others have some, then all of them with rows: every rank
    must end with a message."""
    group, op = everyone(), OPS[name]
    for rows in (128, 0 if dist.get_rank() == 1 else 128, 128):
        op(rows, group)
    wait_for_the_end()


def on_one_rank_of_a_graph(name: str) -> None:
    """A graph's call without elements on one rank: nobody may get past it."""
    group, op = everyone(), OPS[name]
    op(128, group)
    op(0, group)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        op(0 if dist.get_rank() == 1 else 128, group)
    for _ in range(3):
        graph.replay()
    wait_for_the_end()
