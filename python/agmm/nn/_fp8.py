"""The products of linear layers on fp8 operands, with their backward.

Hopper multiplies fp8 operands whose rows (columns of the second) lie along what is summed over:
K-major. The forward's are so already. The backward makes three copies of fp8 bytes: of the weight,
for the input's gradient, and of both operands of the weight's gradient, which sums over the rows
M of the activations. Scales of the latter cover all rows, so ranks agree on them before they gather
what they have quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.errors import InvalidArgument
from agmm.nn._fp8_operands import (
    Quantised,
    columns_of,
    grad_of_weight,
    in_dtype,
    leading,
    of_one_kind,
    quantised_by,
    result_dtype,
    second,
    start_gather,
    transposed_weights,
)
from agmm.nn.fp8_recipe import Fp8Cast, Fp8Recipe
from agmm.ops.activation_gradients import joint_gradients
from agmm.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from agmm.ops.checks import needs_gradient
from agmm.ops.quantize import look_through
from agmm.ops.scaled_checks import BIAS_DTYPES
from agmm.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from agmm.runtime import collectives
from agmm.runtime.cuda_activations import Cast
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaling import K_MULTIPLE

_Maybe = torch.Tensor | None


def gather_products(
    recipe: Fp8Recipe,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Maybe],
    group_name: str,
    *,
    strict: bool = False,
    activation: str | None = None,
) -> list[torch.Tensor]:
    """``all_gather(x) @ weight + bias`` for each weight, in the dtype of ``x``. Collective.

    Args:
        x: [M_local, ..., K], bf16, fp16 or float32.
        weights: [K, N] each, N a multiple of 16.
        biases: [N] each, or None.
        activation: what becomes of the products of gate and up, which the backward keeps.

    Raises:
        InvalidArgument: a dtype or a size that fp8 products cannot have.
    """
    x = _under_autocast(x)
    _check(x, *weights)
    _check_multiple("K", x.shape[-1])
    for weight in weights:
        _check_multiple("N", weight.shape[1])
    if not needs_gradient(x, *weights, *biases):  # then dynamo drops x of one weight and bias
        return list(_forward(recipe, x, weights, biases, group_name, strict, activation))
    given = recipe, group_name, strict, activation, len(weights)
    return list(_GatherProducts.apply(*given, x, *weights, *biases))


def quantised_gate(
    recipe: Fp8Recipe,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Maybe],
    group_name: str,
    activation: str,
    *,
    strict: bool = False,
) -> Quantised:
    """The result of `gather_products` with an activation of gate and up, as `scatter_product` of
    this recipe quantises it: for `scatter_quantised`. Collective; without a backward."""
    x = _under_autocast(x)
    _check(x, *weights)
    given = recipe, x, weights, biases, group_name, strict, activation
    found: Quantised = _forward(*given, quantize_out="block")
    return found


def scatter_product(
    recipe: Fp8Recipe, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, group_name: str
) -> torch.Tensor:
    """``reduce_scatter(x @ weight) + bias`` along dimension 0, in the dtype of ``x``. Collective.

    Args:
        x: [M, ..., K_local], bf16, fp16 or float32; K_local a multiple of 16.
        weight: [K_local, N], N a multiple of 16.
        bias: [N], the same on all ranks, or None.

    Raises:
        InvalidArgument: a dtype or a size that fp8 products cannot have.
    """
    x = _under_autocast(x)
    _check(x, weight)
    _check_multiple("K", x.shape[-1])
    _check_multiple("N", weight.shape[1])
    found: torch.Tensor = _ScatterProduct.apply(recipe, group_name, x, weight, bias)
    return found


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    """The input as autocast wants it. Weights are quantised as they are."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _check(*tensors: torch.Tensor) -> None:
    for name, tensor in zip(("x", *("weight",) * len(tensors)), tensors, strict=False):
        if tensor.dtype not in BIAS_DTYPES:
            raise InvalidArgument(
                f"{name}: found dtype {tensor.dtype} in a layer with fp8, wanted bfloat16, float16 "
                "or float32"
            )


def _check_multiple(name: str, size: int) -> None:
    if size % K_MULTIPLE:
        raise InvalidArgument(
            f"weight: found {name}={size} on this rank in a layer with fp8, wanted a multiple of "
            f"{K_MULTIPLE}"
        )


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Fp8Recipe,
        group_name: str,
        strict: bool,
        activation: str | None,
        count: int,
        x: torch.Tensor,
        *weights_and_biases: Any,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        _, _, _, _, _, ctx.needs_x, *needs = ctx.needs_input_grad
        ctx.needs_weights, ctx.needs_biases = needs[:count], needs[count:]
        ctx.recipe, ctx.group_name, ctx.activation = recipe, group_name, activation
        ctx.sizes = [weight.shape[1] for weight in weights]
        ctx.dtypes = [None if t is None else t.dtype for t in weights_and_biases]
        products = _forward(recipe, x, weights, biases, group_name, strict)
        ctx.save_for_backward(
            x if any(ctx.needs_weights) else None,
            *(weights if ctx.needs_x else (None,) * count),
            *(products if activation else ()),
        )
        return tuple(Epilogue(activation)(products) if activation else products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        recipe: Fp8Recipe = ctx.recipe
        weights, products = saved[: len(ctx.sizes)], saved[len(ctx.sizes) :]
        of_dout = recipe.grad_output
        # To the backward several weights are one: a row of all outputs has one scale.
        in_fp8 = None
        if ctx.activation:
            cast = Cast(of_dout.first, of_dout.dtype, recipe.power_of_2) if ctx.needs_x else None
            dout, in_fp8 = joint_gradients(ctx.activation, douts[0], products, cast)
            douts = dout.split(ctx.sizes, -1)
        else:
            dout = douts[0] if len(douts) == 1 else torch.cat(douts, -1)
        rows = dout.flatten(0, -2)
        gathers = any(ctx.needs_weights)
        finish = None
        if gathers:  # begun here, so that it runs beside the product of dx
            finish = start_gather(recipe, recipe.input_for_grad_weight, x, ctx.group_name)
        dx = None
        if ctx.needs_x:
            look_through("scaled_matmul_reduce_scatter", ctx.group_name, A=dout)
            values, scale = in_fp8 or quantised_by(recipe, rows, of_dout, of_dout.first)
            B, scale_b = transposed_weights(recipe, weights)
            sizes = len(rows), B.shape[1]
            scale, scale_b = of_one_kind(scale, scale_b, *sizes, is_block=of_dout.is_block)
            dx = scaled_matmul_reduce_scatter(
                values.view(dout.shape),
                B,
                leading(scale, dout),
                scale_b,
                ctx.group_name,
                out_dtype=result_dtype(dout),
                use_fast_accum=recipe.fast_accum[1],
            ).to(dout.dtype)
        dweights: list[_Maybe] = [None] * len(ctx.sizes)
        if finish is not None:
            columns = columns_of(recipe, rows, recipe.grad_output_for_grad_weight)
            joint = grad_of_weight(recipe, finish(), columns, ctx.dtypes[0])
            for i, part in enumerate(joint.split(ctx.sizes, 0)):
                if ctx.needs_weights[i]:
                    dweights[i] = part.t().to(ctx.dtypes[i])
        dbiases = [
            part.flatten(0, -2).sum(0).to(dtype) if need else None
            for part, need, dtype in zip(
                douts, ctx.needs_biases, ctx.dtypes[len(ctx.sizes) :], strict=True
            )
        ]
        return None, None, None, None, None, dx, *dweights, *dbiases


class _ScatterProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Fp8Recipe,
        group_name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: _Maybe,
    ) -> torch.Tensor:
        _, _, ctx.needs_x, ctx.needs_weight, ctx.needs_bias = ctx.needs_input_grad
        ctx.recipe, ctx.group_name = recipe, group_name
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x if ctx.needs_weight else None, weight if ctx.needs_x else None)
        look_through("scaled_matmul_reduce_scatter", group_name, A=x, B=weight)
        rows = x.flatten(0, -2)
        values, scale = quantised_by(recipe, rows, recipe.input, recipe.input.first)
        return _scattered(recipe, (values.view(x.shape), scale), weight, bias, group_name, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        recipe: Fp8Recipe = ctx.recipe
        dout = dout.contiguous()
        dx = dweight = dbias = None
        if ctx.needs_x:
            (dx,) = _gathered(
                dout,
                recipe.grad_output,
                [transposed_weights(recipe, [weight])],
                [None],
                ctx.group_name,
                recipe,
                recipe.fast_accum[1],
                False,
            )
        if ctx.needs_weight:
            cast = recipe.grad_output_for_grad_weight
            finish = start_gather(recipe, cast, dout, ctx.group_name)
            rows = columns_of(recipe, x.flatten(0, -2), recipe.input_for_grad_weight)
            dweight = grad_of_weight(recipe, rows, finish(), ctx.dtypes[0]).t()
        if ctx.needs_bias:
            part = dout.flatten(0, -2).sum(0, dtype=torch.float32)
            dbias = collectives.all_reduce(part, ctx.group_name).to(ctx.dtypes[1])
        return None, None, dx, dweight, dbias


def scatter_quantised(
    recipe: Fp8Recipe,
    x: Quantised,
    weight: torch.Tensor,
    bias: _Maybe,
    group_name: str,
    like: torch.Tensor,
) -> torch.Tensor:
    """`scatter_product` of an input that `quantised_gate` has made. Collective; without a backward.

    Args:
        like: what has the dtype of the result, elements or none.
    """
    values, scale = x
    given = values, scale.flatten(0, -2)
    return _scattered(recipe, given, weight, bias, group_name, _under_autocast(like[:0]))


def _scattered(
    recipe: Fp8Recipe,
    x: Quantised,
    weight: torch.Tensor,
    bias: _Maybe,
    group_name: str,
    like: torch.Tensor,
) -> torch.Tensor:
    """The product of quantised rows, the scales of a matrix of them, in the dtype of ``like``."""
    values, scale = x
    B, scale_b = second(recipe, weight, recipe.weight)
    sizes = values.shape[:-1].numel(), B.shape[1]
    scale, scale_b = of_one_kind(scale, scale_b, *sizes, is_block=recipe.input.is_block)
    out = scaled_matmul_reduce_scatter(
        values,
        B,
        leading(scale, values),
        scale_b,
        group_name,
        bias=bias,
        out_dtype=result_dtype(like),
        use_fast_accum=recipe.fast_accum[0],
    )
    return in_dtype(out, like.dtype)


def _forward(
    recipe: Fp8Recipe,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Maybe],
    group_name: str,
    strict: bool,
    activation: str | None = None,
    quantize_out: str | None = None,
) -> Any:
    given = x, recipe.input, [second(recipe, weight, recipe.weight) for weight in weights], biases
    asked = activation, quantize_out
    return _gathered(*given, group_name, recipe, recipe.fast_accum[0], strict, *asked)


def _gathered(
    x: torch.Tensor,
    cast: Fp8Cast,
    weights: Sequence[Quantised],
    biases: Sequence[_Maybe],
    group_name: str,
    recipe: Fp8Recipe,
    fast_accum: bool,
    strict: bool,
    activation: str | None = None,
    quantize_out: str | None = None,
) -> Any:
    """The products of the gathered rows of x [M_local, ..., K] with each weight; with
    ``quantize_out`` the values and scales of the one result."""
    look_through("all_gather_scaled_matmul", group_name, A_shard=x)
    rows = x.flatten(0, -2)
    values, scale = quantised_by(recipe, rows, cast, cast.first)
    scales = []
    for B, one in weights:
        sizes = len(rows), B.shape[1]
        scale, one = of_one_kind(scale, one, *sizes, is_block=cast.is_block)
        scales.append(one)
    op: Any = all_gather_scaled_matmul  # a function of many forms
    outs = op(
        values.view(x.shape),
        [B for B, _ in weights],
        leading(scale, x),
        scales,
        group_name,
        bias=list(biases),
        out_dtype=result_dtype(x),
        use_fast_accum=fast_accum,
        activation=activation,
        strict=strict,
        quantize_out=quantize_out,
    )
    if quantize_out:
        return outs
    return [in_dtype(out, x.dtype) for out in ([outs] if activation else outs)]
