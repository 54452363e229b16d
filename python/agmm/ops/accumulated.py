"""The collective matmuls whose backward adds the weight's gradient to memory of the caller.

The callers are frameworks that sum gradients over several backwards in a buffer of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from agmm.ops.autograd import (
    AllGatherMatmul,
    GradOfWeight,
    MatmulReduceScatter,
    gather_gradients,
    scatter_gradients,
)
from agmm.ops.invariant import is_asked
from agmm.ops.invariant_matmul import linear
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.runtime import groups

_Maybe = torch.Tensor | None
_Group = dist.ProcessGroup | str


class _Gather(AllGatherMatmul):
    @staticmethod
    def forward(ctx: Any, grad_of_weight: GradOfWeight, *call: Any) -> Any:  # type: ignore[override]
        ctx.grad_of_weight = grad_of_weight
        return AllGatherMatmul.forward(ctx, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dA: _Maybe, *douts: _Maybe) -> tuple[Any, ...]:
        return None, *gather_gradients(ctx, dA, douts, ctx.grad_of_weight)


class _Scatter(MatmulReduceScatter):
    @staticmethod
    def forward(ctx: Any, grad_of_weight: GradOfWeight, *call: Any) -> Any:  # type: ignore[override]
        ctx.grad_of_weight = grad_of_weight
        return MatmulReduceScatter.forward(ctx, *call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        return None, *scatter_gradients(ctx, dout, ctx.grad_of_weight)


class _AllRows(torch.autograd.Function):
    """The product of rows that every rank has. The sum over the ranks is that of the output, or of
    the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_of_weight: GradOfWeight,
        group: _Group,
        is_output_summed: bool,
        strict: bool,
        x: torch.Tensor,
        B: torch.Tensor,
        bias: _Maybe,
    ) -> torch.Tensor:
        ctx.grad_of_weight, ctx.group, ctx.strict = grad_of_weight, group, strict
        ctx.is_output_summed = is_output_summed
        *_, ctx.needs_x, ctx.needs_weight, ctx.needs_bias = ctx.needs_input_grad
        ctx.save_for_backward(x if ctx.needs_weight else None, B if ctx.needs_x else None)
        if is_output_summed:
            return matmul_all_reduce(x, B, group, bias=bias, strict=strict)
        return linear(x, B.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        x, B = ctx.saved_tensors
        dx = dB = None
        if ctx.needs_x and ctx.is_output_summed:
            dx = dout @ B.t()
        elif ctx.needs_x:
            dx = matmul_all_reduce(dout.contiguous(), B.t(), ctx.group, strict=ctx.strict)
        if ctx.needs_weight:
            dB = ctx.grad_of_weight(x, dout, True)
        dbias = dout.flatten(0, -2).sum(0) if ctx.needs_bias else None
        return None, None, None, None, dx, dB, dbias


def gather_product(
    grad_of_weight: GradOfWeight, x: torch.Tensor, B: torch.Tensor, group: _Group, strict: bool
) -> torch.Tensor:
    """`all_gather_matmul`, whose backward gives ``Aᵀ @ dout`` to ``grad_of_weight``."""
    name = groups.name_of(group)
    settings = name, groups.world_size_of(name), 0, False, "", strict, False
    out: torch.Tensor = _Gather.apply(grad_of_weight, 1, settings, x.contiguous(), B, None)[1]
    return out


def scatter_product(
    grad_of_weight: GradOfWeight, x: torch.Tensor, B: torch.Tensor, group: _Group, strict: bool
) -> torch.Tensor:
    """`matmul_reduce_scatter`, whose backward gives ``Aᵀ @ dout`` to ``grad_of_weight``."""
    name = groups.name_of(group)
    settings = name, groups.world_size_of(name), 0, "sum", strict, "", is_asked(None)
    out: torch.Tensor = _Scatter.apply(grad_of_weight, 1, settings, None, None, x, B)
    return out


def column_product(
    grad_of_weight: GradOfWeight, x: torch.Tensor, B: torch.Tensor, group: _Group, strict: bool
) -> torch.Tensor:
    """``x @ B``, whose backward sums the gradient of ``x`` over the ranks by `matmul_all_reduce`,
    and gives ``xᵀ @ dout`` to ``grad_of_weight``."""
    out: torch.Tensor = _AllRows.apply(grad_of_weight, group, False, strict, x, B, None)
    return out


def sum_product(
    grad_of_weight: GradOfWeight, x: torch.Tensor, B: torch.Tensor, group: _Group, strict: bool
) -> torch.Tensor:
    """`matmul_all_reduce`, whose backward gives ``xᵀ @ dout`` to ``grad_of_weight``."""
    out: torch.Tensor = _AllRows.apply(grad_of_weight, group, True, strict, x, B, None)
    return out
