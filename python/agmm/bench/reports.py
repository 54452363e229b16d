"""Reports of `agmm bench`: read from a file, narrowed to some shapes and ways, named in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agmm.bench.benchmarking import WAYS
from agmm.errors import InvalidArgument
from agmm.testing.cases import Shape

SCHEMA = 1

Report = dict[str, Any]


_OPTIONAL = (
    "tflops",
    "ratio_to_roof",
    "relative_error",
    "reason",
    "host_time_us",
    "host_time_after_drain_us",
)
"""Of a way; older reports lack some."""


def read(path: Path) -> Report:
    """The report that `agmm bench --json` wrote there.

    Raises InvalidArgument where the file cannot be read or holds something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"report: {path} cannot be read ({error})") from None
    except ValueError as error:
        raise InvalidArgument(f"report: {path} is not JSON ({error})") from None
    wanted = f"wanted one of `agmm bench --json`, schema {SCHEMA}"
    if not isinstance(report, dict) or not isinstance(report.get("shapes"), list):
        raise InvalidArgument(f"report: found no list of shapes in {path}, {wanted}")
    if report.get("schema") != SCHEMA:
        raise InvalidArgument(f"report: found schema {report.get('schema')} in {path}, {wanted}")
    for key in ("machine", "settings"):
        if not isinstance(report.get(key), dict):
            raise InvalidArgument(f"report: found no {key} in {path}, {wanted}")
    for i, entry in enumerate(report["shapes"]):
        whole = isinstance(entry, dict) and {"M", "N", "K", "ways"} <= entry.keys()
        if not whole or not isinstance(entry["ways"], dict):
            raise InvalidArgument(f"report: found no M, N, K and ways in shape {i} of {path}")
        for name, way in entry["ways"].items():
            if not isinstance(way, dict) or "median_us" not in way:
                raise InvalidArgument(f"report: found no median_us of {name!r} in {path}")
            way.setdefault("samples_us", [])
            for key in _OPTIONAL:
                way.setdefault(key, None)
            way.setdefault("wrong", False)
    return report


def narrow(
    report: Report,
    shapes: Sequence[Shape] | None,
    ways: Sequence[str] | None,
    *,
    missing_ok: bool = False,
) -> Report:
    """The same with only these shapes and ways (None: all), and the roof.

    Raises InvalidArgument for one that the report does not have, unless `missing_ok`.
    """
    there = list(dict.fromkeys(shape_of(entry) for entry in report["shapes"]))
    for shape in shapes or ():
        if shape not in there and not missing_ok:
            raise InvalidArgument(f"shape: found {shape}, wanted one of {_listed(there)}")
    names = list(dict.fromkeys(name for entry in report["shapes"] for name in entry["ways"]))
    for name in ways or ():
        if name not in names and not missing_ok:
            raise InvalidArgument(f"way: found {name!r}, wanted one of {_listed(names)}")
    return {
        **report,
        "shapes": [
            {
                **entry,
                "ways": {
                    name: way
                    for name, way in entry["ways"].items()
                    if ways is None or name == "roof" or name in ways
                },
            }
            for entry in report["shapes"]
            if shapes is None or shape_of(entry) in shapes
        ],
    }


def shape_of(entry: dict[str, Any]) -> Shape:
    """The shape of one of a report's `shapes`."""
    return Shape(entry["M"], entry["N"], entry["K"])


def title_of(name: str) -> str:
    """What tables and plots call a way: its title where this version knows it."""
    return WAYS[name].title if name in WAYS else name


def where(report: Report) -> str:
    """Ranks, machine, dtype and torch of a report, in a line."""
    machine, settings = report["machine"], report["settings"]
    facts = [f"{settings.get('world_size', '?')} ranks on {machine.get('device_name', '?')}"]
    facts += [str(settings["dtype"])] if "dtype" in settings else []
    facts += [f"torch {machine['torch']}"] if "torch" in machine else []
    return ", ".join(facts)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"
