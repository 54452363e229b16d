"""Many calls in a row or at once, by ranks that come at any time."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from gpu_work import (
    ALL_WAYS,
    WAYS,
    ExactCalls,
    Faults,
    device,
    group_of,
    last_ranks,
    poison,
    poison_freed_memory,
    randn,
    small_call,
)

import agmm
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import LocalShape
from agmm.runtime.workspaces import cuda_workspace


def loop(
    world_size: int,
    shape: LocalShape,
    calls: int,
    seed: int,
    delayed_rank: int | None,
    ways: tuple[str, ...] = ALL_WAYS,
) -> Faults:
    """`calls` calls with no synchronisation between; one rank or all are slowed at random."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, shape, seed)
    poison(group)
    draw = random.Random(seed + exact.rank)
    for i in range(calls):
        exact.new_data()
        if delayed_rank in (exact.rank, -1) and draw.random() < 0.5:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        exact.call(ways[i % len(ways)])
    return exact.faults(f"{shape} delayed={delayed_rank}")


def overwritten(world_size: int, calls: int, seed: int) -> Faults:
    """The shard is overwritten right behind the call. A rank that begins late finds all other
    shards there, and with few columns its products end long before its own shard is sent."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    shape = LocalShape(8192 // world_size, 64, 4096)
    exact = ExactCalls(group, shape, seed)
    poison(group)
    late = random.Random(seed)
    for i in range(calls):
        exact.new_data()
        if late.randrange(world_size) == exact.rank:
            torch.cuda._sleep(2_000_000)
        found = exact.product(("push", "push-A", "pull", "sm")[i % 4])
        exact.shard.fill_(torch.nan)
        exact.compare(*found)
    return exact.faults(f"{shape} overwritten")


def gathers_by_copies(world_size: int, calls: int, seed: int) -> Faults:
    """Gathers beside a matmul, with new data in each, by late ranks, on two streams in turn that
    nothing else orders, and with fused calls in between. The shard is overwritten at once."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    workspace, rank = cuda_workspace(group, device()), dist.get_rank(group)
    poison(group)
    same, own = random.Random(seed), random.Random(seed + 1 + rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    weight = randn((512, 512), torch.bfloat16, seed)
    wrong = [torch.zeros((), dtype=torch.int64, device=device()) for _ in streams]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for i in range(calls):
        # In float64 no more than a slot for 8 ranks.
        shape = (same.choice([1, 37, 500]), *same.choice([(8,), (3, 264), (2048,)]))
        dtype = same.choice([torch.bfloat16, torch.float32, torch.float64])
        turn = same.randrange(len(streams))
        with torch.cuda.stream(streams[turn]):
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(1, 400_000))
            ranks = torch.arange(world_size, device=device()).repeat_interleave(shape[0])
            rows = torch.arange(shape[0], device=device()).repeat(world_size)
            wanted = ((rows * 7 + ranks * 31 + i) % 199).to(dtype)
            wanted = wanted.view(-1, *(1,) * (len(shape) - 1)).expand(-1, *shape[1:])
            shard = wanted[rank * shape[0] : (rank + 1) * shape[0]].contiguous()
            poison_freed_memory(wanted.numel() * dtype.itemsize)
            finish = workspace.start_all_gather(shard)
            shard.fill_(torch.nan)
            torch.mm(weight, weight)
            wrong[turn] += (finish() != wanted).sum()
            if i % 10 == 0:
                small_call(group, "push")
    torch.cuda.synchronize()
    count = sum(int(each) for each in wrong)
    return [f"{count} wrong elements"] if count else []


def sm_push_at_its_size(world_size: int, calls: int, seed: int) -> Faults:
    """The stress test of SM push."""
    shape = LocalShape(1024 // world_size, 3584, 8192)
    return loop(world_size, shape, calls, seed, -1, ("sm", "sm-A", "sm-ctas"))


def back_to_back(world_size: int, calls: int, seed: int) -> Faults:
    """A graph of one call, replayed with other data and hardly a pause: all in the same buffer, so
    that only the credits keep a rank from writing to it while a slower one reads. (Eager calls take
    the buffers in turn, and no rank ends one before all others have begun it.)"""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    exact = ExactCalls(group, LocalShape(1024 // world_size, 3584, 8192), seed)
    datas = []
    for _ in range(2):
        exact.new_data()
        exact.call("sm")
        datas.append((exact.shard.clone(), torch.mm(exact.A, exact.B)))
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _, out = exact.product("sm")
    draw = random.Random(seed + exact.rank)
    for i in range(calls):
        shard, wanted = datas[i % 2]
        exact.shard.copy_(shard)
        if draw.random() < 0.1:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        graph.replay()
        exact.wrong += (out != wanted).sum()
    return exact.faults("back to back")


def mixed_loop(world_size: int, shapes: list[LocalShape], calls: int, seed: int) -> Faults:
    """Shapes and transports in a random order that is the same on all ranks."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    parts = [ExactCalls(group, shape, seed + i) for i, shape in enumerate(shapes)]
    poison(group)
    same, own = random.Random(seed), random.Random(seed + 1 + dist.get_rank())
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(calls):
        part, way, stream = same.choice(parts), same.choice(ALL_WAYS), same.choice(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(1, 200_000))
            part.new_data()
            part.call(way)
        torch.cuda.current_stream().wait_stream(stream)
    return [f for i, part in enumerate(parts) for f in part.faults(f"{shapes[i]}")]


def two_rounds(world_size: int, calls: int, seed: int) -> Faults:
    """SM push of more than kConsumersCopyBytes, the nearest peer first, by a cooperative kernel:
    the warp of the first item finds credits that the second round has taken."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    k = 4096
    rows = 14 * 2**20 // (2 * k * (world_size - 1))
    kernel = next(
        c for c in kernels_of(ALL_GATHER_MATMUL, "bfloat16") if c.schedule == "cooperative"
    )
    exact = ExactCalls(group, LocalShape(rows, 264, k), seed)
    poison(group)
    draw = random.Random(seed + exact.rank)
    for _ in range(calls):
        exact.new_data()
        if draw.random() < 0.2:
            torch.cuda._sleep(draw.randrange(1, 400_000))
        out = agmm.all_gather_matmul(
            exact.shard, exact.B, group, config=f"{kernel.name}/sm32x128+1", strict=True
        )
        exact.compare(None, out)
    return exact.faults("two rounds")


def two_groups() -> Faults:
    """Calls in two groups of all ranks at once, on two streams and from two threads. In ranks of
    its own, as above."""
    first = dist.group.WORLD
    assert first is not None
    second = dist.new_group(list(range(first.size())))
    parts = [
        ExactCalls(g, LocalShape(192, 256, 512), 10 * i) for i, g in enumerate((first, second))
    ]
    index = device().index

    def work(part: ExactCalls) -> None:
        torch.cuda.set_device(index)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(100):
                part.new_data()
                part.call(ALL_WAYS[i % len(WAYS)])
            torch.cuda.current_stream().synchronize()

    # Makes the workspaces, which is collective, and loads every kernel: loading one waits for the
    # device, on which the other group's call may wait for its peers.
    for part in parts:
        for way in ALL_WAYS:
            part.new_data()
            part.call(way)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [f for part in parts for f in part.faults("two groups")]


_MEETING = """
extern "C" __global__ void __cluster_dims__(%d, 1, 1) __launch_bounds__(512)
meet(unsigned* here, unsigned volatile* own, unsigned volatile* peer, unsigned turn) {
  if (threadIdx.x != 0) return;
  atomicAdd(here, 1);  // as one that has all of its CTAs: none goes on before all run
  while (atomicAdd(here, 0) < turn * gridDim.x) {
  }
  peer[blockIdx.x] = turn;
  __threadfence_system();
  while (own[blockIdx.x] < turn) {
  }
}
"""


def two_communicators(ctas: int, cluster: int, way: str) -> Faults:
    """Another group's kernel meets the calls in an order that only free multiprocessors resolve.

    Rank 0 starts the matmul, which waits for rank 1, then the other kernel on a second stream. Rank
    1 starts the other kernel, which waits for rank 0's, and its call comes behind it. The kernel
    has ``ctas`` CTAs of 512 threads, too many to run beside a CTA of the matmul, and wants
    all of them at once. In two ranks of its own.
    """
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    exact = ExactCalls(group, LocalShape(1024, 4096, 1024))
    exact.call(way)
    words = symm_mem.empty(ctas, dtype=torch.int32, device=device())
    handle = symm_mem.rendezvous(words, group.group_name)
    words.zero_()
    peer = handle.get_buffer(1 - rank, (ctas,), torch.int32)
    here = torch.zeros(1, dtype=torch.int32, device=device())
    meet: Any = torch.cuda._compile_kernel(_MEETING % cluster, "meet")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[device().index])
    for turn in range(1, 6):
        if turn > 1:  # the first one loads the kernel, which waits for the device
            exact.new_data()
            if rank == 0:
                found = exact.product(way)
                time.sleep(0.1)  # until it has filled the GPU
        with torch.cuda.stream(other if rank == 0 else torch.cuda.current_stream()):
            meet((ctas, 1, 1), (512, 1, 1), (here, words, peer, turn))
        if turn > 1:
            if rank == 1:
                found = exact.product(way)
            exact.compare(*found)
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[device().index])
    return exact.faults("two communicators")
