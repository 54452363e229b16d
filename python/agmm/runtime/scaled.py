"""Fp8 operands with their scales, and the products of them: dequantised, multiplied in float32,
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
    """The fp8 numbers, [rows, columns], or [experts, rows, columns]."""
    scale: torch.Tensor
    """The scales, float32 in the shape `scaling.scale_shape` of the values: what a value is to be
    multiplied with."""
    tile: Tile

    def rows(self, rows: slice) -> Scaled:
        """The rows of a matrix in this slice, whose step is 1. The tiles have one row or all."""
        scale = self.scale if self.tile[0] == ALL else self.scale[rows]
        return self._replace(values=self.values[rows], scale=scale)

    def dequantised(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The dequantised values in float32, in memory of their own; or in ``out``, rounded to its
        dtype."""
        if out is None:
            out = torch.empty_like(self.values, dtype=torch.float32)
        return out.copy_(self.values).mul_(self.spread())

    def spread(self) -> torch.Tensor:
        """The scales spread to as many as there are values, or to one along a dimension that one
        scale covers."""
        scale = self.scale
        for dim, size_of_tile in zip((-2, -1), self.tile, strict=True):
            if size_of_tile not in (ALL, 1):
                # The tiles are searched for, not divided: Inductor (torch 2.13, CPU) splits a loop
                # where an index has a division, and leaves out the rows behind the last whole tile.
                at = torch.arange(self.values.shape[dim], device=scale.device)
                ends = torch.arange(1, scale.shape[dim], device=scale.device) * size_of_tile
                scale = scale.index_select(dim, torch.bucketize(at, ends, right=True))
        return scale


class Weight(NamedTuple):
    """A weight that A is multiplied with, and what is done with the product."""

    B: Scaled
    bias: torch.Tensor | None
    """The bias [N], in bf16, fp16 or float32."""
    result_scale: torch.Tensor | None
    """The scale of an fp8 result, one float32: what it is multiplied with before it is rounded."""
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
    """Write ``total`` [M, N] in float32, which is overwritten, times the result's scale, to ``out``
    in its dtype. What fp8 cannot hold becomes its largest number, not infinite."""
    if result_scale is not None:
        total.mul_(result_scale.reshape(()))
    if out.dtype in FP8:
        largest = torch.finfo(out.dtype).max
        total.clamp_(-largest, largest)
    return out.copy_(total)


def sum_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``a @ b``, both dequantised, with the bias: in float32, not rounded."""
    total = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    torch.mm(a, b, out=total)  # into given memory, which autocast leaves alone
    return total if bias is None else total.add_(bias)


def multiply(a: torch.Tensor, b: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write ``a @ b``, both dequantised, with bias and result scale of the weight, to ``out`` [M,
    N]."""
    return rounded_into(out, sum_of(a, b, weight.bias), weight.result_scale)
