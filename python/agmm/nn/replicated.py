"""Styles without sequence parallelism: every rank holds all rows, and products are summed over the
ranks.

The forward of the second half of a layer and the backward of the first are the same op,
`matmul_all_reduce`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.nn._ranks import Ranks
from agmm.nn._targets import BY_INPUTS, BY_OUTPUTS, Target, local, wanted_output
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


class _ReplicatedStyle(ParallelStyle):
    """A style that refuses fp8, since `scaled_matmul_all_reduce` has no backward."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _checked(self, module: torch.nn.Module, mesh: DeviceMesh, divided: str) -> Target:
        target = Target(self, module).checked(mesh, divided, None)
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
        return target.serve(device_mesh, BY_OUTPUTS, _column_output)


def _column_output(
    target: Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = target.local_parameters(BY_OUTPUTS)
    x = local(x, Replicate())
    target.check_input(x, weight, 0, weight.shape[0])
    out = column_product(x, weight.t(), bias, ranks.for_ops)
    return wanted_output(style, ranks, out, Shard(out.dim() - 1))


class RowwiseAllReduceParallel(_ReplicatedStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks, all of it on each.

    Takes the place of ``RowwiseParallel()``, by `agmm.matmul_all_reduce`. The bias is added once.
    The gradient of the output is taken to be the same on all ranks.

    Args:
        use_local_output: return a tensor, not a replicated DTensor.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(module, device_mesh, "in_features")
        return target.serve(device_mesh, BY_INPUTS, _summed_output)


def _summed_output(
    target: Target, style: _ReplicatedStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    target.check_operand(x)
    weight, bias = target.local_parameters(BY_INPUTS)
    x = local(x, Shard(x.dim() - 1))
    target.check_input(x, weight, 0, weight.shape[0])
    out = matmul_all_reduce(x, weight, ranks.for_ops, bias=bias)
    return wanted_output(style, ranks, out, Replicate())
