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


_SHORTER = 128
"""The rows of those smaller tiles."""
_SMS = 132
"""The multiprocessors of a Hopper. Fewer tiles than these leave some of them idle."""
_MOST_FEW_ROWS = 64
"""The most rows an expert that are few. One tile of them reads an expert's matrix once, and reading
takes the time: 2 * 64 operations a byte of fp8 are less than the 200 and more at which a Hopper
multiplies no faster than it reads. On one H200 the fp8 kernel took 0.78 and 0.73 of the time of
`torch._scaled_grouped_mm` with 128 and 512 rows, in the geometric mean of six weights with 2, 32
and 64 experts; with 8,192 and 16,384 rows it took 1.20 and 1.16."""


def are_few(rows: int, experts: int) -> bool:
    """Whether so many rows are few for each expert, so that agmm's kernel multiplies those of fp8
    faster than torch's grouped matmul, which has whole sums in the tensor cores.

    Args:
        rows: the rows that there is room for, of which `chosen` says why they count.
    """
    return rows <= _MOST_FEW_ROWS * experts


@cache
def chosen(
    rows: int,
    n: int,
    k: int,
    experts: int,
    dtype: str,
    b_layout: str,
    epilogue: str = kernels.PLAIN,
) -> _core.KernelConfig | None:
    """The kernel of this build for a grouped matmul, or None.

    How many rows an expert has is known on the device alone. A tile of the mean number of rows, if
    all rows that there is room for are there, wastes little where experts are used alike.

    Args:
        rows: the rows that there is room for.
        n: the columns of the result.
        dtype: the name of a `_core.DType`.
        b_layout: "column" or "row", of every expert's matrix.
        epilogue: as `_core.KernelFacts.epilogue` names it.
    """
    accumulation = "block" if dtype.startswith("float8") else "fast"
    found = kernels.built(GROUPED, dtype, accumulation, epilogue=epilogue, b_layout=b_layout)
    if not found:
        return None
    heights = sorted({kernel.tile_m for kernel in found})
    height = next((one for one in heights if one >= rows / experts), heights[-1])
    weights = 2 if epilogue == "gate" else 1

    def tiles(kernel: _core.KernelConfig) -> int:
        of_experts = max(min(rows, experts), -(-rows // kernel.tile_m))
        return of_experts * -(-n * weights // kernel.tile_n)

    by_width = sorted(
        (kernel for kernel in found if kernel.tile_m == height), key=lambda kernel: -kernel.tile_n
    )
    kernel = next((one for one in by_width if tiles(one) >= _SMS), by_width[-1])
    shorter = [one for one in found if one.schedule == "pingpong" and one.tile_m == _SHORTER]
    if kernel.tile_m > _SHORTER and k < _LONG_K and shorter:
        return shorter[0]
    return kernel
