"""The cost of the library's matmul: tiles of the sizes that it has, the fastest of them."""

from __future__ import annotations

from math import inf

from agmm.planning.cost_model.gpu_constants import Constants

SPLITS = (2, 4, 8)
"""The numbers of splits of K that are looked at. It is a choice: with others between them the fit
is no closer."""
_LEAST_K = 256
"""The fewest columns of A of a split. It is a choice: less is mostly latency."""


def is_badly_chosen(rows: int) -> bool:
    """Whether the library may choose a kernel that takes up to twice as long as others of its own.

    cuBLAS did so of 729 products on H200 with 320 and 448 rows of A, where B does not fit into the
    L2 cache: in the mean they take 1.2 of what is predicted, at most 1.9, and those of 384, 352 or
    422 rows 0.97.
    """
    return 256 < rows < 512 and rows % 128 == 64


def tiled_us(c: Constants, size: tuple[int, int, int], element_bytes: float) -> float:
    """The time of the tiles of a product of ``size`` (M, N and K), without its launch and its
    memory traffic.

    A tile takes the longer time of its arithmetic and of the loads of one multiprocessor, and
    waves are partly smoothed, since the library also has kernels that share tiles out evenly. It
    is taken to choose the fastest of its tiles, which for some numbers of rows it does not:
    `benchmarks/fit_library.py` says for which.
    """
    m, n, k = size
    of, sms = c.library, c.sm_count
    tile_us, smooth, gain = of["tile_us"], of["smoothing"], of["idle_gain"]
    split_us, each_us = of["split_us"], of["each_split_us"]
    rates = c.library_rates.get(element_bytes)
    if rates is None:
        rates = c.library_rates[element_bytes] = _rates(c, element_bytes)
    best = inf
    for rows, columns, us_per_k in rates:
        whole_us = k * us_per_k
        tiles = -(-m // rows) * -(-n // columns)
        if tiles >= sms:
            waves = -(-tiles // sms) * (1 - smooth) + tiles / sms * smooth
            us = (waves if waves > 1.0 else 1.0) * (whole_us + tile_us)
            best = us if us < best else best
            continue
        us = whole_us * (1 - gain * (1 - tiles / sms)) + tile_us
        best = us if us < best else best
        for splits in SPLITS:
            if tiles * splits > sms or k < splits * _LEAST_K:
                break
            part_us = whole_us / splits * (1 - gain * (1 - tiles * splits / sms))
            us = part_us + tile_us + split_us + splits * each_us
            best = us if us < best else best
    return best


def _rates(c: Constants, element_bytes: float) -> list[tuple[int, int, float]]:
    """The rows and columns of the library's tiles, and the time of each for one column of A."""
    of = c.library
    rate, loads, sharp = of["tflops_per_sm"] * 1e6, of["gb_per_s_and_sm"] * 1e3, of["sharpness"]
    found = []
    for rows, columns in c.library_tiles:
        arithmetic_us = 2 * rows * columns / rate
        loads_us = (rows + columns) * element_bytes / loads
        us_per_k = (arithmetic_us**sharp + loads_us**sharp) ** (1 / sharp)
        found.append((rows, columns, us_per_k))
    return found
