"""The sizes of a product, as commands name them."""

from __future__ import annotations

import re
from typing import NamedTuple

from agmm.errors import InvalidArgument

MAX_EXTENT = 2**31 - 1
"""The largest M, N and K: the kernels count in 32 bits."""


class Shape(NamedTuple):
    """One gathered problem, `[M, K] @ [K, N]`: M counts the rows of all ranks, N is per rank."""

    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads 'MxNxK', e.g. '4096x3584x8192'. Raises InvalidArgument for anything else."""
        parts = text.strip().lower().replace("×", "x").split("x")
        if len(parts) != 3 or not all(re.fullmatch(r" *0*[1-9][0-9]* *", p) for p in parts):
            raise InvalidArgument(f"shape: found {text!r}, wanted MxNxK, e.g. 4096x3584x8192")
        if any(len(p.strip(" 0")) > len(str(MAX_EXTENT)) or int(p) > MAX_EXTENT for p in parts):
            raise InvalidArgument(f"shape: found {text!r}, wanted extents up to {MAX_EXTENT}")
        return cls(*(int(part) for part in parts))

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's product."""
        return 2 * self.M * self.N * self.K


class LocalShape(NamedTuple):
    """One problem as a rank sees it: M_local rows per rank."""

    M_local: int
    N: int
    K: int

    def gathered(self, world_size: int) -> Shape:
        """The gathered problem of `world_size` ranks."""
        return Shape(self.M_local * world_size, self.N, self.K)
