"""Which kernel multiplies rows that are grouped by expert. Needs no GPU and no torch."""

from __future__ import annotations

from functools import cache

from agmm import _core
from agmm.planning.kernel_table import GROUPED
from agmm.runtime import kernels

_LONG_K = 2048
"""The K from which a kernel that stores its tiles while it multiplies nothing loses less by that
than smaller tiles do by their loads: a tile of 256 x 128 takes 0.58 us for 64 of K, and its store
about 1 us. A choice, not measured."""


@cache
def chosen(
    rows: int, experts: int, k: int, dtype: str, b_layout: str, epilogue: str = kernels.PLAIN
) -> _core.KernelConfig | None:
    """The kernel of this build for a grouped matmul, or None.

    How many rows an expert has is known on the device alone. A tile of the mean number of rows, if
    all rows that there is room for are there, wastes little where experts are used alike.

    Args:
        rows: the rows that there is room for.
        dtype: the name of a `_core.DType`.
        b_layout: "column" or "row", of every expert's matrix.
        epilogue: as `_core.KernelFacts.epilogue` names it.
    """
    found = kernels.built(GROUPED, dtype, epilogue=epilogue, b_layout=b_layout)
    if not found:
        return None
    by_height = sorted(found, key=lambda kernel: kernel.tile_m)
    mean = rows / experts
    large = [kernel for kernel in by_height if kernel.tile_m >= mean] or by_height[-1:]
    kernel = large[0]
    ahead = [other for other in by_height if other.schedule == "pingpong"]
    if kernel.schedule == "cooperative" and kernel is by_height[-1] and k < _LONG_K and ahead:
        return ahead[-1]
    return kernel
