"""Grouped matmul + reduce-scatter: its checks, its torch op and its steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument
from agmm.ops.checks import (
    FLOATS,
    check_count,
    check_device,
    check_dtype,
    check_listed,
    check_matrix,
    check_operand,
    check_same,
)
from agmm.ops.grouped import GroupedCall, counts_of
from agmm.ops.grouped_checks import (
    check_bias_of_experts,
    check_columns_of_experts,
    check_quantize,
    check_routing,
    check_weights_of_experts,
)
from agmm.ops.grouped_dispatch import combined, why_not_combined
from agmm.ops.grouped_gather import check_total
from agmm.ops.grouped_products import Summed
from agmm.ops.pipeline import Ready, Route, serve
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.cuda_dispatch import RowsOfExperts
from agmm.runtime.token_exchange import Exchange


class Arguments(NamedTuple):
    """The arguments of the torch op."""

    ys: list[torch.Tensor]
    weights: list[torch.Tensor]
    bias: torch.Tensor | None
    tokens: torch.Tensor
    """What the backward wants; the forward has no use for it."""
    offsets: torch.Tensor
    positions: torch.Tensor
    topk_weights: torch.Tensor | None
    """None for weights of 1."""
    group_name: str
    world_size: int
    tokens_per_rank: list[int] = []  # noqa: RUF012  # the default of the schema
    held: int = -1
    """How many tokens this rank holds, where ``tokens_per_rank`` is given."""
    strict: bool = False
    quantize: str = ""
    """The kind of the scales with which y and the weight are quantised for the forward."""


def check(call: Arguments) -> None:
    """Refuses all that is wrong in itself."""
    ys, weights, topk_weights = call.ys, call.weights, call.topk_weights
    check_listed("y", ys)
    check_count("weights", weights, len(ys), "of y")
    check_operand("y", ys[0])
    check_quantize(call.quantize, "y", ys[0])
    check_routing(call.tokens, call.offsets, call.positions, ("y", ys[0]))
    for y, weight in zip(ys, weights, strict=True):
        check_operand("y", y)
        check_matrix("y", y)
        check_dtype("y", y, FLOATS)
        check_same("y", y, "the first of the list", ys[0])
        check_rows(y, call.tokens)
        check_weights_of_experts(weight, "y", y, call.offsets)
        check_columns_of_experts(weight, weights[0])
    if call.bias is not None:
        check_bias_of_experts(call.bias, weights[0])
    if topk_weights is not None:
        check_router(topk_weights, call.positions, ys[0])


def check_rows(y: torch.Tensor, tokens: torch.Tensor) -> None:
    """Refuses other rows than the routing's."""
    if y.shape[0] != tokens.shape[0]:
        raise InvalidArgument(
            f"y: found {y.shape[0]} rows, wanted {tokens.shape[0]}, those of the routing"
        )


def check_router(topk_weights: torch.Tensor, positions: torch.Tensor, y: torch.Tensor) -> None:
    """Refuses what is no weight of the router for each choice of the routing."""
    check_operand("topk_weights", topk_weights)
    check_matrix("topk_weights", topk_weights)
    check_dtype("topk_weights", topk_weights, FLOATS)
    check_device("topk_weights", topk_weights, "y", y)
    if topk_weights.shape[1] != positions.shape[1]:
        raise InvalidArgument(
            f"topk_weights: found {topk_weights.shape[1]} columns, wanted {positions.shape[1]}, "
            "the choices of the routing"
        )


def held_by_this_rank(call: Any) -> int:
    """How many tokens this rank holds, as the arguments say."""
    of_equal: int = call.positions.shape[0] // call.world_size
    held: int = call.held if call.tokens_per_rank else of_equal
    if call.topk_weights is not None:
        held = call.topk_weights.shape[0]
    return held


class GroupedScatter(GroupedCall[torch.Tensor]):
    """A call of the torch op."""

    op = "grouped_matmul_reduce_scatter"

    def __init__(self, call: Arguments, group: dist.ProcessGroup) -> None:
        given = call.ys[0] if call.ys else None
        super().__init__(given, group, call.tokens_per_rank, strict=call.strict)
        self._call = call

    def check(self) -> None:
        check(self._call)
        self.check_counts()

    def check_counts(self) -> None:
        """Refuses numbers of tokens that do not fit each other, and sets `counts`."""
        call = self._call
        if call.topk_weights is None:
            self.counts = counts_of(
                call.tokens_per_rank, held_by_this_rank(call), self.group.size()
            )
        else:
            self.check_tokens("topk_weights", call.topk_weights)
        check_total(self.counts, call.positions)

    def words(self) -> Call:
        call = self._call
        given = {} if call.topk_weights is None else {"topk_weights": call.topk_weights}
        return Call(self.op, y=call.ys, weights=call.weights, **given, **self.asked)

    def agreed(self) -> str:
        call = self._call
        experts, columns = call.weights[0].shape[0], call.weights[0].shape[2]
        router = "1" if call.topk_weights is None else f"{call.topk_weights.dtype}"
        of_tokens = f"{self.counts} x {call.positions.shape[1]} x {columns} {call.ys[0].dtype}"
        return f"{self.op} of {of_tokens} by {experts} experts, weights {router}"

    def look(self, route: Route, words: Call) -> None:
        router = self._call.topk_weights
        if nan_check.active and router is not None:
            rank = groups.of(self.group).rank
            nan_check.look_through(words.op, "topk_weights", router, rank)

    def summed(self) -> Any:
        """The products that leave this rank, as `Summed`."""
        return Summed(self._call.ys, self._call.weights, self._call.bias)

    def why_no_kernel(self) -> str | None:
        call = self._call
        size = call.ys[0].shape[0], self.sent_columns()
        return why_not_combined(self.summed(), size, self.counts, call.positions)

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu" or self.group.size() == 1:
            return super().prepare(route)
        return self._combined

    def _combined(self) -> torch.Tensor:
        call, summed = self._call, self.summed()
        router = None if call.topk_weights is None else call.topk_weights.detach()
        out = call.ys[0].new_empty(
            *(held_by_this_rank(call), self.sent_columns()), dtype=summed.dtype
        )
        rows = RowsOfExperts(call.tokens, call.offsets, call.positions)
        return combined(self.group, self.counts, summed, rows, router, out)

    def sent_columns(self) -> int:
        return self._call.weights[0].shape[2]

    def compute(self, exchange: Exchange) -> torch.Tensor:
        call = self._call
        router = None
        if call.topk_weights is not None:
            router = exchange.gather(call.topk_weights.detach())
        summed = self.summed()
        partials = by_token(summed.wide(call.offsets), call.positions, router)
        if nan_check.active:
            nan_check.look_through(self.op, "y @ weights", partials, exchange.rank)
        return exchange.scatter(partials).to(summed.dtype)


def by_token(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """For each token the weighted sum of its rows on this rank, choice by choice.

    Args:
        rows: [rows, N].
        positions: [tokens, k], as in `Routing`.
        weights: [tokens, k] or None for 1.
    """
    total = rows.new_zeros(positions.shape[0], rows.shape[1])
    if rows.shape[0] == 0:
        return total
    for choice in range(positions.shape[1]):
        position = positions[:, choice]
        term = rows.index_select(0, position.clamp(min=0))
        if weights is not None:
            term *= weights[:, choice, None].to(rows.dtype)
        total += torch.where((position >= 0)[:, None], term, 0)
    return total


def run(call: Arguments) -> torch.Tensor:
    """The result of a call, below autograd."""
    return serve(GroupedScatter(call, groups.group_of_size(call.group_name, call.world_size)))


def fake(call: Arguments) -> torch.Tensor:
    """The result on tensors without memory."""
    check(call)
    return call.ys[0].new_empty(held_by_this_rank(call), call.weights[0].shape[2])
