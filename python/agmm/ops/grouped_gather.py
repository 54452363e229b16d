"""All-gather + grouped matmul: its checks, its torch op and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument
from agmm.ops.checks import (
    FLOATS,
    check_count,
    check_dtype,
    check_listed,
    check_matrix,
    check_operand,
)
from agmm.ops.grouped import GroupedCall
from agmm.ops.grouped_checks import (
    check_bias_of_experts,
    check_quantize,
    check_routing,
    check_weights_of_experts,
)
from agmm.ops.grouped_dispatch import Made, dispatched, why_not_dispatched
from agmm.ops.grouped_products import Multiplied, rows_at
from agmm.ops.pipeline import Ready, Route, serve
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.cuda_dispatch import RowsOfExperts
from agmm.runtime.epilogues import Epilogue, named
from agmm.runtime.token_exchange import Exchange


class Arguments(NamedTuple):
    """The arguments of the torch op."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    tokens: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    group_name: str
    world_size: int
    tokens_per_rank: list[int] = []  # noqa: RUF012  # the default of the schema
    return_gathered: bool = False
    strict: bool = False
    save_gathered: bool = False
    """Whether the backward uses the gathered tokens; the forward has no use for it."""
    activation: str = ""
    save_preactivation: bool = False
    """Whether the products with their biases are results too, behind those that the activation
    makes of them."""
    quantize: str = ""
    """The kind of the scales with which x and the weights are quantised for the forward."""

    @property
    def epilogue(self) -> Epilogue | None:
        return named(self.activation, saves_products=self.save_preactivation)


Found = tuple[torch.Tensor, list[torch.Tensor]]
"""The gathered tokens, [0] where they are not wanted, and the results."""


def check(call: Arguments) -> None:
    """Refuses all that is wrong in itself."""
    x, weights = call.x, call.weights
    check_operand("x", x)
    check_matrix("x", x)
    check_dtype("x", x, FLOATS)
    check_quantize(call.quantize, "x", x)
    check_listed("weights", weights, " weight")
    check_count("bias", call.biases, len(weights), "weights")
    check_routing(call.tokens, call.offsets, call.positions, ("x", call.x))
    for weight, bias in zip(weights, call.biases, strict=True):
        check_weights_of_experts(weight, "x", x, call.offsets)
        if bias is not None:
            check_bias_of_experts(bias, weight)
    if call.epilogue is not None:
        call.epilogue.check(weights, x.dtype, name="weights")


class GroupedGather(GroupedCall[Found]):
    """A call of the torch op."""

    op = "all_gather_grouped_matmul"

    def __init__(self, call: Arguments, group: dist.ProcessGroup) -> None:
        super().__init__(call.x, group, call.tokens_per_rank, strict=call.strict)
        self._call = call

    @property
    def returns_A(self) -> bool:
        return self._call.return_gathered

    def check(self) -> None:
        check(self._call)
        self.check_counts()

    def check_counts(self) -> None:
        """Refuses numbers of tokens that do not fit each other, and sets `counts`."""
        self.check_tokens("x", self._call.x)
        check_total(self.counts, self._call.positions)

    def words(self) -> Call:
        call = self._call
        activation = {"activation": call.activation} if call.activation else {}
        asked = {**activation, **self.asked}
        return Call(
            self.op, x=call.x, weights=call.weights, return_gathered=call.return_gathered, **asked
        )

    def agreed(self) -> str:
        x, weights = self._call.x, self._call.weights
        sizes = [tuple(weight.shape) for weight in weights]
        return f"{self.op} of {self.counts} x {x.shape[1]} {x.dtype} by {sizes}"

    def sent_columns(self) -> int:
        return self._call.x.shape[1]

    def sent(self) -> torch.Tensor:
        """The rows that travel."""
        return self._call.x.detach()

    def row_bytes(self) -> int:
        """The bytes of a row that travels."""
        return self._call.x.shape[1] * self._call.x.element_size()

    def made(self) -> Made:
        """What is made of the rows."""
        return Multiplied(self._call.weights, self._call.biases, self._call.epilogue)

    def why_no_kernel(self) -> str | None:
        call = self._call
        experts, capacity = call.offsets.shape[0] - 1, call.tokens.shape[0]
        row = self.sent_columns(), self.row_bytes()
        return why_not_dispatched(row, self.counts, call.positions, experts, capacity)

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu" or self.group.size() == 1:
            return super().prepare(route)
        return self._dispatched

    def _dispatched(self) -> Found:
        call = self._call
        gathered, outs = dispatched(
            self.group,
            self.counts,
            self.sent(),
            RowsOfExperts(call.tokens, call.offsets, call.positions),
            self.made(),
            gathers=call.return_gathered,
        )
        return call.x.new_empty(0) if gathered is None else gathered, outs

    def look(self, route: Route, words: Call) -> None:
        if nan_check.active:
            nan_check.look_through(words.op, "x", self._call.x, groups.of(self.group).rank)

    def compute(self, exchange: Exchange) -> Found:
        call = self._call
        gathered = exchange.gather(self.sent())
        outs = self.made().products(rows_at(gathered, call.tokens), call.offsets)
        return gathered if call.return_gathered else call.x.new_empty(0), outs


def check_total(counts: Sequence[int], positions: torch.Tensor) -> None:
    """Refuses a routing of another number of tokens than the ranks hold."""
    if sum(counts) != positions.shape[0]:
        raise InvalidArgument(
            f"routing: found {positions.shape[0]} tokens, wanted {sum(counts)}, those of all ranks"
        )


def run(call: Arguments) -> Found:
    """The results of a call, below autograd."""
    return serve(GroupedGather(call, groups.group_of_size(call.group_name, call.world_size)))


def fake(call: Arguments) -> Found:
    """The results on tensors without memory."""
    check(call)
    x, epilogue = call.x, call.epilogue
    columns: list[Any] = [weight.shape[2] for weight in call.weights]
    columns = columns if epilogue is None else epilogue.outs(columns)
    whole = (call.positions.shape[0], x.shape[1]) if call.return_gathered else (0,)
    return x.new_empty(whole), [x.new_empty(call.tokens.shape[0], n) for n in columns]
