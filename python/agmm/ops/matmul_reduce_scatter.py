"""``agmm.matmul_reduce_scatter`` and its torch op."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import scatter_plan
from agmm.ops.autograd import MatmulReduceScatter
from agmm.ops.checks import check_operand, check_scatterable
from agmm.ops.library import library
from agmm.ops.operands import autocast
from agmm.runtime import collectives, cuda
from agmm.runtime.calls import Call

# What torch's op uses until it needs more, by group. A CUDA graph writes to it at every replay.
_workspaces_of_graphs: weakref.WeakKeyDictionary[dist.ProcessGroup, list[torch.Tensor]]
_workspaces_of_graphs = weakref.WeakKeyDictionary()


def _keep_for_graph(device: torch.device, group: dist.ProcessGroup) -> None:
    """In a capture, keep the workspace of torch's op as long as the group: torch frees it when a
    later call needs a larger one."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    workspace = symm_mem._group_name_to_workspace_tensor.get(group.group_name)
    kept = _workspaces_of_graphs.setdefault(group, [])
    if workspace is not None and all(workspace is not other for other in kept):
        kept.append(workspace)


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
) -> torch.Tensor:
    group = collectives.group_of_size(group_name, world_size)
    check_scatterable(A, B, bias, world_size, scatter_dim, reduce_op)
    out: torch.Tensor
    if scatter_plan.is_fused(A, B, scatter_dim, group):
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        # It sums with torch.sum, which autocast would have return float32.
        with torch.amp.autocast(A.device.type, enabled=False):
            out = fused(A.contiguous(), B, reduce_op, 0, group_name)
        _keep_for_graph(A.device, group)
        cuda.note_torch_workspaces()
    else:
        call = Call("matmul_reduce_scatter", A=A, B=B, scatter_dim=scatter_dim, reduce_op=reduce_op)
        out = collectives.reduce_scatter(
            torch.matmul(A, B), group_name, scatter_dim, call=call, then=f" for {reduce_op}"
        )
        if reduce_op == "avg":
            out = out.div_(world_size)
    return out if bias is None else out.add_(bias)


def _fake(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
) -> torch.Tensor:
    check_scatterable(A, B, bias, world_size, scatter_dim, reduce_op)
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // world_size
    return A.new_empty(shape)


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled():
        return MatmulReduceScatter.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._matmul_reduce_scatter.default(*arguments)


for _key in ("CPU", "CUDA"):
    library.impl("_matmul_reduce_scatter", _impl, _key)
library.impl("_matmul_reduce_scatter", _fake, "Meta")
library.impl("_matmul_reduce_scatter", _autograd, "Autograd")


def matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``reduce_scatter(A @ B) (+ bias)``: the second half of a tensor-parallel layer. Collective.

    The sum over the ranks of ``A @ B``, of which each rank gets its part. Differentiable once; the
    backward is an all-gather and a matmul (`all_gather_matmul`). On CUDA it is torch's
    ``symm_mem.fused_matmul_reduce_scatter`` where the fused all-gather would run too, the type is
    bf16 or fp16, ``scatter_dim`` is 0, and the cost model says that it is faster by what it
    costs the host (on 4 H200 for 8192 columns and K_local of 2048 or more from about 4096 rows on);
    else a matmul and a reduce-scatter. Under autocast the operands are cast as
    ``torch.nn.functional.linear`` casts them.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A; the same shape on all ranks.
        B: [K_local, N], this rank's rows of the whole B, row-major or column-major.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        scatter_dim: dimension of ``A @ B`` along which the sum is cut; its size is a multiple of
            the world size.
        reduce_op: "sum", or "avg" for the sum divided by the world size.
        bias: [N], the same on all ranks, added to the sum in its dtype, with a rounding of its
            own. Its gradient is that of the rows of
            all ranks, and so the same on all ranks. Not with the last dimension scattered.

    Returns:
        ``out`` [M / world_size, ..., N] for ``scatter_dim`` 0.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
    """
    for name, tensor in (("A", A), ("B", B), ("bias", bias)):
        if name != "bias" or tensor is not None:
            check_operand(name, tensor)
    if not isinstance(scatter_dim, int):
        raise InvalidArgument(f"scatter_dim: found {scatter_dim!r}, wanted an int")
    if not isinstance(reduce_op, str):
        raise InvalidArgument(f"reduce_op: found {reduce_op!r}, wanted 'sum' or 'avg'")
    A, B, bias = autocast((A, B, bias), A.device)
    group_name = collectives.name_of(group)
    world_size = collectives.world_size_of(group_name)
    op = torch.ops.agmm._matmul_reduce_scatter.default
    out: torch.Tensor = op(A, B, bias, group_name, world_size, scatter_dim, reduce_op)
    return out
