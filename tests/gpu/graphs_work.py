"""Calls in CUDA graphs, as the GPU tests run them in ranks."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from gpu_work import ALL_WAYS, WAYS, ExactCalls, Faults, device, group_of, last_ranks, poison

from agmm.planning.shapes import LocalShape
from agmm.runtime.workspaces import cuda_workspace


def gathers_in_a_graph(world_size: int, replays: int) -> Faults:
    """A graph of two gathers, replayed with new data, eager ones in between."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    workspace, rank = cuda_workspace(group, device()), dist.get_rank(group)
    shard = torch.zeros(300, 264, device=device())
    workspace.start_all_gather(shard)()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = workspace.start_all_gather(shard)()
        second = workspace.start_all_gather(shard + 1)()
    draw = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    ranks = torch.arange(world_size, device=device()).repeat_interleave(300)[:, None]
    for i in range(replays):
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(1, 300_000))
        shard.fill_(100 * i + rank)
        graph.replay()
        wrong += (first != ranks + 100 * i).sum() + (second != ranks + 100 * i + 1).sum()
        if i % 3 == 0:
            wrong += (workspace.start_all_gather(shard)() != ranks + 100 * i).sum()
    return [f"{int(wrong)} wrong elements"] if int(wrong) else []


def graphs(
    world_size: int, shape: LocalShape, calls_per_graph: int, first_way: str, replays: int
) -> Faults:
    """A graph of several calls, replayed with new data, eager calls in between."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, shape)
    for way in WAYS:
        exact.call(way)
    first = ALL_WAYS.index(first_way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls_per_graph):
            exact.new_data()
            exact.call(ALL_WAYS[(first + i) % len(WAYS)])
    poison(group)
    draw = random.Random(dist.get_rank())
    for i in range(replays):
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(1, 300_000))
        graph.replay()
        if i % 3 == 0:
            exact.new_data()
            exact.call(ALL_WAYS[i // 3 % len(WAYS)])
    return exact.faults("graphs")


def captured_by_some(world_size: int, way: str) -> Faults:
    """Ranks that capture different numbers of calls, and fail in a capture, are still in step."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, LocalShape(192, 256, 512))
    exact.call(way)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    attempts = [torch.cuda.CUDAGraph() for _ in range(exact.rank)]
    for attempt, unused in enumerate(attempts):
        try:
            with torch.cuda.graph(unused, capture_error_mode="thread_local"):
                for _ in range(1 + attempt % 2):
                    exact.call(way)
                if attempt == 0:
                    raise InterruptedError
        except InterruptedError:
            continue
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exact.new_data()
        exact.call(way)
    for i in range(20):
        for _ in range(i % 3):
            graph.replay()
        exact.new_data()
        exact.call(way)
    return exact.faults("captured by some")


def profiled_graph(way: str) -> Faults:
    """A graph of two calls under torch's profiler. In ranks of its own."""
    group = dist.group.WORLD
    assert group is not None
    exact = ExactCalls(group, LocalShape(192, 256, 512))
    exact.call(way)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(2):
            exact.new_data()
            exact.call(way)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        for _ in range(5):
            graph.replay()
            exact.new_data()
            exact.call(way)
        torch.cuda.synchronize()
    return exact.faults("profiled")


def graph_outlives_growth() -> Faults:
    """Faults of ranks of its own: a workspace grows only where all ranks have made equally many."""
    group = dist.group.WORLD
    assert group is not None
    small = ExactCalls(group, LocalShape(256, 128, 256), 3)
    small.call("push")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        small.new_data()
        small.call("push")
    slot_bytes = cuda_workspace(group, device()).slot_bytes
    rows = slot_bytes // (2 * 1024 * dist.get_world_size()) + 256
    large = ExactCalls(group, LocalShape(rows, 64, 1024), 4)
    for _ in range(4):
        graph.replay()
        large.new_data()
        large.call("push")
    return small.faults("captured before the growth") + large.faults("after the growth")
