"""The torch ops on rows that are grouped by expert, and their backward, made of each other.

With ``y = all_gather(x)[tokens] @ W``, each row by its expert's matrix:
``dx = reduce_scatter(sum of the rows of dy @ Wᵀ of each token)`` and ``dW = rowsᵀ @ dy``.
With ``out = reduce_scatter(sum of p * (y @ W + b) over the rows of each token)``, p the router's
weight of the row, and ``d = all_gather(dout)[tokens]``: ``dy = p * (d @ Wᵀ)``,
``dW = yᵀ @ (p * d)`` and ``dp = y · (d @ Wᵀ) + d · b``. Where the forward quantises its operands,
these are the gradients for the operands as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.ops import grouped_gather, grouped_quantize, grouped_scatter
from agmm.ops.activation_gradients import gradients
from agmm.ops.checks import needs_gradient
from agmm.ops.grouped_products import rows_at
from agmm.ops.library import define, library
from agmm.runtime.cpu_summands import sum_dtype

_MaybeTensor = torch.Tensor | None
_Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The tensors of a `Routing` that the ops take: tokens, offsets, positions."""


def _gathered_rows(shard: torch.Tensor, settings: tuple[Any, ...]) -> torch.Tensor:
    """The rows of all ranks, in a way that may be traced."""
    group_name, world_size, counts = settings
    op = torch.ops.agmm._all_gather.default
    if not counts:
        found: torch.Tensor = op(shard, group_name, world_size, 0)
        return found
    most = max(counts)
    padded = torch.cat([shard, shard.new_zeros(most - shard.shape[0], *shard.shape[1:])])
    whole = op(padded, group_name, world_size, 0).view(world_size, most, *shard.shape[1:])
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])


def _scattered_rows(partials: torch.Tensor, held: int, settings: tuple[Any, ...]) -> torch.Tensor:
    """This rank's rows of the sum over the ranks, in a way that may be traced."""
    group_name, world_size, counts = settings
    op = torch.ops.agmm._reduce_scatter.default
    if not counts:
        found: torch.Tensor = op(partials, group_name, world_size, "sum", 0)
        return found
    most, parts = max(counts), []
    for part in partials.split(list(counts)):
        parts += [part, part.new_zeros(most - part.shape[0], *part.shape[1:])]
    return op(torch.cat(parts), group_name, world_size, "sum", 0)[:held].clone()  # type: ignore[no-any-return]


def _grad_of_weight(
    rows: torch.Tensor, douts: torch.Tensor, offsets: torch.Tensor, column_major: bool
) -> torch.Tensor:
    """``rows.T @ douts`` of each expert in the layout of the weight."""
    op = torch.ops.agmm._grouped_grad_of_weight.default
    found: torch.Tensor = op(*((douts, rows) if column_major else (rows, douts)), offsets)
    return found.transpose(1, 2) if column_major else found


def _is_column_major(weight: torch.Tensor) -> bool:
    return weight.stride(1) == 1 and weight.stride(2) != 1


class AllGatherGroupedMatmul(torch.autograd.Function):
    """``torch.ops.agmm._all_gather_grouped_matmul`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        settings: tuple[Any, ...],
        routing: _Routing,
        x: torch.Tensor,
        *weights_and_biases: _MaybeTensor,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = list(weights_and_biases[:count]), list(weights_and_biases[count:])
        call = grouped_gather.Arguments(x, weights, biases, *routing, *settings)  # type: ignore[arg-type]
        op = torch.ops.agmm._all_gather_grouped_matmul.default
        with torch._C._AutoDispatchBelowAutograd():
            gathered, outs = op(*call)
        epilogue = ctx.epilogue = call.epilogue
        ctx.settings, ctx.held = settings[:3], x.shape[0]
        saves_products = epilogue is not None and epilogue.saves_products
        products = outs[epilogue.results_of(count) :] if epilogue and saves_products else []
        ctx.needs_x, *needs = ctx.needs_input_grad[3:]
        ctx.needs_weights, ctx.needs_biases = needs[:count], needs[count:]
        ctx.column_major = [_is_column_major(weight) for weight in call.weights]
        multiplies = epilogue is not None and not saves_products
        ctx.is_gathered = call.save_gathered and call.return_gathered and not multiplies
        saves_x = multiplies or any(ctx.needs_weights)
        ctx.save_for_backward(
            *routing,
            (gathered if ctx.is_gathered else x) if saves_x else None,
            *(weights if multiplies or ctx.needs_x else [None] * count),
            *(biases if multiplies else products),
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if call.return_gathered else [gathered]), *products)
        return (gathered, *outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgathered: _MaybeTensor, *douts: _MaybeTensor) -> tuple[Any, ...]:
        tokens, offsets, positions, saved, *rest = ctx.saved_tensors
        count = len(ctx.column_major)
        weights, rest = rest[:count], rest[count:]
        routing, settings = (tokens, offsets, positions), ctx.settings
        gathered, is_gathered = saved, ctx.is_gathered
        if ctx.epilogue is not None:
            douts = douts[: ctx.epilogue.results_of(count)]
            products = rest
            if all(dout is None for dout in douts):
                douts = (None,) * count
            else:
                if not ctx.epilogue.saves_products:
                    op = torch.ops.agmm._all_gather_grouped_matmul.default
                    gathered, products = op(saved, weights, rest, *routing, *settings, True)
                    is_gathered = True
                douts = tuple(gradients(ctx.epilogue, douts, products))
        dx: _MaybeTensor = None
        if ctx.needs_x:
            pairs = [(dout, w) for dout, w in zip(douts, weights, strict=True) if dout is not None]
            if pairs:
                dx = torch.ops.agmm._grouped_matmul_reduce_scatter.default(
                    [dout for dout, _ in pairs],
                    [weight.transpose(1, 2) for _, weight in pairs],
                    *(None, *routing, None, *settings, ctx.held if settings[2] else -1),
                )
            if dgathered is not None:
                other = _scattered_rows(dgathered, ctx.held, settings)
                dx = other if dx is None else dx + other
        grads: list[_MaybeTensor] = []
        rows: _MaybeTensor = None
        for needs, dout, column_major in zip(
            ctx.needs_weights, douts, ctx.column_major, strict=True
        ):
            if not needs or dout is None:
                grads.append(None)
                continue
            if rows is None:
                whole = gathered if is_gathered else _gathered_rows(saved, settings)
                rows = rows_at(whole, tokens)
            grads.append(_grad_of_weight(rows, dout, offsets, column_major))
        op = torch.ops.agmm._grouped_grad_of_bias.default
        for needs, dout in zip(ctx.needs_biases, douts, strict=True):
            grads.append(op(dout, offsets) if needs and dout is not None else None)
        return None, None, None, dx, *grads


class GroupedMatmulReduceScatter(torch.autograd.Function):
    """``torch.ops.agmm._grouped_matmul_reduce_scatter`` with its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        settings: tuple[Any, ...],
        routing: _Routing,
        bias: _MaybeTensor,
        topk_weights: _MaybeTensor,
        *ys_and_weights: torch.Tensor,
    ) -> torch.Tensor:
        ys, weights = list(ys_and_weights[:count]), list(ys_and_weights[count:])
        call = grouped_scatter.Arguments(ys, weights, bias, *routing, topk_weights, *settings)
        op = torch.ops.agmm._grouped_matmul_reduce_scatter.default
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = op(*call)
        ctx.settings, ctx.held = settings[:3], grouped_scatter.held_by_this_rank(call)
        ctx.needs_bias, ctx.needs_router, *needs = ctx.needs_input_grad[3:]
        ctx.needs_ys, ctx.needs_weights = needs[:count], needs[count:]
        ctx.column_major = [_is_column_major(weight) for weight in weights]
        multiplies = any(ctx.needs_ys) or ctx.needs_router
        ctx.save_for_backward(
            *routing,
            topk_weights,
            bias if ctx.needs_router else None,
            *(ys if any(ctx.needs_weights) or ctx.needs_router else [None] * count),
            *(weights if multiplies else [None] * count),
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        tokens, offsets, positions, topk_weights, bias, *rest = ctx.saved_tensors
        count = len(ctx.column_major)
        ys, weights = rest[:count], rest[count:]
        routing, settings = (tokens, offsets, positions), ctx.settings
        needs_rows = (
            any(ctx.needs_weights) or ctx.needs_bias or (ctx.needs_router and bias is not None)
        )
        products: list[torch.Tensor] = []
        gathered: _MaybeTensor = None
        if any(ctx.needs_ys) or ctx.needs_router:
            backward_weights = [weight.transpose(1, 2) for weight in weights]
            gathered, products = torch.ops.agmm._all_gather_grouped_matmul.default(
                dout, backward_weights, [None] * count, *routing, *settings, bool(needs_rows)
            )
        elif needs_rows:
            gathered = _gathered_rows(dout, settings)
        rows = rows_at(gathered, tokens) if needs_rows and gathered is not None else None
        router = None
        if topk_weights is not None:
            whole = _gathered_rows(topk_weights, settings)
            router = _by_row(whole, positions, tokens.shape[0])
        drouter: _MaybeTensor = None
        if ctx.needs_router:
            of_rows = _row_products(ys, products, bias, rows, offsets)
            drouter = _scattered_rows(_by_choice(of_rows, positions), ctx.held, settings)
            drouter = drouter.to(topk_weights.dtype)
        grads: list[_MaybeTensor] = [None] * count
        for i, product in enumerate(products):
            grads[i] = _weighted(product, router) if ctx.needs_ys[i] else None
        weighted = None if rows is None else _weighted(rows, router)
        for needs, y, column_major in zip(ctx.needs_weights, ys, ctx.column_major, strict=True):
            found = None
            if needs and weighted is not None:
                found = _grad_of_weight(y, weighted, offsets, column_major)
            grads.append(found)
        dbias: _MaybeTensor = None
        if ctx.needs_bias and weighted is not None:
            dbias = torch.ops.agmm._grouped_grad_of_bias.default(weighted, offsets)
        return None, None, None, dbias, drouter, *grads


def _by_row(weights: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """The router's weight of each row, of those of each token and choice; 0 behind the last row."""
    places = torch.where(positions >= 0, positions, rows).flatten().long()
    return weights.new_zeros(rows + 1).scatter(0, places, weights.flatten())[:rows]


def _by_choice(of_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number for each token and choice, of those of each row; 0 where the row is elsewhere."""
    padded = torch.cat([of_rows, of_rows.new_zeros(1)])
    places = torch.where(positions >= 0, positions, of_rows.shape[0]).flatten().long()
    return padded[places].view(positions.shape)


def _weighted(rows: torch.Tensor, router: torch.Tensor | None) -> torch.Tensor:
    """The rows times the router's weights, rounded once."""
    if router is None:
        return rows
    wide = sum_dtype(rows.dtype)
    return (rows.to(wide) * router.to(wide)[:, None]).to(rows.dtype)


def _row_products(
    ys: list[torch.Tensor],
    products: list[torch.Tensor],
    bias: torch.Tensor | None,
    douts: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The gradient of each row's weight by the router."""
    wide = sum_dtype(ys[0].dtype)
    total = ys[0].new_zeros(ys[0].shape[0], dtype=wide)
    for y, product in zip(ys, products, strict=True):
        total = total + (y.to(wide) * product.to(wide)).sum(1)
    if bias is not None and douts is not None:
        numbers = torch.arange(total.shape[0], device=total.device, dtype=offsets.dtype)
        experts = torch.searchsorted(offsets[1:].contiguous(), numbers, right=True)
        of_rows = bias[experts.clamp(max=bias.shape[0] - 1)]
        total = total + (of_rows.to(wide) * douts.to(wide)).sum(1)
    return total


def _gather(*given: Any) -> grouped_gather.Found:
    call = grouped_gather.Arguments(*given)
    operands = call.x, *call.weights, *call.biases
    if needs_gradient(*operands):
        grouped_gather.check(call)
        gathered, *outs = AllGatherGroupedMatmul.apply(
            len(call.weights), tuple(call[6:]), tuple(call[3:6]), *operands
        )
        return gathered, outs
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._all_gather_grouped_matmul.default(*given)  # type: ignore[no-any-return]


def _scatter(*given: Any) -> torch.Tensor:
    call = grouped_scatter.Arguments(*given)
    operands = call.bias, call.topk_weights, *call.ys, *call.weights
    if needs_gradient(*operands):
        grouped_scatter.check(call)
        return GroupedMatmulReduceScatter.apply(  # type: ignore[no-any-return]
            len(call.ys), tuple(call[7:]), tuple(call[3:6]), *operands
        )
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._grouped_matmul_reduce_scatter.default(*given)  # type: ignore[no-any-return]


define(
    "_all_gather_grouped_matmul",
    grouped_gather.Arguments,
    "(Tensor gathered, Tensor[] outs)",
    run=lambda call: grouped_quantize.gather(call) if call.quantize else grouped_gather.run(call),
    fake=grouped_gather.fake,
)
library.impl("_all_gather_grouped_matmul", _gather, "Autograd")
define(
    "_grouped_matmul_reduce_scatter",
    grouped_scatter.Arguments,
    "Tensor",
    run=lambda call: grouped_quantize.scatter(call) if call.quantize else grouped_scatter.run(call),
    fake=grouped_scatter.fake,
)
library.impl("_grouped_matmul_reduce_scatter", _scatter, "Autograd")
