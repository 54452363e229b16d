"""The product of rows that every rank has by this rank's outputs, with its backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from agmm.ops.checks import needs_gradient
from agmm.ops.invariant_matmul import linear
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
        return linear(x, weight, bias)

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
    over the ranks, and is collective where ``x`` needs one. The product is batch-invariant where
    AGMM_BATCH_INVARIANT asks for it.

    Args:
        x: [..., K], the same on all ranks.
        weight: [N_local, K].
        bias: [N_local] or None.
        group: the ranks.
    """
    bias, x, weight = autocast((bias, x, weight), x.device)
    if not needs_gradient(x, weight, bias):
        return linear(x, weight, bias)
    found: torch.Tensor = _ColumnProduct.apply(group, x, weight, bias)
    return found
