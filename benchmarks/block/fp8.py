"""A linear layer on fp8 operands on one device, by the recipe of agmm's layers: what the whole
block and plain tensor parallelism have in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from agmm.nn import Fp8Recipe, _fp8_operands, fp8_recipe
from agmm.ops.scaled_products import scaled_matmul


class _Product(torch.autograd.Function):
    """``x @ weight``, x [..., K], weight [K, N]."""

    @staticmethod
    def forward(ctx: Any, casts: Fp8Recipe, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.casts = casts
        ctx.save_for_backward(x, weight)
        rows = x.flatten(0, -2)
        values, scale = _fp8_operands.quantised_by(casts, rows, casts.input, casts.input.first)
        B, scale_b = _fp8_operands.second(casts, weight, casts.weight)
        out = _product(values, scale, B, scale_b, x, casts.fast_accum[0])
        return out.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        casts: Fp8Recipe = ctx.casts
        rows, of_x = dout.flatten(0, -2), x.flatten(0, -2)
        values, scale = _fp8_operands.quantised_by(
            casts, rows, casts.grad_output, casts.grad_output.first
        )
        B, scale_b = _fp8_operands.transposed_weights(casts, [weight])
        dx = _product(values, scale, B, scale_b, x, casts.fast_accum[1])
        columns_of_x = _fp8_operands.columns_of(casts, of_x, casts.input_for_grad_weight)
        columns_of_dout = _fp8_operands.columns_of(casts, rows, casts.grad_output_for_grad_weight)
        dweight = _fp8_operands.grad_of_weight(
            casts, columns_of_x, columns_of_dout, weight.dtype
        ).t()
        return None, dx.view(x.shape), dweight


def _product(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    B: torch.Tensor,
    scale_b: torch.Tensor,
    like: torch.Tensor,
    fast_accum: bool,
) -> torch.Tensor:
    scale_a, scale_b = _fp8_operands.of_one_kind(scale_a, scale_b, len(A), B.shape[1])
    if A.is_cuda:  # torch's own, which its async TP looks for
        out: torch.Tensor = torch._scaled_mm(
            A, B, scale_a, scale_b, out_dtype=like.dtype, use_fast_accum=fast_accum
        )
        return out
    return scaled_matmul(A, scale_a, B, scale_b, like.dtype, fast_accum)


def product(recipe: Fp8Recipe | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight``, with a backward; without a recipe as the operands are."""
    if recipe is None:
        return nn.functional.linear(x, weight.t())
    found: torch.Tensor = _Product.apply(recipe, x, weight)
    return found


class Linear(nn.Linear):
    """``nn.Linear`` without a bias by `product`."""

    def __init__(self, inputs: int, outputs: int, recipe: str | None, **place: Any) -> None:
        super().__init__(inputs, outputs, bias=False, **place)
        self.recipe = fp8_recipe.resolved(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self.recipe, x, self.weight.t())
