"""Makes, writes, reads, narrows and sums up reports of `agmm bench`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agmm.bench.machine import machine_facts
from agmm.bench.options import Options
from agmm.bench.presets import kind_of
from agmm.bench.timer import FLUSH_BYTES
from agmm.bench.way import ROOF
from agmm.bench.ways import TIMED_OPS, ways_of
from agmm.errors import InvalidArgument, why_unread
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import AnyShape, shape_from

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
"""The fields that a report has for a way; older reports lack some."""


def read(path: Path) -> Report:
    """The report that `agmm bench --json` wrote there.

    Raises InvalidArgument where the file cannot be read or holds something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"report: {path} cannot be read ({why_unread(error)})") from None
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
    op = report["settings"].setdefault("op", ALL_GATHER_MATMUL)  # older ones are all of that
    if op not in TIMED_OPS:
        listed = ", ".join(TIMED_OPS)
        raise InvalidArgument(f"report: found op {op!r} in {path}, wanted one of {listed}")
    for i, entry in enumerate(report["shapes"]):
        named = kind_of(op)._fields
        whole = isinstance(entry, dict) and {*named, "ways"} <= entry.keys()
        if not whole or not isinstance(entry["ways"], dict):
            listed = ", ".join(named)
            raise InvalidArgument(f"report: found no {listed} and ways in shape {i} of {path}")
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
    shapes: Sequence[AnyShape] | None,
    ways: Sequence[str] | None,
    *,
    missing_ok: bool = False,
) -> Report:
    """The report with only these shapes and ways (None: all), and the roof.

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
                    if ways is None or name == ROOF or name in ways
                },
            }
            for entry in report["shapes"]
            if shapes is None or shape_of(entry) in shapes
        ],
    }


def shape_of(entry: dict[str, Any]) -> AnyShape:
    """The shape of one of a report's `shapes`."""
    return shape_from(entry)


def op_of(report: Report) -> str:
    """The op that a report is of."""
    return str(report["settings"].get("op", ALL_GATHER_MATMUL))


def dtype_of(report: Report) -> str:
    """The dtype of a report, with the kind of scales where there are some."""
    settings = report["settings"]
    scaling = settings.get("scaling")
    return f"{settings['dtype']}{f' {scaling}' if scaling else ''}"


def title_of(name: str, op: str = ALL_GATHER_MATMUL) -> str:
    """The name of an op's way in tables and plots: its title where this version knows it."""
    way = ways_of(op).get(name)
    return name if way is None else way.title


def _is_agmm(name: str, op: str) -> bool:
    way = ways_of(op).get(name)
    return way is not None and way.is_agmm


def where(report: Report) -> str:
    """Return ranks, machine, dtype and torch of a report, in a line."""
    machine, settings = report["machine"], report["settings"]
    facts = [f"{settings.get('world_size', '?')} ranks on {machine.get('device_name', '?')}"]
    facts += [dtype_of(report)] if "dtype" in settings else []
    facts += [f"torch {machine['torch']}"] if "torch" in machine else []
    return ", ".join(facts)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


RECORDED_VARIABLES = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""The variables that change what is measured, beside all AGMM_* ones."""
_MIB = 2**20


def new_report(options: Options) -> dict[str, Any]:
    """A report without shapes: machine, versions, commit, date and settings."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine_facts(),
        "settings": {
            "op": options.op,
            "device": options.device,
            "world_size": options.world_size,
            "dtype": str(options.dtype).removeprefix("torch."),
            "scaling": options.scaling,
            "samples": options.samples,
            "warmup": options.warmup,
            "spin_us": options.spin_us if options.device == "cuda" else None,
            "flush_mib": FLUSH_BYTES // _MIB if options.device == "cuda" else None,
            "limit_s": options.limit_s,
            "statistic": "median of the samples, each the maximum over the ranks",
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("AGMM_") or name in RECORDED_VARIABLES
            },
        },
        "shapes": [],
    }


def commit() -> str | None:
    """$AGMM_COMMIT, or the commit of the working directory ('+' after it: with changes), if that is
    a checkout of agmm."""
    given = os.environ.get("AGMM_COMMIT")
    if given:
        return given
    try:
        _git("ls-files", "--error-unmatch", ":/python/agmm/__init__.py")
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def write_json(report: dict[str, Any], path: Path) -> None:
    """Writes the report, every sample included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False, default=str) + "\n")


@dataclass(frozen=True)
class Summary:
    """The outcome of one shape, in a line. Times in µs; None where there is no such time."""

    shape: AnyShape
    roof: float | None
    best_other: str | None
    best_other_us: float | None
    agmm: float | None
    agmm_graph: float | None
    agmm_ratio: float | None
    speedup: float | None


def summarize(shape_report: dict[str, Any], op: str = ALL_GATHER_MATMUL) -> Summary:
    """Return agmm's time beside the roof and the fastest of the ways that are neither."""
    ways = shape_report["ways"]
    times = {name: w["median_us"] for name, w in ways.items() if w["median_us"] is not None}
    ours_too = {name for name in times if _is_agmm(name, op)}
    others = {n: t for n, t in times.items() if n != ROOF and n not in ours_too}
    best = min(others, key=lambda n: others[n]) if others else None
    ours, roof = times.get("agmm"), times.get(ROOF)
    return Summary(
        shape=shape_of(shape_report),
        roof=roof,
        best_other=best,
        best_other_us=others[best] if best else None,
        agmm=ours,
        agmm_graph=times.get("agmm-graph"),
        agmm_ratio=ours / roof if ours and roof else None,
        speedup=others[best] / ours if best and ours else None,
    )


def wrong_ways(report: dict[str, Any]) -> list[str]:
    """Return 'way at shape' for every result that failed its check."""
    return [
        f"{name} at {shape_of(s)}"
        for s in report["shapes"]
        for name, way in s["ways"].items()
        if way["wrong"]
    ]


def failed_ways(report: dict[str, Any]) -> list[str]:
    """Return 'way at shape' for every way of agmm that did not run."""
    return [
        f"{name} at {shape_of(s)}"
        for s in report["shapes"]
        for name, way in s["ways"].items()
        if _is_agmm(name, op_of(report)) and way["median_us"] is None and not way["wrong"]
    ]
