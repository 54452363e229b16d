"""Styles without sequence parallelism: every rank holds all rows, and products are summed over the
ranks.

The forward of the second half of a layer and the backward of the first are the same op,
`matmul_all_reduce`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.nn._divided import Divided, note
from agmm.nn._ranks import Ranks
from agmm.nn.styles import _COLUMNS, _ROWS, _WHOLE, _distribute, _local, _local_parameters, _Target
from agmm.ops.checks import needs_gradient
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.ops.operands import autocast

_Maybe = torch.Tensor | None


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Any, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe
    ) -> torch.Tensor:
        _, ctx.needs_x, ctx.needs_weight, ctx.needs_bias = ctx.needs_input_grad
        ctx.group = group
        ctx.save_for_backward(x if ctx.needs_weight else None, weight if ctx.needs_x else None)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[_Maybe, ...]:
        x, weight = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        dx = dweight = dbias = None
        if ctx.needs_x:
            dx = matmul_all_reduce(dout.contiguous(), weight, ctx.group)
        if ctx.needs_weight:
            dweight = rows.t() @ x.flatten(0, -2)
        if ctx.needs_bias:
            dbias = rows.sum(0)
        return None, dx, dweight, dbias


def column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, group: dist.ProcessGroup | str
) -> torch.Tensor:
    """``x @ weight.t() + bias``, of this rank's outputs. The backward sums the gradient of ``x``
    over the ranks, and is collective where ``x`` needs one.

    Args:
        x: [..., K], the same on all ranks.
        weight: [N_local, K].
        bias: [N_local] or None.
        group: the ranks.
    """
    bias, x, weight = autocast((bias, x, weight), x.device)
    if not needs_gradient(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    found: torch.Tensor = _ColumnProduct.apply(group, x, weight, bias)
    return found


def local_linear(
    style: ParallelStyle, module: torch.nn.Module, sharded: Placement
) -> tuple[torch.Tensor, _Maybe]:
    """This rank's part of a linear's weight, transposed, and of its bias. ``sharded`` is the
    placement of the weight; the bias is sharded with the outputs, ``Shard(0)``, or whole.

    Raises:
        InvalidArgument: a parameter is no DTensor, or one with another placement.
    """
    target = _Target(style, module)
    if sharded == Shard(0):
        return _local_parameters(target, _ROWS, _ROWS)
    return _local_parameters(target, _COLUMNS, _WHOLE)


class _ReplicatedStyle(ParallelStyle):
    """A style that refuses fp8, since `scaled_matmul_all_reduce` has no backward."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _checked(self, module: torch.nn.Module, mesh: DeviceMesh, divided: str) -> _Target:
        target = _Target(self, module).checked(mesh, divided, None)
        if target.fp8 is not None:
            raise target.fault(f"fp8: found {target.fp8.name}, wanted a torch.nn.Linear without it")
        return target

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ReplicatedColwiseParallel(_ReplicatedStyle):
    """``torch.nn.Linear`` whose input is the same on all ranks, and whose outputs are sharded.

    Takes the place of ``ColwiseParallel()``. The forward communicates nothing; the backward
    multiplies and sums the input's gradient by `agmm.matmul_all_reduce`.

    Args:
        use_local_output: return a tensor, not a DTensor sharded along its last dimension.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(module, device_mesh, "out_features")
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        _distribute(module, device_mesh, placements, self.src_data_rank)
        ranks = Ranks(device_mesh, None)
        module.forward = partial(_column_output, target, self, ranks)
        note(module, Divided(ranks, True, None))
        return module


def _column_output(
    target: _Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = _local_parameters(target, _ROWS, _ROWS)
    x = _local(x, Replicate())
    target.check_input(x, weight, 0, weight.shape[0])
    out = column_product(x, weight.t(), bias, ranks.for_ops)
    if style.use_local_output:
        return out
    mesh = ranks.mesh(out.device)
    return DTensor.from_local(out, mesh, [Shard(out.dim() - 1)], run_check=False)


class RowwiseAllReduceParallel(_ReplicatedStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks, all of it on each.

    Takes the place of ``RowwiseParallel()``, by `agmm.matmul_all_reduce`. The bias is added once.
    The gradient of the output is taken to be the same on all ranks.

    Args:
        use_local_output: return a tensor, not a replicated DTensor.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(module, device_mesh, "in_features")
        placements: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        _distribute(module, device_mesh, placements, self.src_data_rank)
        ranks = Ranks(device_mesh, None)
        module.forward = partial(_summed_output, target, self, ranks)
        note(module, Divided(ranks, False, None))
        return module


def _summed_output(
    target: _Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = _local_parameters(target, _COLUMNS, _WHOLE)
    x = _local(x, Shard(x.dim() - 1))
    target.check_input(x, weight, 0, weight.shape[0])
    out = matmul_all_reduce(x, weight, ranks.for_ops, bias=bias)
    if style.use_local_output:
        return out
    return DTensor.from_local(out, ranks.mesh(out.device), [Replicate()], run_check=False)
