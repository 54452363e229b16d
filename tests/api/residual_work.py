"""Sums over the ranks with a residual, inside the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

import agmm


def errors(dtype: torch.dtype, rows: int, *, all_reduce: bool, dim: int = 0) -> tuple[float, float]:
    """The error of a sum with its residual, as a multiple of one rounding of each number, and that
    of the residual added behind the rounded sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    A, B = (torch.randn(shape, generator=generator) for shape in ((rows, 6, 16), (16, 24)))
    A, B = A.to(dtype), B.to(dtype)
    total = A.double() @ B.double()
    dist.all_reduce(total)
    of_all = torch.Generator().manual_seed(99)
    whole = 4 * torch.randn(rows, 6, 24, generator=of_all).to(dtype)
    part = whole if all_reduce else whole.chunk(size, dim)[rank]
    exact = total if all_reduce else total.chunk(size, dim)[rank]
    exact = exact + part.double()
    if all_reduce:
        found = agmm.matmul_all_reduce(A, B, residual=part, strict=True)
        behind = agmm.matmul_all_reduce(A, B) + part
    else:
        found = agmm.matmul_reduce_scatter(A, B, scatter_dim=dim, residual=part, strict=True)
        behind = agmm.matmul_reduce_scatter(A, B, scatter_dim=dim) + part
    assert found.dtype == dtype and found.shape == exact.shape
    unit = exact.norm() * torch.finfo(dtype).eps / 2
    return ((found.double() - exact).norm() / unit).item(), (
        (behind.double() - exact).norm() / unit
    ).item()
