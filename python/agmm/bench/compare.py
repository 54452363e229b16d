"""Compares two reports of `agmm bench`: what became faster or slower by more than the noise.

Times of two runs differ by clocks, temperature and neighbours too. So a change is also given in
roofs: the time over that run's own matmul alone, before and after.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from agmm.bench.reports import RECORDED_VARIABLES, Report, op_of, shape_of
from agmm.bench.way import ROOF
from agmm.errors import InvalidArgument
from agmm.planning.shapes import AnyShape

MIN_SAMPLES = 5
"""The least number of samples of a way; fewer say nothing about its noise."""
STANDARD_ERRORS = 4.0
"""The number of standard errors that counts as a change. It flags 1 in 1000 pairs of equal normal
distributions by 20 samples each, 3 by 10."""
_NAMES_SHOWN = 12

_MACHINE = {
    "device_name": "machine",
    "host_cores": "host cores",
    "driver": "driver",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
}
_SETTINGS = {
    "device": "device",
    "world_size": "world size",
    "dtype": "dtype",
    "scaling": "scaling",
    "spin_us": "spin µs",
    "flush_mib": "flush MiB",
    "statistic": "statistic",
}


class Verdict(str, Enum):
    """The verdict on a pair of times."""

    faster = "faster"
    slower = "slower"
    same = "within noise"
    unknown = "noise unknown"


@dataclass(frozen=True)
class Change:
    """One way on one shape in both reports; times in µs.

    `noise_us` is the standard error of the difference of the medians, None where it is unknown;
    `ratio_in_roofs` the ratio of the times, each over its own run's roof.
    """

    shape: AnyShape
    way: str
    old_us: float
    new_us: float
    noise_us: float | None
    ratio_in_roofs: float | None

    @property
    def ratio(self) -> float:
        """The new time over the old one: below 1 is faster."""
        return self.new_us / self.old_us

    @property
    def verdict(self) -> Verdict:
        if self.noise_us is None:
            return Verdict.unknown
        if abs(self.new_us - self.old_us) <= STANDARD_ERRORS * self.noise_us:
            return Verdict.same
        return Verdict.faster if self.new_us < self.old_us else Verdict.slower


@dataclass(frozen=True)
class Comparison:
    """The comparison of two reports. `only_old` and `only_new` name the shapes and ways that one of
    them lacks."""

    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    differences: list[str]
    op: str

    @property
    def beyond_noise(self) -> list[Change]:
        return [c for c in self.changes if c.verdict in (Verdict.faster, Verdict.slower)]


def compare(old: Report, new: Report) -> Comparison:
    """The times that both reports have, and what only one has.

    Raises InvalidArgument where they are of different ops.
    """
    if op_of(old) != op_of(new):
        raise InvalidArgument(
            f"report: found one of {op_of(old)} beside one of {op_of(new)}, wanted the same op"
        )
    before, after = _by_shape(old), _by_shape(new)
    changes: list[Change] = []
    only_old = [f"{shape}: all ways" for shape in before if shape not in after]
    only_new = [f"{shape}: all ways" for shape in after if shape not in before]
    for shape, ways in after.items():
        if shape not in before:
            continue
        old_ways = before[shape]
        both = [name for name in ways if name in old_ways]
        old_roof, new_roof = (_median(w.get(ROOF)) for w in (old_ways, ways))
        missing = [name for name in old_ways if name not in ways]
        added = [name for name in ways if name not in old_ways]
        for name in both:
            old_us, new_us = _median(old_ways[name]), _median(ways[name])
            if old_us is None and new_us is not None:
                added.append(f"{name} (no time before: {old_ways[name]['reason']})")
            elif new_us is None and old_us is not None:
                missing.append(f"{name} (no time now: {ways[name]['reason']})")
            if old_us is None or new_us is None:
                continue
            in_roofs = None
            if old_roof is not None and new_roof is not None:
                in_roofs = (new_us / new_roof) / (old_us / old_roof)
            noise = noise_us(old_ways[name]["samples_us"], ways[name]["samples_us"])
            changes.append(Change(shape, name, old_us, new_us, noise, in_roofs))
        if missing:
            only_old.append(f"{shape}: {_listed(missing)}")
        if added:
            only_new.append(f"{shape}: {_listed(added)}")
    return Comparison(changes, only_old, only_new, _differences(old, new), op_of(new))


def noise_us(old: Sequence[float], new: Sequence[float]) -> float | None:
    """The standard error of the difference of the two medians; None with too few samples.

    It comes from the median absolute deviations, so single slow samples do not count.
    """
    if min(len(old), len(new)) < MIN_SAMPLES:
        return None
    return math.hypot(_standard_error(old), _standard_error(new))


def summary(comparison: Comparison) -> str:
    """How many times changed, in a sentence, and what the columns mean."""
    if not comparison.changes:
        return "The reports have no shape and way in common."
    counts = {v: sum(c.verdict is v for c in comparison.changes) for v in Verdict}
    told = ", ".join(f"{count} {v.value}" for v, count in counts.items() if count)
    return (
        f"{len(comparison.changes)} times in both: {told}. Noise is {STANDARD_ERRORS:g} standard "
        "errors of the medians' difference; in roofs: the same ratio, each time over its run's "
        "matmul alone. A flag says that two runs differ, not why: repeat it."
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _standard_error(samples: Sequence[float]) -> float:
    middle = statistics.median(samples)
    deviation = 1.4826 * statistics.median(abs(s - middle) for s in samples)
    return math.sqrt(math.pi / 2) * deviation / math.sqrt(len(samples))


def _by_shape(report: Report) -> dict[AnyShape, dict[str, Any]]:
    return {shape_of(entry): entry["ways"] for entry in report["shapes"]}


def _median(way: dict[str, Any] | None) -> float | None:
    if way is None or way.get("median_us") is None:
        return None
    return float(way["median_us"])


def _differences(old: Report, new: Report) -> list[str]:
    found = [
        f"{label} {_shown(old[part].get(key))} then, {_shown(new[part].get(key))} now"
        for part, labels in (("machine", _MACHINE), ("settings", _SETTINGS))
        for key, label in labels.items()
        if old[part].get(key) != new[part].get(key)
    ]
    then, now = (report["settings"].get("environment") or {} for report in (old, new))
    found += [
        f"{name}={then.get(name, 'unset')} then, {now.get(name, 'unset')} now"
        for name in RECORDED_VARIABLES
        if then.get(name) != now.get(name)
    ]
    return found


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)
