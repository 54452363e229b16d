"""Products of rows that are grouped by expert, without an exchange: on the CPU expert by expert, on
a GPU by agmm's kernel; else by torch's grouped matmul, or as one batch where that does not take the
operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from agmm.ops import grouped_kernel
from agmm.ops.checks import check_no_backward
from agmm.ops.library import define
from agmm.runtime.cpu_gather import Products
from agmm.runtime.cpu_summands import sum_dtype
from agmm.runtime.epilogues import Epilogue

_ALIGNMENT = 16
"""The bytes at multiples of which torch's grouped matmul wants rows and columns to begin."""


def rows_at(tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The rows of ``tokens`` with these numbers; zeros where there are no tokens at all."""
    if tokens.shape[0] == 0:
        return tokens.new_zeros(numbers.shape[0], *tokens.shape[1:])
    return tokens.index_select(0, numbers)


def segments(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows. On the CPU."""
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if begin < end:
            yield expert, slice(begin, end)


def experts_of_rows(count: int, offsets: torch.Tensor) -> torch.Tensor:
    """The expert of each of ``count`` rows; the last one behind its rows, or one before it that
    there is."""
    numbers = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    found = torch.searchsorted(offsets[1:], numbers, right=True)
    return found.clamp_(max=len(offsets) - 2)


# --- rows times weights ---


class Multiplied(NamedTuple):
    """What is made of the rows of a rank's experts."""

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    epilogue: Epilogue | None

    def products(self, rows: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        """The results of rows that are there."""
        return products(rows, self.weights, self.biases, offsets, self.epilogue)

    def matmuls(self, rows: torch.Tensor) -> tuple[list[grouped_kernel.Described], bool] | None:
        """The calls of kernels that multiply the rows, and whether the epilogue is still to be
        composed behind them; None where not all have a kernel."""
        weights, biases, epilogue = self
        config = grouped_kernel.gated_config(rows, weights, epilogue)
        if config is not None:
            return [grouped_kernel.described(config, rows, weights, biases, epilogue)], False
        calls = []
        for weight, bias in zip(weights, biases, strict=True):
            config = grouped_kernel.config_of(rows, [weight])
            if config is None:
                return None
            calls.append(grouped_kernel.described(config, rows, [weight], [bias], None))
        return calls, True


class Summed(NamedTuple):
    """Products of a rank's experts, which are added up and leave it."""

    ys: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    """The bias of the first product."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return self.ys[0].dtype

    def wide(self, offsets: torch.Tensor) -> torch.Tensor:
        """The sum of the products, as `wide_sums`."""
        return wide_sums(self.ys, self.weights, self.bias, offsets)

    def on_gpu(self, offsets: torch.Tensor) -> list[torch.Tensor]:
        """The products on a GPU, each contiguous."""
        return [
            product_on_gpu(y, weight, bias, offsets).contiguous()
            for y, weight, bias in self._each()
        ]

    def matmuls(self) -> list[grouped_kernel.OfRows] | None:
        """The calls of kernels that make the products; None where not all have a kernel."""
        calls = []
        for y, weight, bias in self._each():
            config = grouped_kernel.config_of(y, [weight])
            if config is None:
                return None
            call = grouped_kernel.described(config, y, [weight], [bias], None, has_out=False)
            calls.append(grouped_kernel.OfRows(call, y))
        return calls

    def _each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        biases = [self.bias, *[None] * (len(self.ys) - 1)]
        return zip(self.ys, self.weights, biases, strict=True)


def products(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    offsets: torch.Tensor,
    epilogue: Epilogue | None,
) -> list[torch.Tensor]:
    """The products of each expert's rows with its matrix of each weight, or what the epilogue makes
    of them; zeros behind the last expert's rows.

    Args:
        rows: [rows, K].
        weights: [experts, K, N] each.
        biases: for each weight [experts, N] or None.
        offsets: [experts + 1], as in `Routing`.
    """
    if rows.device.type != "cpu":
        gated = grouped_kernel.gated(rows, weights, biases, offsets, epilogue)
        if gated is not None:
            return [gated]
        found = [
            product_on_gpu(rows, weight, bias, offsets)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return found if epilogue is None else epilogue.composed(found)
    columns = [weight.shape[2] for weight in weights]
    columns = columns if epilogue is None else epilogue.outs(columns)
    outs = [rows.new_zeros(rows.shape[0], n) for n in columns]
    for expert, segment in segments(offsets):
        of_expert = Products(
            [weight[expert] for weight in weights],
            [None if bias is None else bias[expert] for bias in biases],
            epilogue,
            rows,
            segment.stop - segment.start,
        )
        of_expert.multiply(rows[segment], slice(None))
        for out, found_of in zip(outs, of_expert.outs, strict=True):
            out[segment] = found_of
    return outs


def wide_sums(
    rows: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The sum over the pairs of the products of each expert's rows, and its bias, in `sum_dtype`;
    zeros behind the last expert's rows. On a GPU each product is rounded to the rows' dtype."""
    wide = sum_dtype(rows[0].dtype)
    if rows[0].device.type != "cpu":
        total = product_on_gpu(rows[0], weights[0], bias, offsets).to(wide)
        for one, weight in zip(rows[1:], weights[1:], strict=True):
            total.add_(product_on_gpu(one, weight, None, offsets))
        return total
    total = rows[0].new_zeros(rows[0].shape[0], weights[0].shape[2], dtype=wide)
    for expert, segment in segments(offsets):
        out = total[segment]
        if bias is not None:
            out += bias[expert]
        for one, weight in zip(rows, weights, strict=True):
            out += torch.mm(one[segment].to(wide), weight[expert].to(wide))
    return total


def product_on_gpu(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    """The products of each expert's rows, by the kernel if there is one for the operands."""
    config = grouped_kernel.config_of(rows, [weight])
    if config is None:
        return products_by_torch(rows, weight, bias, offsets)
    return grouped_kernel.run(config, rows, [weight], [bias], offsets)


def products_by_torch(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    """The products of each expert's rows, without a look at the device: on a GPU as in a graph."""
    experts = experts_of_rows(rows.shape[0], offsets)
    if 0 in rows.stride() or 1 not in rows.stride():
        rows = rows.contiguous()  # as a gradient that is the same for all rows is not
    if _takes(rows, weight):
        out = torch._grouped_mm(rows, weight, offs=offsets[1:])
        if bias is not None:  # which torch's grouped matmul does not take
            out = out + bias[experts]
    else:
        batch = _Batch(offsets, rows.shape[0])
        wide = batch.spread(rows)
        if bias is None:
            products = torch.bmm(wide, weight)
        else:
            products = torch.baddbmm(bias[:, None], wide, weight)
        out = products[experts, batch.places(experts)]
    there = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return torch.where(there[:, None], out, 0)


def _takes(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped matmul takes the operands, of which each is row- or column-major."""
    for tensor in operands:
        *batch, by_row, by_column = tensor.stride()
        line, width = (by_row, -1) if by_column == 1 else (by_column, -2)
        if tensor.dtype != torch.bfloat16 or 1 not in (by_row, by_column) or 0 in tensor.shape:
            return False
        if line < tensor.shape[width] or tensor.data_ptr() % _ALIGNMENT:
            return False
        if any(stride * tensor.element_size() % _ALIGNMENT for stride in (line, *batch)):
            return False
    return True


class _Batch(NamedTuple):
    """The rows of the experts as a batch with room for all rows in each of them."""

    offsets: torch.Tensor
    room: int

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """[experts, room, ...], zeros behind each expert's rows."""
        begins, ends = self.offsets[:-1, None], self.offsets[1:, None]
        numbers = begins + torch.arange(self.room, device=rows.device)
        found = rows[numbers.clamp(max=max(0, self.room - 1))]
        return torch.where((numbers < ends)[..., None], found, 0)

    def places(self, experts: torch.Tensor) -> torch.Tensor:
        """The place in the batch of each row, which is of that expert."""
        numbers = torch.arange(self.room, device=experts.device)
        return (numbers - self.offsets[experts]).clamp_(0, max(0, self.room - 1))


# --- what a backward wants ---


class _OfWeight(NamedTuple):
    """The arguments of the op that makes the gradient of a weight."""

    rows: torch.Tensor
    douts: torch.Tensor
    offsets: torch.Tensor


def _grad_of_weight(call: _OfWeight) -> torch.Tensor:
    rows, douts, offsets = call
    experts, shape = len(offsets) - 1, (rows.shape[1], douts.shape[1])
    if rows.device.type != "cpu":
        return grad_of_weight_by_torch(rows, douts, offsets)
    wide = sum_dtype(rows.dtype)
    out = rows.new_zeros(experts, *shape)
    for expert, segment in segments(offsets):
        out[expert] = torch.mm(rows[segment].t().to(wide), douts[segment].to(wide))
    return out


def grad_of_weight_by_torch(
    rows: torch.Tensor, douts: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """``rows.T @ douts`` of each expert, without a look at the device. That of float16 is rounded
    to bfloat16 where torch's grouped matmul makes it."""
    dtype = rows.dtype
    if dtype == torch.float16:
        pairs, of_pairs = _in_pairs(rows, first_twice=True), _in_pairs(douts, first_twice=False)
        if _takes(pairs.t(), of_pairs):
            rows, douts, offsets = pairs, of_pairs, offsets * _PAIRS
    if _takes(rows.t(), douts):
        out = torch._grouped_mm(rows.t(), douts, offs=offsets[1:])
        return torch.where((offsets.diff() > 0)[:, None, None], out, 0).to(dtype)
    batch = _Batch(offsets, rows.shape[0])
    return torch.bmm(batch.spread(rows).transpose(1, 2), batch.spread(douts))


_PAIRS = 3
"""The products that make one of float16 out of bfloat16: a number is the sum of two, and the
product of the two small ones is less than the rounding of the result."""


def _in_pairs(x: torch.Tensor, *, first_twice: bool) -> torch.Tensor:
    """float16 [rows, N] as bfloat16 [`_PAIRS` * rows, N], for sums of products over the rows: each
    row is rounded, and what is left of it. bfloat16 holds both exactly.

    Args:
        first_twice: whether the order is rounded, rounded, rest; else rounded, rest, rounded.
    """
    large = x.to(torch.bfloat16)
    # An infinite number leaves nothing: else the sum with it would be NaN.
    left = x.to(torch.float32) - large.to(torch.float32)
    rest = torch.where(large.isinf(), 0, left).to(torch.bfloat16)
    order = (large, large, rest) if first_twice else (large, rest, large)
    return torch.stack(order, 1).flatten(0, 1)


class _OfBias(NamedTuple):
    """The arguments of the op that makes the gradient of a bias."""

    douts: torch.Tensor
    offsets: torch.Tensor


def _grad_of_bias(call: _OfBias) -> torch.Tensor:
    douts, offsets = call
    wide = sum_dtype(douts.dtype)
    numbers = torch.arange(douts.shape[0], device=douts.device)
    there = torch.where((numbers < offsets[-1])[:, None], douts, 0).to(wide)
    of_expert = (numbers >= offsets[:-1, None]) & (numbers < offsets[1:, None])
    return torch.mm(of_expert.to(wide), there).to(douts.dtype)


def _refuse_grad(call: _OfWeight | _OfBias) -> None:
    check_no_backward(call._asdict().items(), "the ops of a backward on grouped rows")


define(
    "_grouped_grad_of_weight",
    _OfWeight,
    "Tensor",
    run=_grad_of_weight,
    fake=lambda call: call.rows.new_empty(
        call.offsets.shape[0] - 1, call.rows.shape[1], call.douts.shape[1]
    ),
    check_grad=_refuse_grad,
)
define(
    "_grouped_grad_of_bias",
    _OfBias,
    "Tensor",
    run=_grad_of_bias,
    fake=lambda call: call.douts.new_empty(call.offsets.shape[0] - 1, call.douts.shape[1]),
    check_grad=_refuse_grad,
)
