"""The kinds of scales that fp8 operands have: what a scale covers, which shapes follow from that,
and which go together. Knows no torch, so that plans may use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALL = 0
"""Stands for a number of rows or columns: as many as there are."""

BLOCK = 128  # that of DeepSeek-V3, DeepGEMM and `torch._scaled_mm`

Tile = tuple[int, int]
"""How many rows and columns of an operand one scale covers, `ALL` or a number."""


class Scaling(NamedTuple):
    """Scales of A [M, K] and of B [K, N] that go together."""

    name: str
    a: Tile
    b: Tile


SCALINGS = (
    Scaling("tensorwise", (ALL, ALL), (ALL, ALL)),
    Scaling("rowwise", (1, ALL), (ALL, 1)),
    Scaling("block", (1, BLOCK), (BLOCK, BLOCK)),
    Scaling("block 1x128", (1, BLOCK), (BLOCK, 1)),
)
"""The kinds in the order in which they are tried: a shape that fits several of them, such as that
of an operand with one row, means the same in all."""

BY_NAME = {scaling.name: scaling for scaling in SCALINGS}

OF_EXPERTS = BY_NAME["rowwise"], BY_NAME["block"]
"""The kinds of scales that the experts of a mixture may have."""

K_MULTIPLE = 16
"""K is a multiple of this: bytes that Hopper's copies and `torch._scaled_mm` want."""


def scale_shape(shape: Sequence[int], tile: Tile) -> tuple[int, ...]:
    """The scales of an operand [..., rows, columns]: one for each tile, also for one cut short."""
    cells = (
        1 if size_of_tile == ALL else -(-size // size_of_tile)
        for size, size_of_tile in zip(shape[-2:], tile, strict=True)
    )
    return *shape[:-2], *cells
