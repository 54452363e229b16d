"""The operands of the products of `_fp8`: what is quantised how, what is transposed, and the
product that is the weight's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from agmm.nn.fp8_recipe import Fp8Cast, Fp8Recipe
from agmm.ops.quantize import amax_of, look_through, quantised, quantised_columns, transposed
from agmm.ops.scaled_products import scaled_matmul
from agmm.runtime import collectives
from agmm.runtime.scaling import BLOCK, Tile

Quantised = tuple[torch.Tensor, torch.Tensor]
"""fp8 values and their scales."""


def quantised_by(recipe: Fp8Recipe, x: torch.Tensor, cast: Fp8Cast, tile: Tile) -> Quantised:
    return quantised(x, tile, cast.dtype, power_of_2=recipe.power_of_2)


def second(recipe: Fp8Recipe, weight: torch.Tensor, cast: Fp8Cast) -> Quantised:
    """A weight [K, N], columns contiguous."""
    return quantised_by(recipe, weight.t().contiguous().t(), cast, cast.second)


def transposed_weights(recipe: Fp8Recipe, weights: Sequence[torch.Tensor]) -> Quantised:
    """Weights [K, N] side by side as the second operand [N, K] of the input's gradient, whose rows
    have scales that cover all of them: the bytes are transposed in memory."""
    cast = recipe.weight_for_grad_input
    if cast.is_block and any(weight.shape[1] % BLOCK for weight in weights[:-1]):
        weights = [torch.cat([weight.t() for weight in weights]).t()]  # whose blocks cross weights
    if any(weight.is_contiguous() for weight in weights):
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights), 1)
        of_rows, of_columns = cast.second
        values, scale = quantised_by(recipe, weight.contiguous(), cast, (of_columns, of_rows))
        return values.t(), scale.t()
    tile = cast.second  # of weights that lie as [N, K]
    amax = None
    if len(weights) > 1 and not cast.is_block:
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
    scale = torch.cat([scale for _, scale in parts]) if cast.is_block else parts[0][1]
    return values.view(cast.dtype).t(), scale


def columns_of(
    recipe: Fp8Recipe, rows: torch.Tensor, cast: Fp8Cast | None
) -> Quantised | torch.Tensor:
    """Rows [M, features] that the weight's gradient sums over: as they are, or as
    `quantised_columns` makes them."""
    if cast is None:
        return rows
    return quantised_columns(
        rows.contiguous(), cast.second, cast.dtype, power_of_2=recipe.power_of_2
    )


def of_one_kind(
    scale_a: torch.Tensor, scale_b: torch.Tensor, m: int, n: int, *, is_block: bool = False
) -> Quantised:
    """Scales of a whole operand as many as those of rows, where the other has these. Scales of
    blocks are so already."""
    if is_block:
        return scale_a, scale_b
    # A branch, no comparison of the two: the compiler has no operation for that of dynamic sizes.
    are_alike = scale_b.numel() == 1 if scale_a.numel() == 1 else scale_b.numel() != 1
    if not are_alike:
        return scale_a.expand(m, 1).contiguous(), scale_b.expand(1, n).contiguous()
    return scale_a, scale_b


def leading(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scales of the rows of x [..., K] in its leading dimensions."""
    return scale.view(*x.shape[:-1], -1) if len(scale) == x.shape[:-1].numel() else scale


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """What an fp8 product is rounded to: GPUs write bfloat16."""
    return torch.bfloat16 if x.is_cuda else x.dtype


def in_dtype(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where `to` changes nothing, compiled code of torch 2.11 gets no gradients."""
    return out if out.dtype == dtype else out.to(dtype)


def start_gather(
    recipe: Fp8Recipe, cast: Fp8Cast | None, shard: torch.Tensor, group_name: str
) -> Callable[[], Quantised | torch.Tensor]:
    """Begin to gather the rows of a shard [M_local, ..., features] that the weight's gradient sums
    over, as `columns_of` has them: by scales that cover the rows of all ranks."""
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


def grad_of_weight(
    recipe: Fp8Recipe,
    x: Quantised | torch.Tensor,
    dout: Quantised | torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``doutᵀ @ x`` [N, K] over all rows."""
    if isinstance(x, torch.Tensor):
        assert isinstance(dout, torch.Tensor)
        return (dout.t() @ x).to(dtype)
    (Bt, scale_b), (A, scale_a) = x, dout
    scale_a, scale_b = of_one_kind(scale_a.t(), scale_b, len(A), len(Bt))
    out = scaled_matmul(
        A,
        scale_a.contiguous(),
        Bt.t(),
        scale_b.contiguous(),
        torch.bfloat16 if A.is_cuda else dtype,
        recipe.fast_accum[2],
    )
    return out.to(dtype)
