"""``agmm.matmul_reduce_scatter`` and its torch op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from agmm import _collectives, _cuda, _scatter_plan
from agmm._calls import Call
from agmm.autograd import MatmulReduceScatter
from agmm.errors import InvalidArgument
from agmm.ops import autocast, check_matrix, check_same

_REDUCE_OPS = ("sum", "avg")

_library = torch.library.Library("agmm", "FRAGMENT")
_library.define(
    "_matmul_reduce_scatter(Tensor A, Tensor B, Tensor? bias, str group_name, int scatter_dim, "
    "str reduce_op) -> Tensor"
)


def _check(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
) -> None:
    if A.dim() < 2:
        raise InvalidArgument(f"A: found {A.dim()} dimensions, wanted at least 2")
    check_matrix("B", B)
    check_same("B", B, "A", A)
    if B.shape[0] != A.shape[-1]:
        raise InvalidArgument(f"B: found K={B.shape[0]}, wanted {A.shape[-1]} as the columns of A")
    if not -A.dim() <= scatter_dim < A.dim():
        raise InvalidArgument(
            f"scatter_dim: found {scatter_dim}, wanted {-A.dim()} to {A.dim() - 1}"
        )
    if reduce_op not in _REDUCE_OPS:
        raise InvalidArgument(f"reduce_op: found {reduce_op!r}, wanted 'sum' or 'avg'")
    columns = scatter_dim % A.dim() == A.dim() - 1
    name, size = ("B", B.shape[1]) if columns else ("A", A.shape[scatter_dim])
    if size % world_size:
        what = "columns" if columns else f"in dimension {scatter_dim}"
        raise InvalidArgument(
            f"{name}: found {size} {what}, wanted a multiple of the world size {world_size}"
        )
    if bias is not None:
        check_same("bias", bias, "A", A)
        if columns:
            raise InvalidArgument(
                f"bias: found one with scatter_dim={scatter_dim}, wanted None: the result's "
                "columns are scattered"
            )
        if bias.shape != (B.shape[1],):
            raise InvalidArgument(
                f"bias: found shape {tuple(bias.shape)}, wanted ({B.shape[1]},) as B's columns"
            )


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    scatter_dim: int,
    reduce_op: str,
) -> torch.Tensor:
    group = _collectives.group_of(group_name)
    world_size = dist.get_world_size(group)
    _check(A, B, bias, world_size, scatter_dim, reduce_op)
    out: torch.Tensor
    if _scatter_plan.is_fused(A, B, scatter_dim, group):
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        # It sums with torch.sum, which autocast would have return float32.
        with torch.amp.autocast(A.device.type, enabled=False):
            out = fused(A.contiguous(), B, reduce_op, 0, group_name)
        _cuda.note_torch_workspaces()
    else:
        call = Call("matmul_reduce_scatter", A=A, B=B, scatter_dim=scatter_dim, reduce_op=reduce_op)
        out = _collectives.reduce_scatter(
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
    scatter_dim: int,
    reduce_op: str,
) -> torch.Tensor:
    world_size = _collectives.world_size_of(group_name)
    _check(A, B, bias, world_size, scatter_dim, reduce_op)
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // world_size
    return A.new_empty(shape)


def _autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled():
        return MatmulReduceScatter.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._matmul_reduce_scatter.default(*arguments)


for _key in ("CPU", "CUDA"):
    _library.impl("_matmul_reduce_scatter", _impl, _key)
_library.impl("_matmul_reduce_scatter", _fake, "Meta")
_library.impl("_matmul_reduce_scatter", _autograd, "Autograd")


def matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | str | None = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``reduce_scatter(A @ B) (+ bias)``: the second half of a tensor-parallel layer. Collective.

    The sum over the ranks of ``A @ B``, of which each rank gets its part. Differentiable once; the
    backward is an all-gather and a matmul (`all_gather_matmul`). On CUDA it is torch's
    ``symm_mem.fused_matmul_reduce_scatter`` where the fused all-gather would run too, the type is
    bf16 or fp16, ``scatter_dim`` is 0, and `agmm.cost_model` says that it is faster by what it
    costs the host (on 4 H200 for 8192 columns and K_local of 2048 or more from about 4096 rows on);
    else a matmul and a reduce-scatter. Under autocast the operands are cast as
    ``torch.nn.functional.linear`` casts them.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A; the same shape on all ranks.
        B: [K_local, N], this rank's rows of the whole B, row-major or column-major.
        group: process group or its name; the default group when None.
        scatter_dim: dimension of ``A @ B`` along which the sum is cut; its size is a multiple of
            the world size.
        reduce_op: "sum", or "avg" for the sum divided by the world size.
        bias: [N], the same on all ranks, added after the sum. Its gradient is that of the rows of
            all ranks, and so the same on all ranks. Not with the last dimension scattered.

    Returns:
        ``out`` [M / world_size, ..., N] for ``scatter_dim`` 0.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
    """
    for name, tensor in (("A", A), ("B", B), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise InvalidArgument(f"{name}: found {type(tensor).__name__}, wanted a tensor")
    A, B, bias = autocast((A, B, bias), A.device)
    op = torch.ops.agmm._matmul_reduce_scatter.default
    out: torch.Tensor = op(A, B, bias, _collectives.name_of(group), scatter_dim, reduce_op)
    return out
