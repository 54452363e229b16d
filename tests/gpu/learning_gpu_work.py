"""What the tests of `agmm.learn_plans` run inside GPU ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm.ops import kept
from agmm.planning import call_plans
from agmm.testing import clocks

CALLS = 40
"""More calls than any kind needs until its ranks have agreed."""


def call_of(op: str, m: int, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """A call of an op on this rank. Its sums are whole numbers below 256, which no plan rounds."""
    device, ranks = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size(group)
    k, n = 8192, 4096
    rows = m // ranks if op == "all_gather_matmul" else m
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    A = torch.randint(0, 16, (rows, k), generator=generator).eq(0).to(device, torch.bfloat16)
    B = torch.randint(-1, 2, (n, k), generator=generator).to(device, torch.bfloat16).t()
    function = getattr(agmm, op)
    return lambda: function(A, B, group)


def learnt(op: str, m: int, folder: str, best: int | None) -> dict[str, Any]:
    """What ranks learn of a kind; by their own clocks, or fed so that a plan of them is the best.
    In between the call is captured and replayed."""
    os.environ.update(AGMM_CACHE="on", AGMM_CACHE_DIR=folder)
    agmm.learn_plans()
    try:
        group = dist.new_group(list(range(dist.get_world_size())))
        assert group is not None
        call = call_of(op, m, group)
        first = call()
        (study,) = [one for one in agmm.status().learnt if (one.op, one.m) == (op, m)]
        if best is None:
            same = _made(call, first)
        else:
            plan = study.tried[best % len(study.tried)]
            with clocks.fed(lambda name: 10.0 if name == plan else 20.0):
                same = _made(call, first)
        torch.cuda.synchronize()
        (study,) = [one for one in agmm.status().learnt if (one.op, one.m) == (op, m)]
        known = len(kept.kept_calls.get(group, {}))
        learns = call_plans.planner(group, first.device).learns
        dist.barrier()
        dist.destroy_process_group(group)
    finally:
        agmm.learn_plans(False)
    return {
        "tried": study.tried,
        "calls": study.calls,
        "kept": study.kept,
        "us": study.us,
        "known": known,
        "learns": learns,
        "same": same,
    }


def _made(call: Callable[[], torch.Tensor], first: torch.Tensor) -> bool:
    """Whether all calls have the first one's result, and so has a graph that is captured among
    them."""
    same = True
    graph, captured = torch.cuda.CUDAGraph(), None
    for i in range(CALLS):
        if i == 12:  # every plan has its memory
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = call()
        same = same and torch.equal(call(), first)
        if i % 8 == 0:  # else the host is ahead of all calls
            torch.cuda.synchronize()
    assert captured is not None
    graph.replay()
    return same and torch.equal(captured, first)
