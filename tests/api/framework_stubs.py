"""Modules and distributions that are not installed, for as long as a test wants them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agmm
import agmm.integrations

REPOSITORY = Path(__file__).resolve().parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def module(name: str, **attributes: Any) -> ModuleType:
    """A module that is a package without files."""
    found = ModuleType(name)
    found.__path__ = []
    vars(found).update(attributes)
    return found


def _distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """What an installer writes about a distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True, parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _entry_points() -> str:
    """What an installer writes about the entry points of agmm's pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )


@contextmanager
def installed(
    folder: Path,
    modules: Mapping[str, ModuleType],
    versions: Mapping[str, str],
    environment: Mapping[str, str],
) -> Iterator[None]:
    """These modules, these distributions and agmm's entry points are there in it.

    Modules of the same packages that are imported in it are forgotten at its end.
    """
    folder = folder / str(os.getpid())  # of this rank alone
    _distribution(folder, "agmm", agmm.__version__, _entry_points())  # before one that is installed
    for name, version in versions.items():
        _distribution(folder, name, version)
    packages = {name.partition(".")[0] for name in modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        for name, value in environment.items():
            patch.setenv(name, value)
        before = set(sys.modules)
        over_vllm = "agmm.integrations.vllm_linear"
        for name, found in modules.items():
            patch.setitem(sys.modules, name, found)
            parent, _, own = name.rpartition(".")
            if parent in modules:
                setattr(modules[parent], own, found)
        try:
            yield
        finally:
            for name in set(sys.modules) - before - set(modules):
                if name.partition(".")[0] in packages or name == over_vllm:
                    del sys.modules[name]
                if name == over_vllm:
                    delattr(agmm.integrations, "vllm_linear")
