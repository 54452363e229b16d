"""The product of a low-rank adapter, ``b(a(x))``, beside a linear that ranks share.

Beside one that is shared by columns, ``a`` is whole on every rank and ``b`` is cut like the linear;
beside one that is shared by rows ``a`` is cut along its input, and ``b`` is whole. What crosses the
ranks has the adapter's rank as its number of features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from agmm.nn._column_product import column_product
from agmm.nn._ranks import Ranks
from agmm.nn._summed_gradients import with_summed_gradients
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter


class LowRank(NamedTuple):
    """This rank's parts of an adapter.

    Attributes:
        a: [rank, K].
        b: [N, rank].
        bias: [N] or None.
        prepared: what becomes of an input before ``a``: dropout, another dtype.
        ranks: that share the linear.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    prepared: Callable[[torch.Tensor], torch.Tensor]
    ranks: Ranks

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """By columns, from this rank's rows, which lie along dimension 0: all rows."""
        (a,) = with_summed_gradients([self.a], self.ranks)
        low = linear(self.prepared(rows), a).contiguous()
        return all_gather_matmul(low, self.b.t(), self.ranks.for_ops, bias=self.bias)

    def of_all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """By columns, from what is the same on all ranks."""
        low = linear(self.prepared(x), self.a)
        return column_product(low, self.b, self.bias, self.ranks.for_ops)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """By rows, from this rank's features of all rows: this rank's rows, along dimension 0."""
        low = matmul_reduce_scatter(self.prepared(x), self.a.t(), self.ranks.for_ops)
        if self.bias is None:
            (b,) = with_summed_gradients([self.b], self.ranks)
            return linear(low, b)
        return linear(low, *with_summed_gradients([self.b, self.bias], self.ranks))

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """By rows, from this rank's features of all rows: all rows, on every rank."""
        low = matmul_all_reduce(self.prepared(x), self.a.t(), self.ranks.for_ops)
        return linear(low, self.b, self.bias)
