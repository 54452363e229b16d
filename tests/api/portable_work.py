"""What the tests of the portable path run inside CPU ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_groups import fresh_group

import agmm


def named() -> list[str]:
    """Faults, in words, of calls that name the path: they are agmm's own, differ from others of
    their kind only by the path, and have their gradients."""
    group, faults = fresh_group(), []
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    A, B = torch.randn(4 * size, 6), torch.randn(6, 5)
    shard = A.chunk(size)[rank]
    calls: dict[str, tuple[Any, torch.Tensor]] = {
        "all_gather_matmul": (agmm.all_gather_matmul, shard),
        "matmul_reduce_scatter": (agmm.matmul_reduce_scatter, A),
        "matmul_all_reduce": (agmm.matmul_all_reduce, A),
    }
    for name, (op, given) in calls.items():
        found = []
        for config in (None, "portable"):
            one = given.clone().requires_grad_()
            out = op(one, B, group, config=config, strict=True)
            out.square().sum().backward()
            found.append((out.detach(), one.grad))
        for wanted, other in zip(*found, strict=True):
            if wanted is None or other is None or not torch.equal(wanted, other):
                faults.append(f"{name}: differs from the CPU backend")
        op(given, B, group, config="unfused")
        by = {
            call.by for call in agmm.status().calls if call.op == name and call.world_size == size
        }
        if "agmm's CPU backend" not in by:
            faults.append(f"{name}: served by {by}")
    return faults
