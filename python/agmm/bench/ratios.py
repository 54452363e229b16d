"""How ways compare over all shapes of a report: the geometric mean of the ratios of their times,
and the worst one."""

from __future__ import annotations

from math import exp, log
from typing import Any, NamedTuple

from agmm.bench.reports import shape_of
from agmm.bench.way import ROOF
from agmm.bench.ways import ways_of


class Ratio(NamedTuple):
    """The times of a way over those of another, over the shapes that both have."""

    way: str
    other: str
    shapes: int
    mean: float
    """The geometric mean."""
    worst: float
    worst_shape: str


def ratios(report: dict[str, Any], op: str) -> list[Ratio]:
    """Each way of agmm over each way of others, where both were timed with the same shapes. One
    that was captured is compared with others that were, where there are such."""
    ways = ways_of(op)
    names = list(dict.fromkeys(name for entry in report["shapes"] for name in entry["ways"]))
    own = [name for name in names if name in ways and ways[name].is_agmm]
    others = [name for name in names if name in ways and not ways[name].is_agmm and name != ROOF]
    found = []
    for way in own:
        captured = [name for name in others if name.endswith("-graph") == way.endswith("-graph")]
        for other in captured or others:
            by_shape = {
                shape_of(entry).title: entry["ways"][way]["median_us"]
                / entry["ways"][other]["median_us"]
                for entry in report["shapes"]
                if all(entry["ways"].get(name, {}).get("median_us") for name in (way, other))
            }
            if by_shape:
                mean = exp(sum(map(log, by_shape.values())) / len(by_shape))
                worst = max(by_shape, key=lambda shape: by_shape[shape])
                found.append(Ratio(way, other, len(by_shape), mean, by_shape[worst], worst))
    return found
