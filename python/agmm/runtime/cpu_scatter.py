"""The arithmetic of sums over the ranks on the CPU: products by torch, sums in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from agmm.runtime.scaled import FP8, Scaled, Weight, rounded_into

_SUM_DTYPES = dict.fromkeys((torch.bfloat16, torch.float16, *FP8), torch.float32)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of that type are added up."""
    return _SUM_DTYPES.get(dtype, dtype)


def add_up(parts: Sequence[torch.Tensor], divisor: int, total: torch.Tensor) -> None:
    """Into ``total``, of `sum_dtype`: the parts in their order, divided."""
    total.copy_(parts[0])  # not added to 0, so that -0 stays -0
    for part in parts[1:]:
        total.add_(part)
    if divisor != 1:
        total.div_(divisor)


class Summands:
    """Products of some rows, and their sums, in float32 at least.

    Takes all of its memory at once, so that it can fail before another rank takes part.
    """

    def __init__(
        self, As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], most_rows: int
    ) -> None:
        dtype = sum_dtype(As[0].dtype)
        self._As = As
        # In memory of their own, at addresses of one alignment, on which products may depend.
        self._Bs = [B.to(dtype, copy=True) for B in Bs]
        self._rows = [A.new_empty(most_rows, A.shape[1], dtype=dtype) for A in As]
        self._product = As[0].new_empty(most_rows, Bs[0].shape[1], dtype=dtype)
        self._total = torch.empty_like(self._product)

    def product(self, rows: slice) -> torch.Tensor:
        """The sum over the pairs of ``A[rows] @ B``, not rounded. Valid until the next one."""
        product = self._product[: rows.stop - rows.start]
        for i, (A, B, copy) in enumerate(zip(self._As, self._Bs, self._rows, strict=True)):
            a = self._load(A, rows, copy[: len(product)])
            # Into given memory, which autocast leaves alone.
            if i == 0:
                torch.mm(a, B, out=product)
            else:
                torch.addmm(product, a, B, out=product)
        return product

    def _load(self, A: torch.Tensor, rows: slice, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(A[rows])

    def sum(
        self,
        product: torch.Tensor,
        parts: Sequence[torch.Tensor],
        rank: int,
        divisor: int,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Into ``out``, rounded once: the parts in the order of the ranks, with ``product`` as that
        of ``rank``, divided, and the bias."""
        total = self._total[: product.shape[0]]
        add_up([*parts[:rank], product, *parts[rank:]], divisor, total)
        if bias is not None:
            total.add_(bias)
        self._round(total, out)

    def _round(self, total: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(total)


class ScaledSummands(Summands):
    """The product of fp8 operands."""

    def __init__(
        self, A: Scaled, weight: Weight, bias_of_each: torch.Tensor | None, most_rows: int
    ) -> None:
        super().__init__([A.values], [weight.B.values], most_rows)
        self._Bs[0].mul_(weight.B.spread())
        self._A, self._weight, self._bias_of_each = A, weight, bias_of_each

    def _load(self, A: torch.Tensor, rows: slice, into: torch.Tensor) -> torch.Tensor:
        return self._A.rows(rows).dequantised(into)

    def product(self, rows: slice) -> torch.Tensor:
        product = super().product(rows)
        return product if self._bias_of_each is None else product.add_(self._bias_of_each)

    def _round(self, total: torch.Tensor, out: torch.Tensor) -> None:
        rounded_into(out, total, self._weight.result_scale)


class Sum(NamedTuple):
    """What is summed over the ranks, and how it is sent and returned."""

    rows: int
    columns: int
    sent_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: torch.Tensor | None
    """[N]; added once."""
    summands: Callable[[int], Summands]
    """Makes this rank's, of at most so many rows at a time."""


def plain_sum(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], bias: torch.Tensor | None
) -> Sum:
    """Of ``sum(A @ B)``."""
    A = As[0]
    return Sum(
        A.shape[0],
        Bs[0].shape[1],
        A.dtype,
        A.dtype,
        bias,
        lambda most_rows: Summands(As, Bs, most_rows),
    )


def scaled_sum(A: Scaled, weight: Weight, *, is_bias_of_each: bool = False) -> Sum:
    """Of ``A @ B``, both dequantised.

    Args:
        is_bias_of_each: the weight's bias is this rank's own, a part of its product.
    """
    out_dtype = weight.out_dtype
    sent_dtype = torch.bfloat16 if out_dtype in FP8 else out_dtype
    of_each, of_all = (weight.bias, None) if is_bias_of_each else (None, weight.bias)
    return Sum(
        A.values.shape[0],
        weight.B.values.shape[1],
        sent_dtype,
        out_dtype,
        of_all,
        lambda most_rows: ScaledSummands(A, weight, of_each, most_rows),
    )
