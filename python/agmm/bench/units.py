"""Writes times and sizes in the unit in which they can be read."""

from __future__ import annotations

_DURATIONS = ((1e4, 1.0, "µs"), (1e7, 1e3, "ms"), (6e8, 1e6, "s"), (3.6e11, 3.6e9, "h"))
"""Durations below the first number of µs are divided by the second and get this unit."""
_US_PER_DAY = 86400e6


def duration(us: float) -> str:
    """Write a time in the unit in which it can be read: "323.8 µs", "17.1 ms", "4.0 days"."""
    for limit, unit_us, unit in _DURATIONS:
        if us < limit:
            return f"{us / unit_us:.1f} {unit}"
    days = us / _US_PER_DAY
    return f"{days:.1f} days" if days < 1000 else f"{days / 365:.3g} years"


def size(count: float) -> str:
    """Write a number of bytes in the unit in which it can be read: "512 bytes", "1.8 TiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(count).bit_length() - 1) // 10)
    number = count / 1024**power
    return f"{number:.0f} {units[power]}" if number >= 100 else f"{number:.3g} {units[power]}"
