"""Calls on a GPU of which another kernel holds a part for as long as they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from gpu_work import device, integers

import agmm
from agmm.ops import scatter_plan
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import MATMUL_ALL_REDUCE
from agmm.planning.transports import LAGGED
from agmm.runtime.group_gpus import group_facts

HELD = 70
_HOLD_BYTES = 200 * 1024
_HOLD = r"""
// Every block takes a multiprocessor's shared memory until it is released, at most for a minute.
extern "C" __global__ void hold(volatile int* started, volatile int* release) {
  if (threadIdx.x != 0) return;
  started[blockIdx.x] = 1;
  __threadfence_system();
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*release == 0 && now - begin < 60000000000ull);
}
"""


@contextmanager
def held(multiprocessors: int) -> Iterator[None]:
    """Within it so many multiprocessors have no room for a kernel with large tiles."""
    kernel = torch.cuda._compile_kernel(_HOLD, "hold")
    kernel.set_shared_memory_config(_HOLD_BYTES)
    started = torch.zeros(multiprocessors, dtype=torch.int32).pin_memory()
    release = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    kernel((multiprocessors, 1, 1), (32, 1, 1), [started, release], _HOLD_BYTES, stream)
    begin = time.monotonic()
    while int(started.sum()) < multiprocessors:
        assert time.monotonic() - begin < 30, f"{int(started.sum())} of {multiprocessors} started"
        time.sleep(0.001)
    try:
        yield
    finally:
        release.fill_(1)
        stream.synchronize()


def calls_on_a_part(op: str, shapes: list[tuple[int, int, int]]) -> list[str]:
    """Faults of calls with (rows of all ranks, N, K) while HELD multiprocessors are held. Every
    rank has its own data; all sums are exact."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(group), group.size()
    sms = group_facts(group, device()).sm_count
    faults = []
    for turn, (rows, n, k) in enumerate(shapes):
        As = [integers((rows, k), 100 * turn + r).clamp(-1, 1) for r in range(world_size)]
        Bs = [integers((n, k), 100 * turn + 50 + r).clamp(-1, 1) for r in range(world_size)]
        A, B = As[rank], Bs[rank].t()
        if op == "gather":
            shards = [each.chunk(world_size)[r] for r, each in enumerate(As)]
            A = shards[rank].contiguous()
            wanted = torch.cat(shards).float() @ B.float()
        else:
            wanted = sum(
                (a.float() @ b.t().float() for a, b in zip(As, Bs, strict=True)),
                torch.zeros((), device=device()),
            )
        if op == "scatter":
            wanted = wanted.chunk(world_size)[rank]

        def call(A: torch.Tensor = A, B: torch.Tensor = B) -> torch.Tensor:
            if op == "gather":
                return agmm.all_gather_matmul(A, B, group, strict=True)
            if op == "scatter":
                return agmm.matmul_reduce_scatter(A, B, group, strict=True)
            plan = scatter_plan.AllReducePlan(
                LAGGED, kernels_of(MATMUL_ALL_REDUCE, "bfloat16")[0], sms
            )
            with mock.patch.object(scatter_plan, "all_reduce_plan", return_value=plan):
                return agmm.matmul_all_reduce(A, B, group, strict=True)

        call()  # memory grows and kernels are loaded with the GPU to themselves
        torch.cuda.synchronize()
        dist.barrier(group)
        with held(HELD):
            outs = [call() for _ in range(3)]
            torch.cuda.current_stream().synchronize()
        for out in outs:
            wrong = int(torch.ne(out, wanted.to(out.dtype)).sum())
            if wrong:
                faults.append(f"{op} {rows} x {n} x {k}: {wrong} elements are wrong")
        dist.barrier(group)
    return faults
