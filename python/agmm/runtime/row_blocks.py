"""Products of rows in blocks of one shape. A library chooses the order of its sums by the shape of
a product, so a row's bits then do not depend on how many other rows there are."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS = 32
"""The rows of a block. On one core of an EPYC, with a weight of 4096 x 2048 in float32, MKL takes
1.5 ms for one row alone, and 4.8, 6.0, 8.6 and 14 in blocks of 8, 16, 32 and 64. For 512 rows it
takes 88, and in such blocks 304, 200, 145 and 116."""

Multiply = Callable[[slice, torch.Tensor], None]
"""A function that writes the products of some rows, to a matrix of as many rows; rows behind the
last one are zeros."""


class RowBlocks:
    """Computes the products of any rows. Block i has the rows from ``i * ROWS`` on, wherever the
    rows begin that are asked for, so that a row has the same place in the same block.

    Args:
        columns: those of the product.
        like: a tensor of the dtype in which it is computed.
        multiply: is called with one block at a time, the matrix at one address.
    """

    def __init__(self, columns: int, like: torch.Tensor, multiply: Multiply) -> None:
        self._found = like.new_empty(ROWS, columns)
        self._multiply = multiply
        self._first = -1

    def write(self, rows: slice, into: torch.Tensor) -> None:
        """Write the products of these rows. The last block that was computed is there still."""
        for first in range(rows.start // ROWS * ROWS, rows.stop, ROWS):
            if first != self._first:
                self._multiply(slice(first, first + ROWS), self._found)
                self._first = first
            begin, end = max(first, rows.start), min(first + ROWS, rows.stop)
            into[begin - rows.start : end - rows.start] = self._found[begin - first : end - first]
