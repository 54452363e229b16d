"""The sizes of a product, as commands name them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from agmm.errors import InvalidArgument

MAX_EXTENT = 2**31 - 1
"""The largest M, N and K: the kernels count in 32 bits."""


def _extents(text: str, names: str, example: str) -> list[int]:
    """Reads extents with an x between them.

    Raises InvalidArgument for anything else; the message has the names and an example.
    """
    parts = text.strip().lower().replace("×", "x").split("x")
    is_right = len(parts) == len(names.split("x"))
    if not is_right or not all(re.fullmatch(r" *0*[1-9][0-9]* *", part) for part in parts):
        raise InvalidArgument(f"shape: found {text!r}, wanted {names}, e.g. {example}")
    if any(len(p.strip(" 0")) > len(str(MAX_EXTENT)) or int(p) > MAX_EXTENT for p in parts):
        raise InvalidArgument(f"shape: found {text!r}, wanted extents up to {MAX_EXTENT}")
    return [int(part) for part in parts]


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
        return cls(*_extents(text, "MxNxK", "4096x3584x8192"))

    @property
    def title(self) -> str:
        return f"M x N x K = {self.M} x {self.N} x {self.K}"

    def flops(self, world_size: int) -> int:
        """Floating-point operations of one rank's product."""
        return 2 * self.M * self.N * self.K

    def elements(self, world_size: int) -> int:
        """The elements of one rank's operands and product."""
        return self.M * self.K + self.N * self.K + self.M * self.N


ROUTINGS = ("even", "zipf")
"""How a benchmark's router spreads tokens: every expert alike, or the i-th most wanted of them with
a weight of 1 / i."""


class MoEShape(NamedTuple):
    """A mixture of gated experts: the tokens and experts of all ranks, k experts for each token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    k: int
    routing: str = "even"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self[:5]))}-{self.routing}"

    @classmethod
    def parse(cls, text: str, routing: str) -> MoEShape:
        """Reads 'TOKENSxHIDDENxINNERxEXPERTSxK'. Raises InvalidArgument for anything else, and for
        more choices than experts."""
        names = "TOKENSxHIDDENxINNERxEXPERTSxK"
        tokens, hidden, inner, experts, k = _extents(text, names, "8192x4096x14336x8x2")
        found = cls(tokens, hidden, inner, experts, k, routing)
        if found.k > found.experts:
            raise InvalidArgument(f"shape: found {text!r}, wanted no more choices than experts")
        return found

    @property
    def M(self) -> int:
        """The rows of all ranks."""
        return self.tokens

    @property
    def title(self) -> str:
        sizes = " x ".join(map(str, self[:5]))
        return f"tokens x hidden x inner x experts x k = {sizes}, {self.routing} routing"

    def flops(self, world_size: int) -> int:
        """Floating-point operations of a rank's products, in the mean of the ranks."""
        return 6 * self.tokens * self.k * self.hidden * self.inner // world_size

    def elements(self, world_size: int) -> int:
        """The elements of one rank's weights and of the rows that it multiplies, in the mean."""
        weights = 3 * self.experts * self.hidden * self.inner // world_size
        rows = self.tokens * self.k * (2 * self.hidden + 3 * self.inner) // world_size
        return weights + rows + 2 * self.tokens * self.hidden


class TensorShape(NamedTuple):
    """What a collective gathers, scatters or sums: the rows of all ranks, and columns."""

    M: int
    K: int

    def __str__(self) -> str:
        return f"{self.M}x{self.K}"

    @classmethod
    def parse(cls, text: str) -> TensorShape:
        """Reads 'MxK', e.g. '64x8192'. Raises InvalidArgument for anything else."""
        return cls(*_extents(text, "MxK", "64x8192"))

    @property
    def title(self) -> str:
        return f"M x K = {self.M} x {self.K}"

    def flops(self, world_size: int) -> int:
        """No floating-point operations: a collective has no product."""
        return 0

    def elements(self, world_size: int) -> int:
        """The elements that a rank holds: what it gives and gets, a residual, and references."""
        return 4 * self.M * self.K


AnyShape = Shape | MoEShape | TensorShape


def shape_from(fields: dict[str, Any]) -> AnyShape:
    """The shape with these fields, as ``_asdict`` gives them, among others."""
    for kind in (MoEShape, Shape, TensorShape):
        if fields.keys() >= set(kind._fields):
            return kind(**{name: fields[name] for name in kind._fields})
    raise ValueError(f"fields: found {', '.join(fields)}, wanted those of a shape")


class LocalShape(NamedTuple):
    """One problem as a rank sees it: M_local rows per rank."""

    M_local: int
    N: int
    K: int

    def gathered(self, world_size: int) -> Shape:
        """The gathered problem of `world_size` ranks."""
        return Shape(self.M_local * world_size, self.N, self.K)
