"""Ranks that come late, not at all or with other shapes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_work import ExactCalls, device, everyone, integers, small_call, wait_for_the_end

import agmm
from agmm.planning.shapes import LocalShape
from agmm.runtime.workspaces import cuda_workspace


def different_shapes(way: str) -> None:
    """Rank 0 calls with other columns than the rest; every rank must end with a message."""
    group = everyone()
    for width in (512, 1024 if dist.get_rank() == 0 else 512):
        small_call(group, way, width)
    wait_for_the_end()


def _small_scatter(group: dist.ProcessGroup, k: int) -> torch.Tensor:
    """How many elements are wrong. Every rank adds the same, whose bf16 is exact."""
    A, B = (integers(shape, 1).clamp(-1, 1) for shape in ((64 * group.size(), k), (64, k)))
    B = B.t()
    out = agmm.matmul_reduce_scatter(A, B, group, strict=True)
    wanted = group.size() * torch.mm(A.float(), B.float())
    rank = dist.get_rank(group)
    return torch.ne(out, wanted[64 * rank : 64 * rank + 64].to(out.dtype)).sum()


def different_scatters(_: str) -> None:
    """The ranks call matmul + reduce-scatter differently."""
    group = everyone()
    for k in (64, 128 if dist.get_rank() == 0 else 64):
        _small_scatter(group, k)
    wait_for_the_end()


def different_fp8(way: str) -> None:
    """The ranks call differently on fp8 operands, gathered or scattered."""
    group = everyone()
    op: Any = agmm.scaled_matmul_reduce_scatter
    rows = 64 * group.size()
    if way == "scaled gather":
        op, rows = agmm.all_gather_scaled_matmul, 64
    scales = torch.ones(2, 1, device=device())
    for k in (64, 128 if dist.get_rank() == 0 else 64):
        A, B = (torch.ones(m, k, device=device()).to(torch.float8_e4m3fn) for m in (rows, 64))
        op(A, B.t(), *scales, group, strict=True)
    wait_for_the_end()


def one_rank_late(way: str, late_s: float) -> list[str]:
    """Faults of a call to which rank 1 comes late."""
    group = everyone()
    exact = ExactCalls(group, LocalShape(64, 64, 512))
    for turn in range(2):
        if turn == 1 and dist.get_rank() == 1:
            time.sleep(late_s)
        if way == "scatter":
            exact.wrong += _small_scatter(group, 64)
        else:
            exact.new_data()
            exact.call(way)
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[device().index])
    return exact.faults(f"{way}, a late rank")


def call_until_killed(way: str, is_calling: str) -> None:
    """Calls without end; rank 1 makes the file once they are under way."""
    group = everyone()
    exact = ExactCalls(group, LocalShape(64, 64, 512))
    for turn in range(1 << 30):
        for _ in range(16):
            if way == "scatter":
                exact.wrong += _small_scatter(group, 64)
            else:
                exact.call(way)
        assert exact.faults(f"{way}, turn {turn}") == []
        if turn == 4 and dist.get_rank() == 1:
            Path(is_calling).touch()


def one_rank_missing(way: str) -> None:
    """Rank 1 stays away from the second call."""
    group = everyone()
    small_call(group, way)
    if dist.get_rank() != 1:
        small_call(group, way)
    wait_for_the_end()


def one_rank_misses_a_replay(way: str) -> None:
    """Rank 1 stays away from the second replay, of a call whose tiles lie in two shards."""
    group = everyone()
    exact = ExactCalls(group, LocalShape(100, 64, 64))
    exact.call(way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exact.call(way)
    graph.replay()
    if dist.get_rank() != 1:
        graph.replay()
    wait_for_the_end()


def credit_missing(way: str) -> None:
    """Rank 1 never gives rank 0 the credit that the call has to await."""
    group = everyone()
    if dist.get_rank() == 0:
        workspace = cuda_workspace(group, device())
        assert workspace.buffers is not None
        memory, core = workspace.buffers.memory, workspace.buffers.core
        first = core.words_offset(core.slot_bytes, dist.get_world_size())
        memory[first:].view(torch.int32)[core.credit_words(dist.get_world_size())[1]] = 0
        torch.cuda.synchronize()
    dist.barrier(device_ids=[device().index])
    small_call(group, way)
    wait_for_the_end()
