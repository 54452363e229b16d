"""The products of linear layers on fp8 operands, with their backward.

Hopper multiplies fp8 operands whose rows (columns of the second) lie along what is summed over:
K-major. The forward's are so already. The backward makes three copies of fp8 bytes: of the weight,
for the input's gradient, and of both operands of the weight's gradient, which sums over the rows
M of the activations. Scales of the latter cover all rows, so ranks agree on them before they gather
what they have quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.errors import InvalidArgument
from agmm.nn.fp8_recipe import Fp8Cast, Fp8Recipe
from agmm.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from agmm.ops.checks import needs_gradient
from agmm.ops.quantize import amax_of, look_through, quantised, quantised_columns, transposed
from agmm.ops.scaled_checks import BIAS_DTYPES
from agmm.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from agmm.ops.scaled_products import scaled_matmul
from agmm.runtime import collectives
from agmm.runtime.scaling import K_MULTIPLE, Tile

_Maybe = torch.Tensor | None
_Quantised = tuple[torch.Tensor, torch.Tensor]


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
        activation: what becomes of the products; only where no gradient is needed.

    Raises:
        InvalidArgument: a dtype or a size that fp8 products cannot have.
    """
    x = _under_autocast(x)
    _check(x, *weights)
    _check_multiple("K", x.shape[-1])
    for weight in weights:
        _check_multiple("N", weight.shape[1])
    if not needs_gradient(x, *weights, *biases):  # then dynamo drops x of one weight and bias
        return _forward(recipe, x, weights, biases, group_name, strict, activation)
    return list(
        _GatherProducts.apply(recipe, group_name, strict, len(weights), x, *weights, *biases)
    )


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
        count: int,
        x: torch.Tensor,
        *weights_and_biases: Any,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        _, _, _, _, ctx.needs_x, *needs = ctx.needs_input_grad
        ctx.needs_weights, ctx.needs_biases = needs[:count], needs[count:]
        ctx.recipe, ctx.group_name = recipe, group_name
        ctx.sizes = [weight.shape[1] for weight in weights]
        ctx.dtypes = [None if t is None else t.dtype for t in weights_and_biases]
        ctx.save_for_backward(
            x if any(ctx.needs_weights) else None, *(weights if ctx.needs_x else ())
        )
        return tuple(_forward(recipe, x, weights, biases, group_name, strict))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        recipe: Fp8Recipe = ctx.recipe
        # To the backward several weights are one: a row of all outputs has one scale.
        dout = douts[0] if len(douts) == 1 else torch.cat(douts, -1)
        rows = dout.flatten(0, -2)
        gathers = any(ctx.needs_weights)
        finish = None
        if gathers:  # begun here, so that it runs beside the product of dx
            finish = _start_gather(recipe, recipe.input_for_grad_weight, x, ctx.group_name)
        dx = None
        if ctx.needs_x:
            look_through("scaled_matmul_reduce_scatter", ctx.group_name, A=dout)
            values, scale = _quantised(recipe, rows, recipe.grad_output, recipe.grad_output.first)
            B, scale_b = _transposed(recipe, weights)
            scale, scale_b = _of_one_kind(scale, scale_b, len(rows), B.shape[1])
            dx = scaled_matmul_reduce_scatter(
                values.view(dout.shape),
                B,
                _leading(scale, dout),
                scale_b,
                ctx.group_name,
                out_dtype=_result_dtype(dout),
                use_fast_accum=recipe.fast_accum[1],
            ).to(dout.dtype)
        dweights: list[_Maybe] = [None] * len(ctx.sizes)
        if finish is not None:
            cast = recipe.grad_output_for_grad_weight
            joint = _grad_of_weight(recipe, finish(), _columns(recipe, rows, cast), ctx.dtypes[0])
            for i, part in enumerate(joint.split(ctx.sizes, 0)):
                if ctx.needs_weights[i]:
                    dweights[i] = part.t().to(ctx.dtypes[i])
        dbiases = [
            part.flatten(0, -2).sum(0).to(dtype) if need else None
            for part, need, dtype in zip(
                douts, ctx.needs_biases, ctx.dtypes[len(ctx.sizes) :], strict=True
            )
        ]
        return None, None, None, None, dx, *dweights, *dbiases


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
        values, scale = _quantised(recipe, rows, recipe.input, recipe.input.first)
        B, scale_b = _second(recipe, weight, recipe.weight)
        scale, scale_b = _of_one_kind(scale, scale_b, len(rows), B.shape[1])
        out = scaled_matmul_reduce_scatter(
            values.view(x.shape),
            B,
            _leading(scale, x),
            scale_b,
            group_name,
            bias=bias,
            out_dtype=_result_dtype(x),
            use_fast_accum=recipe.fast_accum[0],
        )
        return _in_dtype(out, x.dtype)

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
                [_transposed(recipe, [weight])],
                [None],
                ctx.group_name,
                recipe,
                recipe.fast_accum[1],
                False,
            )
        if ctx.needs_weight:
            cast = recipe.grad_output_for_grad_weight
            finish = _start_gather(recipe, cast, dout, ctx.group_name)
            rows = _columns(recipe, x.flatten(0, -2), recipe.input_for_grad_weight)
            dweight = _grad_of_weight(recipe, rows, finish(), ctx.dtypes[0]).t()
        if ctx.needs_bias:
            part = dout.flatten(0, -2).sum(0, dtype=torch.float32)
            dbias = collectives.all_reduce(part, ctx.group_name).to(ctx.dtypes[1])
        return None, None, dx, dweight, dbias


# --- operands ---


def _quantised(recipe: Fp8Recipe, x: torch.Tensor, cast: Fp8Cast, tile: Tile) -> _Quantised:
    return quantised(x, tile, cast.dtype, power_of_2=recipe.power_of_2)


def _second(recipe: Fp8Recipe, weight: torch.Tensor, cast: Fp8Cast) -> _Quantised:
    """A weight [K, N], columns contiguous."""
    return _quantised(recipe, weight.t().contiguous().t(), cast, cast.second)


def _transposed(recipe: Fp8Recipe, weights: Sequence[torch.Tensor]) -> _Quantised:
    """Weights [K, N] side by side as the second operand [N, K] of the input's gradient, whose rows
    have scales that cover all of them: the bytes are transposed in memory."""
    cast = recipe.weight_for_grad_input
    if any(weight.is_contiguous() for weight in weights):
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights), 1)
        values, scale = _quantised(recipe, weight.contiguous(), cast, cast.first)
        return values.t(), scale.t()
    tile = cast.first[1], cast.first[0]  # of weights that lie as [N, K]
    amax = None
    if len(weights) > 1:
        amax = reduce(torch.maximum, [amax_of(weight.t(), tile) for weight in weights])
    parts = [
        quantised_columns(
            weight.t().contiguous(), tile, cast.dtype, amax=amax, power_of_2=recipe.power_of_2
        )
        for weight in weights
    ]
    if len(parts) == 1:
        return parts[0][0].t(), parts[0][1]
    # They are joined as bytes: not all builds of torch put fp8 tensors side by side.
    values = torch.cat([values.view(torch.uint8) for values, _ in parts], 1)
    return values.view(cast.dtype).t(), parts[0][1]


def _columns(
    recipe: Fp8Recipe, rows: torch.Tensor, cast: Fp8Cast | None
) -> _Quantised | torch.Tensor:
    """Rows [M, features] that the weight's gradient sums over: as they are, or as
    `quantised_columns` makes them."""
    if cast is None:
        return rows
    return quantised_columns(
        rows.contiguous(), cast.second, cast.dtype, power_of_2=recipe.power_of_2
    )


def _of_one_kind(scale_a: torch.Tensor, scale_b: torch.Tensor, m: int, n: int) -> _Quantised:
    """Scales of a whole operand as many as those of rows, where the other has these."""
    # A branch, no comparison of the two: the compiler has no operation for that of dynamic sizes.
    are_alike = scale_b.numel() == 1 if scale_a.numel() == 1 else scale_b.numel() != 1
    if not are_alike:
        return scale_a.expand(m, 1).contiguous(), scale_b.expand(1, n).contiguous()
    return scale_a, scale_b


def _leading(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scales of the rows of x [..., K] in its leading dimensions."""
    return scale.view(*x.shape[:-1], 1) if len(scale) == x.shape[:-1].numel() else scale


def _result_dtype(x: torch.Tensor) -> torch.dtype:
    """What an fp8 product is rounded to: GPUs write bfloat16."""
    return torch.bfloat16 if x.is_cuda else x.dtype


def _in_dtype(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where `to` changes nothing, compiled code of torch 2.11 gets no gradients."""
    return out if out.dtype == dtype else out.to(dtype)


def _forward(
    recipe: Fp8Recipe,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[_Maybe],
    group_name: str,
    strict: bool,
    activation: str | None = None,
) -> list[torch.Tensor]:
    given = x, recipe.input, [_second(recipe, weight, recipe.weight) for weight in weights], biases
    fast_accum = recipe.fast_accum[0]
    return _gathered(*given, group_name, recipe, fast_accum, strict, activation)


def _gathered(
    x: torch.Tensor,
    cast: Fp8Cast,
    weights: Sequence[_Quantised],
    biases: Sequence[_Maybe],
    group_name: str,
    recipe: Fp8Recipe,
    fast_accum: bool,
    strict: bool,
    activation: str | None = None,
) -> list[torch.Tensor]:
    """The products of the gathered rows of x [M_local, ..., K] with each weight."""
    look_through("all_gather_scaled_matmul", group_name, A_shard=x)
    rows = x.flatten(0, -2)
    values, scale = _quantised(recipe, rows, cast, cast.first)
    scales = []
    for B, one in weights:
        scale, one = _of_one_kind(scale, one, len(rows), B.shape[1])
        scales.append(one)
    outs: Any = all_gather_scaled_matmul(
        values.view(x.shape),
        [B for B, _ in weights],
        _leading(scale, x),
        scales,
        group_name,
        bias=list(biases),
        out_dtype=_result_dtype(x),
        use_fast_accum=fast_accum,
        activation=activation,
        strict=strict,
    )
    return [_in_dtype(out, x.dtype) for out in ([outs] if activation else outs)]


# --- the weight's gradient ---


def _start_gather(
    recipe: Fp8Recipe, cast: Fp8Cast | None, shard: torch.Tensor, group_name: str
) -> Callable[[], _Quantised | torch.Tensor]:
    """Begin to gather the rows of a shard [M_local, ..., features] that the weight's gradient sums
    over, as `_columns` has them: by scales that cover the rows of all ranks."""
    rows = shard.flatten(0, -2).contiguous()
    if cast is None:
        return collectives.start_all_gather(rows, group_name, 0)
    look_through("all_gather", group_name, input=rows)
    amax = collectives.all_reduce(amax_of(rows, cast.second), group_name, op="max")
    values, scale = quantised(
        rows, cast.second, cast.dtype, amax=amax, power_of_2=recipe.power_of_2
    )
    # They are sent as bytes: not all backends know the dtypes.
    finish = collectives.start_all_gather(values.view(torch.uint8), group_name, 0)
    return lambda: (transposed(finish().view(cast.dtype)), scale)


def _grad_of_weight(
    recipe: Fp8Recipe,
    x: _Quantised | torch.Tensor,
    dout: _Quantised | torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``doutᵀ @ x`` [N, K] over all rows."""
    if isinstance(x, torch.Tensor):
        assert isinstance(dout, torch.Tensor)
        return (dout.t() @ x).to(dtype)
    (Bt, scale_b), (A, scale_a) = x, dout
    scale_a, scale_b = _of_one_kind(scale_a.t(), scale_b, len(A), len(Bt))
    out = scaled_matmul(
        A,
        scale_a.contiguous(),
        Bt.t(),
        scale_b.contiguous(),
        torch.bfloat16 if A.is_cuda else dtype,
        recipe.fast_accum[2],
    )
    return out.to(dtype)
