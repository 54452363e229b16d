"""The calls on fp8 rows that are grouped by expert: their torch ops, and what differs from those of
other rows. A row travels with its scales, in one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import (
    check_count,
    check_device,
    check_dtype,
    check_listed,
    check_matrix,
    check_no_backward,
    check_operand,
    names_of,
)
from agmm.ops.grouped_checks import (
    check_bias_shape_of_experts,
    check_experts,
    check_routing,
    check_stack,
)
from agmm.ops.grouped_gather import GroupedGather
from agmm.ops.grouped_kernel import Described, OfRows, scales_of_rows
from agmm.ops.grouped_scaled_products import (
    ScaledWeight,
    described,
    is_left_to_torch,
    matmuls,
    products,
    scaled_product_on_gpu,
    wide_sums,
)
from agmm.ops.grouped_scatter import GroupedScatter, check_router, check_rows, held_by_this_rank
from agmm.ops.library import define
from agmm.ops.pipeline import Route, serve
from agmm.ops.scaled_checks import BIAS_DTYPES, check_fp8, check_scales, scaling_of_experts
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.epilogues import Epilogue, named
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaled_rows import RowBytes
from agmm.runtime.scaling import Scaling

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Gather(NamedTuple):
    """The arguments of the torch op of the first half."""

    x: torch.Tensor
    scale_a: torch.Tensor
    weights: list[torch.Tensor]
    scale_bs: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    tokens: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    group_name: str
    world_size: int
    out_dtype: torch.dtype
    use_fast_accum: bool
    tokens_per_rank: list[int] = []  # noqa: RUF012  # the default of the schema
    strict: bool = False
    activation: str = ""
    save_preactivation: bool = False
    """Whether the products with their biases are results too."""

    @property
    def epilogue(self) -> Epilogue | None:
        return named(self.activation, saves_products=self.save_preactivation)

    @property
    def return_gathered(self) -> bool:
        return False


class Scatter(NamedTuple):
    """The arguments of the torch op of the second half."""

    y: torch.Tensor
    scale_a: torch.Tensor
    weight: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    tokens: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    topk_weights: torch.Tensor
    group_name: str
    world_size: int
    out_dtype: torch.dtype
    use_fast_accum: bool
    tokens_per_rank: list[int] = []  # noqa: RUF012  # the default of the schema
    strict: bool = False

    @property
    def held(self) -> int:
        return -1

    @property
    def ys(self) -> list[torch.Tensor]:
        return [self.y]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.weight]


# --- checks ---


def _check_products(
    rows: tuple[str, torch.Tensor, torch.Tensor],
    weights: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    offsets: torch.Tensor,
) -> Scaling:
    """The kind of the scales of products of experts, which can be made.

    Args:
        rows: the name of the argument that has rows, it, and its scales.
    """
    name, A, scale_a = rows
    for given, tensor in ((name, A), ("scale_a", scale_a)):
        check_operand(given, tensor)
    check_matrix(name, A)
    check_listed("weights", weights, " weight")
    check_count("scale_b", scale_bs, len(weights), "weights")
    check_count("bias", biases, len(weights), "weights")
    for weight, scale_b, bias in zip(weights, scale_bs, biases, strict=True):
        check_stack("weights", weight)
        check_operand("scale_b", scale_b)
        check_fp8(name, A, "weights", weight)
        check_experts(weight, offsets)
        check_scales(name, A, (("scale_a", scale_a), ("scale_b", scale_b)))
        if bias is not None:
            check_operand("bias", bias)
            check_dtype("bias", bias, BIAS_DTYPES)
            check_device("bias", bias, name, A)
            check_bias_shape_of_experts(bias, weight)
    return scaling_of_experts(A, scale_a, weights, scale_bs)


def _check_out_dtype(out_dtype: Any) -> None:
    if out_dtype not in _OUT_DTYPES:
        raise InvalidArgument(
            f"out_dtype: found {out_dtype}, wanted one of {names_of(_OUT_DTYPES)}"
        )


def _check_gather(call: Gather) -> Scaling:
    x, scale_a, weights, scale_bs, biases, *_ = call
    check_operand("x", x)
    check_routing(call.tokens, call.offsets, call.positions, ("x", x))
    given = weights, scale_bs, biases, call.offsets
    scaling = _check_products(("x", x, scale_a), *given)
    _check_out_dtype(call.out_dtype)
    if call.epilogue is not None:
        call.epilogue.check(weights, call.out_dtype, name="weights")
    return scaling


def _check_scatter(call: Scatter) -> Scaling:
    check_operand("y", call.y)
    check_routing(call.tokens, call.offsets, call.positions, ("y", call.y))
    given = call.weights, [call.scale_b], [call.bias], call.offsets
    scaling = _check_products(("y", call.y, call.scale_a), *given)
    check_rows(call.y, call.tokens)
    _check_out_dtype(call.out_dtype)
    check_router(call.topk_weights, call.positions, call.y)
    return scaling


# --- calls ---


class _Made(NamedTuple):
    """What is made of rows of bytes."""

    layout: RowBytes
    weights: Sequence[ScaledWeight]
    epilogue: Epilogue | None

    def products(self, rows: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        return products(self.layout.unpack(rows), self.weights, offsets, self.epilogue)

    def matmuls(self, rows: torch.Tensor) -> tuple[list[Described], bool] | None:
        return matmuls(self.layout.unpack(rows), self.weights, self.epilogue)


class _Summed(NamedTuple):
    """The product that leaves a rank."""

    rows: Scaled
    weight: ScaledWeight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.out_dtype

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.weight.values]

    def wide(self, offsets: torch.Tensor) -> torch.Tensor:
        return wide_sums(self.rows, self.weight, offsets)

    def on_gpu(self, offsets: torch.Tensor) -> list[torch.Tensor]:
        return [scaled_product_on_gpu(self.rows, self.weight, offsets).contiguous()]

    def matmuls(self) -> list[OfRows] | None:
        """A product that is left to torch is copied to where it leaves from."""
        if is_left_to_torch(self.rows.values, self.weight):
            return None
        call = described(self.rows, [self.weight], None, has_out=False)
        if call is None:
            return None
        return [OfRows(call, self.rows.values, scales_of_rows(self.rows.scale))]


class ScaledGather(GroupedGather):
    """A call of the torch op of the first half."""

    _call: Any
    _scaling: Scaling

    def check(self) -> None:
        self._scaling = _check_gather(self._call)
        self.check_counts()

    def words(self) -> Call:
        found = super().words()
        found.arguments |= {"scale_a": self._call.scale_a, "scale_b": self._call.scale_bs}
        return found

    def agreed(self) -> str:
        return f"{super().agreed()}, scales {self._scaling.name}"

    def rows(self) -> Scaled:
        """This rank's tokens."""
        return Scaled(self._call.x.detach(), self._call.scale_a.detach(), self._scaling.a)

    def sent(self) -> torch.Tensor:
        return self._layout().pack(self.rows())

    def row_bytes(self) -> int:
        return self._layout().length

    def made(self) -> _Made:
        call = self._call
        of_each = zip(call.weights, call.scale_bs, call.biases, strict=True)
        settings = self._scaling, call.out_dtype, call.use_fast_accum
        weights = [ScaledWeight(*one, *settings) for one in of_each]
        return _Made(self._layout(), weights, call.epilogue)

    def look(self, route: Route, words: Call) -> None:
        super().look(route, words)
        if nan_check.active:
            rank = groups.of(self.group).rank
            nan_check.look_through(words.op, "scale_a", self._call.scale_a, rank)

    def _layout(self) -> RowBytes:
        return RowBytes.of(self.rows())


class ScaledScatter(GroupedScatter):
    """A call of the torch op of the second half."""

    _call: Any
    _scaling: Scaling

    def check(self) -> None:
        self._scaling = _check_scatter(self._call)
        self.check_counts()

    def words(self) -> Call:
        found = super().words()
        found.arguments |= {"scale_a": self._call.scale_a, "scale_b": self._call.scale_b}
        return found

    def agreed(self) -> str:
        return f"{super().agreed()} to {self._call.out_dtype}"

    def summed(self) -> _Summed:
        call = self._call
        rows = Scaled(call.y.detach(), call.scale_a, self._scaling.a)
        settings = self._scaling, call.out_dtype, call.use_fast_accum
        return _Summed(rows, ScaledWeight(call.weight, call.scale_b, call.bias, *settings))


# --- the torch ops ---


def run_gather(call: Gather) -> list[torch.Tensor]:
    """The results of a call of the first half."""
    group = groups.group_of_size(call.group_name, call.world_size)
    return serve(ScaledGather(call, group))[1]  # type: ignore[arg-type]


def _fake_gather(call: Gather) -> list[torch.Tensor]:
    _check_gather(call)
    columns: list[Any] = [weight.shape[2] for weight in call.weights]
    columns = columns if call.epilogue is None else call.epilogue.outs(columns)
    return [call.x.new_empty(call.tokens.shape[0], n, dtype=call.out_dtype) for n in columns]


def run_scatter(call: Scatter) -> torch.Tensor:
    """The result of a call of the second half."""
    group = groups.group_of_size(call.group_name, call.world_size)
    return serve(ScaledScatter(call, group))  # type: ignore[arg-type]


def _fake_scatter(call: Scatter) -> torch.Tensor:
    _check_scatter(call)
    shape = held_by_this_rank(call), call.weight.shape[2]
    return call.y.new_empty(shape, dtype=call.out_dtype)


_PUBLIC = {"scale_bs": "scale_b", "biases": "bias", "weight": "weights"}
"""The public names of arguments of the torch ops that have others."""


def _refuse_grad(call: Gather | Scatter) -> None:
    given: list[tuple[str, torch.Tensor | None]] = []
    for name, value in call._asdict().items():
        values = value if isinstance(value, list) else [value]
        tensors = [one for one in values if isinstance(one, torch.Tensor)]
        given += [(_PUBLIC.get(name, name), one) for one in tensors]
    check_no_backward(given, "the ops on fp8 rows of experts")


define(
    "_all_gather_scaled_grouped_matmul",
    Gather,
    "Tensor[]",
    run=run_gather,
    fake=_fake_gather,
    check_grad=_refuse_grad,
)
define(
    "_scaled_grouped_matmul_reduce_scatter",
    Scatter,
    "Tensor",
    run=run_scatter,
    fake=_fake_scatter,
    check_grad=_refuse_grad,
)
