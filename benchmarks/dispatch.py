"""The way in of a mixture of experts on the GPUs at hand, by how many CTAs bring the rows: beside
the grouped matmul alone, on rows that are there already, and the dispatch alone.

    torchrun --nproc-per-node 2 benchmarks/dispatch.py
    torchrun --nproc-per-node 2 benchmarks/dispatch.py mixtral-8x7b 1024
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm.bench.moe_presets import MOE_MODELS
from agmm.bench.moe_ways import drawn_ids
from agmm.ops.grouped_products import products
from agmm.planning.shapes import MoEShape
from agmm.runtime.cuda_dispatch import Dispatched, RowsOfExperts
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.workspaces import dispatch_workspace

CTAS = (4, 8, 16, 24, 32)
"""The numbers of CTAs that are tried."""
CALLS = 20
"""How many calls a figure is the median of."""


def time_us(call: Callable[[], Any]) -> float:
    """The median time of a call, of the slowest rank. Collective."""
    for _ in range(3):
        call()
    found = []
    for _ in range(CALLS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # so that all launches are queued
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(model: str, tokens: int) -> None:
    """Print the figures of a model with so many tokens on each rank. Collective."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    ranks, rank = group.size(), group.rank()
    hidden, inner, experts, k = MOE_MODELS[model]
    ids = drawn_ids(MoEShape(tokens * ranks, hidden, inner, experts, k), 0)
    own = ids[rank * tokens : (rank + 1) * tokens].to(device)
    most = max(int((ids // (experts // ranks) == one).sum()) for one in range(ranks))
    routing = agmm.moe.route(own, num_experts=experts, capacity=most)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    gate, up = (
        torch.randn(experts // ranks, inner, hidden, device=device).bfloat16().mT for _ in range(2)
    )
    counts = [tokens] * ranks
    room = Dispatched(
        x.new_empty(most, hidden),
        None,
        routing.tokens.new_empty(2, ranks * (experts // ranks)),
    )
    wanted = RowsOfExperts(routing.tokens, routing.offsets, routing.positions)
    workspace = dispatch_workspace(group, device)
    made = [gate, up], [None, None], routing.offsets, Epilogue("silu_mul")
    rows = torch.randn(most, hidden, device=device).bfloat16()
    alone = time_us(lambda: products(rows, *made))
    figures = []
    for ctas in CTAS:
        workspace.ctas = ctas
        dispatch = time_us(lambda: workspace.dispatch(x, counts, wanted, room))
        both = time_us(
            lambda: agmm.all_gather_grouped_matmul(
                x, [gate, up], routing, activation="silu_mul", strict=True
            )
        )
        figures.append(f"{ctas}: {dispatch:.0f}, {both:.0f} us, / alone {both / alone:.3f}")
    if rank == 0:
        print(f"{model}, {tokens} tokens a rank, matmul alone {alone:.0f} us")
        print("  CTAs: dispatch alone, with the matmul", *figures, sep="\n  ", flush=True)


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    models, sizes = ["mixtral-8x7b", "qwen3-30b-a3b"], [128, 1024, 8192]
    if sys.argv[1:]:
        models, sizes = [sys.argv[1]], list(map(int, sys.argv[2:]))
    for model in models:
        for tokens in sizes:
            measure(model, tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
