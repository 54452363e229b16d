"""What batch invariance costs: `agmm.matmul_all_reduce` with and without it.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/batch_invariance.py

It runs on GPUs where there is one for each rank, else on CPU ranks. The operands stay where they
are, so that a weight may lie in the cache.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

import agmm

SHAPES = [(4096, 2048), (1024, 1024)]
"""N and K of each rank."""
ROWS = (1, 4, 16, 32, 64, 256, 1024)


def timed_us(device: torch.device, rows: int, n: int, k: int, *, invariant: bool) -> float:
    """The median time of a call that all ranks begin together."""
    A = torch.randn(rows, k, device=device).bfloat16()
    B = torch.randn(n, k, device=device).bfloat16().t()
    found: list[float] = []
    for i in range(25):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        agmm.matmul_all_reduce(A, B, batch_invariant=invariant)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 5:
            found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if dist.get_rank() == 0:
        print("| rows | N | K | µs | batch-invariant |\n|---|---|---|---|---|")
    for n, k in SHAPES:
        for rows in ROWS:
            us = [timed_us(device, rows, n, k, invariant=one) for one in (False, True)]
            if dist.get_rank() == 0:
                print(f"| {rows} | {n} | {k} | {us[0]:.0f} | {us[1] / us[0]:.2f} × |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
