"""What the tests of plans run inside GPU ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import agmm
from agmm.ops import kept
from agmm.planning.shapes import Shape
from agmm.testing.cases import make_operands
from agmm.testing.reference import allowed_error, gathered_product, relative_error


def fused_calls_made(shape: Shape, strict: bool) -> int:
    """How many kinds of fused calls this group has made after one right call of a shape."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    p = make_operands(shape, rank, world_size, dtype=torch.bfloat16, device=device)
    out = agmm.all_gather_matmul(p.A_shard, p.B, strict=strict)
    reference = gathered_product(p.A, p.B)
    allowed = allowed_error(relative_error(torch.mm(p.A, p.B), reference))
    assert relative_error(out, reference) <= allowed
    return len(kept.kept_calls.get(group, {}))
