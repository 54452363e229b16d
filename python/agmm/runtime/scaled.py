"""Fp8 operands with their scales, and what their products are: dequantised, multiplied in float32,
rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm.runtime.scaling import ALL, Tile

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Scaled(NamedTuple):
    """An fp8 operand."""

    values: torch.Tensor
    """[rows, columns]"""
    scale: torch.Tensor
    """Float32, `scaling.scale_shape` of the values: what a value is to be multiplied with."""
    tile: Tile

    def rows(self, rows: slice) -> Scaled:
        """Those with steps of 1. The tiles have one row or all."""
        scale = self.scale if self.tile[0] == ALL else self.scale[rows]
        return self._replace(values=self.values[rows], scale=scale)

    def dequantised(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """In float32, in memory of its own or in ``out``."""
        if out is None:
            out = torch.empty_like(self.values, dtype=torch.float32)
        return out.copy_(self.values).mul_(self.spread())

    def spread(self) -> torch.Tensor:
        """The scales, as many as there are values, or one where it counts for a whole dimension."""
        scale = self.scale
        for dim, size_of_tile in enumerate(self.tile):
            if size_of_tile not in (ALL, 1):
                # Searched for, not divided: Inductor (torch 2.13, CPU) splits a loop where an index
                # has a division, and leaves out the rows behind the last whole tile.
                at = torch.arange(self.values.shape[dim], device=scale.device)
                ends = torch.arange(1, scale.shape[dim], device=scale.device) * size_of_tile
                scale = scale.index_select(dim, torch.bucketize(at, ends, right=True))
        return scale


class Weight(NamedTuple):
    """What A is multiplied with, and what becomes of the product."""

    B: Scaled
    bias: torch.Tensor | None
    """[N], bf16, fp16 or float32"""
    result_scale: torch.Tensor | None
    """One float32, for an fp8 result: what it is multiplied with before it is rounded."""
    out_dtype: torch.dtype
    fast_accum: bool


class ScaledProducts(NamedTuple):
    """A sum of products of fp8 operands, by the names of the ops' arguments."""

    As: Sequence[torch.Tensor]
    """[M, ..., K] each, of one shape but for K."""
    Bs: Sequence[torch.Tensor]
    """[K, N], one for each A."""
    scale_as: Sequence[torch.Tensor]
    scale_bs: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    """[N], added once, to the sum."""
    result_scale: torch.Tensor | None
    out_dtype: torch.dtype
    fast_accum: bool


def rounded_into(
    out: torch.Tensor, total: torch.Tensor, result_scale: torch.Tensor | None
) -> torch.Tensor:
    """``total`` [M, N] in float32, which is overwritten, times the result's scale, in the dtype of
    ``out``. What fp8 cannot hold becomes its largest number, not infinite."""
    if result_scale is not None:
        total.mul_(result_scale.reshape(()))
    if out.dtype in FP8:
        largest = torch.finfo(out.dtype).max
        total.clamp_(-largest, largest)
    return out.copy_(total)


def multiply(a: torch.Tensor, b: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """``a @ b``, both dequantised, and all else that the weight wants, into ``out`` [M, N]."""
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    torch.mm(a, b, out=total)  # into given memory, which autocast leaves alone
    if weight.bias is not None:
        total.add_(weight.bias)
    return rounded_into(out, total, weight.result_scale)
