"""The formats of operands, as plans see them. This is the one place where planning tells formats
apart. It needs no GPU and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from agmm import _core

BITS_16, FP8, OTHER = "16 bits", "fp8", "other"
"""The values of `Format.kind`. Formats of one kind share constants, legal transports and usual
orders."""

_SCALE_BYTES = 4  # float32
_BLOCK = 128
"""The number of columns of A that share a block scale."""


@dataclass(frozen=True)
class Format:
    """A kind of operands.

    ``name`` is what `Problem.format` says: the name of a dtype, such as ``"bfloat16"``, or for fp8
    operands on a GPU the names of both dtypes and of the `_core.Accumulation` which their scales
    want, ``"float8_e4m3fn_float8_e4m3fn fast"``. ``operands`` is the name without the
    accumulation, which is empty where there is none.
    """

    name: str
    kind: str
    operands: str
    accumulation: str = ""
    element_bytes: int = 2
    """The size of an element of A or B."""
    k_multiple: int = _core.ALIGNMENT
    """K is a multiple of this: 16 bytes, as TMA wants them."""
    columns_of_a_scale: int | None = None
    """How many columns of A share a scale, 0 for a whole row; None where A has no scales."""

    @property
    def has_kernels(self) -> bool:
        """Whether any build has kernels for it, and the cost model constants."""
        return self.kind != OTHER

    def value_bytes(self, k: int) -> int:
        """The size of K columns of a row of A."""
        return k * self.element_bytes

    def scale_bytes(self, k: int) -> int:
        """The size of the scales of K columns of a row of A."""
        if self.columns_of_a_scale is None:
            return 0
        scales = -(-k // self.columns_of_a_scale) if self.columns_of_a_scale else 1
        return scales * _SCALE_BYTES

    def gathers(self, k: int) -> tuple[int, ...]:
        """What of a row the library gathers by a call of its own: the size of its values, and of
        its scales where A has some."""
        values, scales = self.value_bytes(k), self.scale_bytes(k)
        return (values, scales) if scales else (values,)

    def row_bytes(self, k: int) -> int:
        """The size of K columns of a row of A, with their scales."""
        return self.value_bytes(k) + self.scale_bytes(k)


@lru_cache(maxsize=256)
def of(name: str) -> Format:
    """The format of a `Problem.format`; formats without kernels are of the kind `OTHER`."""
    operands, _, accumulation = name.partition(" ")
    if operands not in _core.DType.__members__:
        return Format(name, OTHER, operands, accumulation)
    if not operands.startswith("float8"):
        return Format(name, BITS_16, operands)
    if accumulation not in _core.Accumulation.__members__:
        return Format(name, OTHER, operands, accumulation)
    columns = _BLOCK if accumulation.startswith("block") else 0
    return Format(name, FP8, operands, accumulation, 1, _core.FP8_ALIGNMENT, columns)


def fp8_name(operands: str, accumulation: str) -> str:
    """The name of a format, from those of a `_core.DType` and of a `_core.Accumulation`."""
    return f"{operands} {accumulation}"
