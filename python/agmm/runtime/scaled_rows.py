"""Rows of fp8 numbers with their scales as rows of bytes, in which they travel to where they are
multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch

from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import Tile

_SCALE_BYTES = 4  # of float32
_ALIGNMENT = 16
"""The bytes at multiples of which the tensor memory accelerator wants rows to begin
(`cuda_calls.TMA_ALIGNMENT`)."""


class RowBytes(NamedTuple):
    """Where the numbers and the scales of a row lie in its bytes: the scales behind the numbers,
    filled up so that every row begins where GPUs can load it."""

    k: int
    """How many numbers a row has, a multiple of 16."""
    scales: int
    """How many scales a row has."""
    dtype: torch.dtype
    tile: Tile

    @classmethod
    def of(cls, rows: Scaled) -> RowBytes:
        """The layout of rows that have scales of their own."""
        return cls(rows.values.shape[1], rows.scale.shape[1], rows.values.dtype, rows.tile)

    @property
    def length(self) -> int:
        """The bytes of a row."""
        return self.k + -(-self.scales * _SCALE_BYTES // _ALIGNMENT) * _ALIGNMENT

    def pack(self, rows: Scaled) -> torch.Tensor:
        """The rows as uint8 [rows, length], in memory of their own."""
        found = torch.zeros(
            *(len(rows.values), self.length), dtype=torch.uint8, device=rows.values.device
        )
        found[:, : self.k] = rows.values.view(torch.uint8)
        self._scale(found).copy_(rows.scale)
        return found

    def unpack(self, found: torch.Tensor) -> Scaled:
        """The rows of uint8 [rows, length], in the same memory."""
        return Scaled(found[:, : self.k].view(self.dtype), self._scale(found), self.tile)

    def _scale(self, found: torch.Tensor) -> torch.Tensor:
        return found[:, self.k : self.k + self.scales * _SCALE_BYTES].view(torch.float32)
