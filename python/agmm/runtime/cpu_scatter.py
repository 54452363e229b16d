"""The arithmetic of sums over the ranks on the CPU: products by torch, sums in one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SUM_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


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
            a = copy[: len(product)].copy_(A[rows])
            # Into given memory, which autocast leaves alone.
            if i == 0:
                torch.mm(a, B, out=product)
            else:
                torch.addmm(product, a, B, out=product)
        return product

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
        out.copy_(total)
