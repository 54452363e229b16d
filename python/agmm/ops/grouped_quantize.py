"""Mixtures of experts whose operands are quantised to fp8 in the call (``quantize=``): with dynamic
scales of rows or of blocks, for the forward alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmm.ops import grouped_gather, grouped_scatter
from agmm.ops.grouped_scaled import Gather, Scatter, run_gather, run_scatter
from agmm.ops.quantize import look_through, quantised
from agmm.runtime import nan_check
from agmm.runtime.scaling import BLOCK, BY_NAME, Scaling


def weight_in_fp8(weight: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [experts, K, N] as fp8 values, column-major, and their scales. The experts are
    quantised at once, but where scale blocks would cross from one to the next."""
    lines = weight.mT.contiguous()  # [experts, N, K]
    experts, n, k = lines.shape
    tile = scaling.b[::-1]
    if tile == (BLOCK, BLOCK) and n % BLOCK:
        parts = [quantised(of_expert, tile) for of_expert in lines]
        values = torch.stack([part.view(torch.uint8) for part, _ in parts]).view(parts[0][0].dtype)
        return values.mT, torch.stack([scale for _, scale in parts]).mT
    values, scale = quantised(lines.view(experts * n, k), tile)
    return values.view(lines.shape).mT, scale.view(experts, -1, scale.shape[1]).mT


def _weights(
    weights: Sequence[torch.Tensor], scaling: Scaling
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    found = [weight_in_fp8(weight.detach(), scaling) for weight in weights]
    return [values for values, _ in found], [scale for _, scale in found]


def gather(call: grouped_gather.Arguments) -> grouped_gather.Found:
    """The results of a call of the first half, in the dtype of x."""
    grouped_gather.check(call)
    scaling, x = BY_NAME[call.quantize], call.x.detach()
    look_through("all_gather_grouped_matmul", call.group_name, x=x)
    with nan_check.done():  # a NaN makes the scale of its tile one
        values, scale = quantised(x, scaling.a)
        weights, scales = _weights(call.weights, scaling)
        of_routing = call.tokens, call.offsets, call.positions
        ranks = call.group_name, call.world_size
        outs = run_gather(
            Gather(
                *(values, scale, weights, scales, call.biases, *of_routing, *ranks),
                *(x.dtype, False, call.tokens_per_rank, call.strict, call.activation),
                call.save_preactivation,
            )
        )
    return x.new_empty(0), outs


def scatter(call: grouped_scatter.Arguments) -> torch.Tensor:
    """The result of a call of the second half, in the dtype of y."""
    grouped_scatter.check(call)
    scaling, (y,) = BY_NAME[call.quantize], call.ys
    assert call.topk_weights is not None  # a backward leaves them out, which is not quantised
    y = y.detach()
    values, scale = quantised(y, scaling.a)
    weights, scales = _weights(call.weights, scaling)
    of_routing = call.tokens, call.offsets, call.positions
    ranks = call.group_name, call.world_size
    return run_scatter(
        Scatter(
            *(values, scale, weights[0], scales[0], call.bias, *of_routing, call.topk_weights),
            *(*ranks, y.dtype, False, call.tokens_per_rank, call.strict),
        )
    )
