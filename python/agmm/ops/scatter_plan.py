"""How a matmul's rows are scattered, and how the rows of a backward are gathered beside it; the
same on all ranks, as long as they call with the same shapes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.planning import call_plans, cost_model
from agmm.planning.plans import Problem
from agmm.runtime import cuda
from agmm.runtime.workspaces import cuda_workspace

_FUSED_DTYPES = (torch.bfloat16, torch.float16)


def _has_kernels(device: torch.device, group: dist.ProcessGroup) -> bool:
    return (
        device.type == "cuda"
        and cuda.why_unfused(device) is None
        and dist.get_world_size(group) > 1
    )


def _problem(A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup) -> Problem:
    rows = A.numel() // A.shape[-1]
    world_size = dist.get_world_size(group)
    return call_plans.problem(
        rows, B.shape[1], B.shape[0], A.dtype, A.device, world_size=world_size
    )


def is_fused(A: torch.Tensor, B: torch.Tensor, scatter_dim: int, group: dist.ProcessGroup) -> bool:
    """Whether torch's ``symm_mem.fused_matmul_reduce_scatter`` serves ``A @ B``: where it is legal
    and, by the cost model, faster than a matmul and a reduce-scatter by what it costs the
    host."""
    if A.dtype not in _FUSED_DTYPES or scatter_dim % A.dim() != 0 or A.numel() == 0:
        return False
    if not _has_kernels(A.device, group):
        return False
    # First, since no workspace is to be made where all are small.
    if not cost_model.is_reduce_scatter_fused(_problem(A, B, group)):
        return False
    try:  # finds out whether the GPUs reach each other
        cuda_workspace(group, A.device).ensure(1)
    except Unsupported:
        return False
    return True


def is_gather_by_copies(
    shard: torch.Tensor,
    dout: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_scatter_fused: bool,
) -> bool:
    """Whether copy engines are to gather ``shard`` beside the product ``dout @ B``, whose rows are
    scattered. Only where the workspace is large enough, as it is after a fused forward."""
    if shard.numel() == 0 or not _has_kernels(shard.device, group):
        return False
    gathered_bytes = shard.nbytes * dist.get_world_size(group)
    if cuda_workspace(group, shard.device).slot_bytes < gathered_bytes:
        return False
    problem = _problem(dout, B, group)
    return cost_model.is_gather_by_copies(problem, is_scatter_fused=is_scatter_fused)
