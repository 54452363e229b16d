"""The products that CPU ranks add up over the ranks, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from agmm.runtime.row_blocks import ROWS, RowBlocks
from agmm.runtime.scaled import FP8, Scaled, Weight, rounded_into

_SUM_DTYPES = dict.fromkeys((torch.bfloat16, torch.float16, *FP8), torch.float32)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of that dtype are added up."""
    return _SUM_DTYPES.get(dtype, dtype)


def add_up(parts: Sequence[torch.Tensor], divisor: int, total: torch.Tensor) -> None:
    """Writes the sum of the partial sums, added in their order and divided, to ``total``, of
    `sum_dtype`."""
    total.copy_(parts[0])  # not added to 0, so that -0 stays -0
    for part in parts[1:]:
        total.add_(part)
    if divisor != 1:
        total.div_(divisor)


class Summands:
    """Products of some rows, and their sums, in float32 at least.

    An instance takes all of its memory at once, so that it can fail before another rank takes part.
    Where it is ``invariant``, a row's product has the same bits whatever other rows there are.
    """

    def __init__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        most_rows: int,
        *,
        invariant: bool = False,
    ) -> None:
        dtype = sum_dtype(As[0].dtype)
        self._As: Sequence[Any] = As
        self._row_count = As[0].shape[0]
        # The copies have memory of their own, at addresses of one alignment, on which products may
        # depend.
        self._Bs = [B.to(dtype, copy=True) for B in Bs]
        at_once = ROWS if invariant else most_rows
        self._rows = [A.new_empty(at_once, A.shape[1], dtype=dtype) for A in As]
        self._product = As[0].new_empty(most_rows, Bs[0].shape[1], dtype=dtype)
        self._total = torch.empty_like(self._product)
        self._write: Callable[[slice, torch.Tensor], None] = self._multiply
        if invariant:
            self._write = RowBlocks(Bs[0].shape[1], self._product, self._multiply).write

    def product(self, rows: slice) -> torch.Tensor:
        """Return the sum over the pairs of ``A[rows] @ B``, not rounded; rows behind the last of A
        are zeros. It is valid until the next call."""
        product = self._product[: rows.stop - rows.start]
        self._write(rows, product)
        return product

    def _multiply(self, rows: slice, product: torch.Tensor) -> None:
        there = slice(rows.start, max(rows.start, min(rows.stop, self._row_count)))
        for i, (A, B, copy) in enumerate(zip(self._As, self._Bs, self._rows, strict=True)):
            a = copy[: len(product)]
            self._load(A, there, a[: there.stop - there.start])
            a[there.stop - there.start :].zero_()
            # The product goes into given memory, since autocast leaves such calls alone.
            if i == 0:
                torch.mm(a, B, out=product)
            else:
                torch.addmm(product, a, B, out=product)

    def _load(self, A: Any, rows: slice, into: torch.Tensor) -> None:
        into.copy_(A[rows])

    def sum(
        self,
        product: torch.Tensor,
        parts: Sequence[torch.Tensor],
        rank: int,
        divisor: int,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Writes the sum over the ranks to ``out``, rounded once: the partial sums in the order of
        the ranks, with ``product`` as that of ``rank``, divided, the bias and the residual, whose
        rows may be fewer."""
        total = self._total[: product.shape[0]]
        add_up([*parts[:rank], product, *parts[rank:]], divisor, total)
        if bias is not None:
            total.add_(bias)
        if residual is not None:
            total[: len(residual)].add_(residual)
        self._round(total, out)

    def _round(self, total: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(total)


class ScaledSummands(Summands):
    """The products of fp8 operands, dequantised."""

    def __init__(
        self,
        products: Sequence[tuple[Scaled, Weight]],
        bias_of_each: torch.Tensor | None,
        most_rows: int,
    ) -> None:
        As, weights = zip(*products, strict=True)
        super().__init__([A.values for A in As], [w.B.values for w in weights], most_rows)
        for B, weight in zip(self._Bs, weights, strict=True):
            B.mul_(weight.B.spread())
        self._As, self._bias_of_each = As, bias_of_each
        self._result_scale = weights[0].result_scale

    def _load(self, A: Scaled, rows: slice, into: torch.Tensor) -> None:
        A.rows(rows).dequantised(into)

    def product(self, rows: slice) -> torch.Tensor:
        product = super().product(rows)
        return product if self._bias_of_each is None else product.add_(self._bias_of_each)

    def _round(self, total: torch.Tensor, out: torch.Tensor) -> None:
        rounded_into(out, total, self._result_scale)
