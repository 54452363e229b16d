"""Sums of several products, where no kernel computes them in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_of_products(
    total: torch.Tensor | None, As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """``total + A @ B + ...`` in one tensor of that size, to which each matmul adds its own: in
    the precision of its accumulators, and without a tensor for each product and each sum."""
    given = total
    for A, B in zip(As, Bs, strict=True):
        if total is None:
            total = torch.matmul(A, B)
            continue
        rows, rest = total.flatten(0, -2), A.flatten(0, -2)
        if total is given:  # which is the caller's
            total = torch.addmm(rows, rest, B).view(total.shape)
        else:
            # The total is contiguous, so that the rows are a view of it. Counters of FLOPs know no
            # addmm_.
            torch.addmm(rows, rest, B, out=rows)
    return total


def joined(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of several products as one, ``[A1|A2] @ [B1; B2]``, of copies."""
    return torch.cat(list(As), dim=-1), torch.cat(list(Bs))
