"""The rates of cards that `agmm tune --alone` has measured, in the user's folder of tuned plans."""

from __future__ import annotations

import json
from pathlib import Path

from agmm.planning import tables

Rates = tuple[float, float, "float | None"]
"""TFLOPS of the library's matmul of 16 bits, GB/s of the memory, and GB/s to a peer or None."""


def path_of(gpu: str) -> Path | None:
    """Where the rates of a GPU are kept; None where nothing is (AGMM_CACHE=off)."""
    folder = tables.user_folder()
    return None if folder is None else folder / f"{gpu}-alone.json"


def read(gpu: str) -> Rates | None:
    """The measured rates of a GPU; None where there are none that can be read."""
    try:
        path = path_of(gpu)
        if path is None:
            return None
        found = json.loads(path.read_text())
        link = found["link_gb_per_s"]
        rates = float(found["tflops"]), float(found["memory_gb_per_s"])
        return *rates, None if link is None else float(link)
    except (OSError, ValueError, KeyError, TypeError, tables.TableError):
        return None


def save(gpu: str, rates: Rates) -> Path | None:
    """Keep the rates of a GPU; returns where, or None where nothing is kept."""
    path = path_of(gpu)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("tflops", "memory_gb_per_s", "link_gb_per_s")
        path.write_text(json.dumps(dict(zip(names, rates, strict=True)), indent=1))
    return path
