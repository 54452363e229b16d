"""Finds out whether agmm can be imported as it is installed, so that its commands can say what is
wrong.

This module imports neither torch nor the core.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "plot", "cuda": "cuda"}
"""The extra of agmm that brings a package, by its name in an import."""

import_error: BaseException | None = None
"""The error with which `import agmm` failed in the process of a command."""


def is_command() -> bool:
    """Whether Python was told to run a command of agmm: the script or ``python -m``."""
    with contextlib.suppress(AttributeError, IndexError):  # an embedded interpreter has no argv
        return os.path.basename(sys.orig_argv[-len(sys.argv)]) == "agmm"
    return False


def is_light_command() -> bool:
    """Whether a command of agmm runs that answers without torch, which takes seconds to import."""
    return is_command() and (asks_for_help() or _explains_a_shape(sys.argv[1:]))


def asks_for_help() -> bool:
    """Whether a command was told to say what it takes, or its version."""
    arguments = sys.argv[1:]
    return not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments)


def _explains_a_shape(arguments: list[str]) -> bool:
    return arguments[0] == "explain" and not any(one.startswith("--file") for one in arguments)


def version() -> str | None:
    """The installed package's version."""
    try:
        return importlib.metadata.version("agmm")
    except importlib.metadata.PackageNotFoundError:
        return None


def how_to_get(package: str) -> str:
    """The command that installs a package which an extra brings."""
    return f"pip install 'agmm[{EXTRAS[package]}]'"


def lacks(package: str) -> str:
    """The message for a missing package that an extra brings."""
    return f"{package} is not installed; {how_to_get(package)} brings it"


def load_torch() -> tuple[Any, str | None]:
    """Return torch and None, or None and the reason why it does not load. A failed import is not
    tried again: the second error would hide the first."""
    if import_error is not None and "torch" not in sys.modules:
        return None, one_line(import_error)
    try:
        return importlib.import_module("torch"), None
    except Exception as error:
        return None, one_line(error)


def load_core() -> tuple[Any, str | None]:
    """Return the core and None, or None and the reason: it does not load, or is of another
    build."""
    try:
        core = importlib.import_module("agmm._core")
    except Exception as error:
        return None, one_line(error)
    lacking = _lacking(core)
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return None, f"it is stale, it lacks {', '.join(lacking[:3])}{more}"
    return core, None


def fault() -> str | None:
    """Why agmm does not work as installed, in a line; None where nothing is known to be wrong."""
    if import_error is not None:
        torch_error = load_torch()[1]
        if torch_error is not None:
            return f"torch does not load: {torch_error}"
    core, core_error = load_core()
    if core is None:
        return f"agmm._core does not load: {core_error}"
    if core.__version__ != version():
        return f"agmm._core is stale: found version {core.__version__}, wanted {version()}"
    return None if import_error is None else f"agmm does not load: {one_line(import_error)}"


def _lacking(core: Any) -> list[str]:
    """The names that the core's stub has and the core itself lacks."""
    try:
        stub = ast.parse(Path(__file__).with_name("_core.pyi").read_text())
    except OSError:
        return []
    wanted = ["__version__"]
    for node in stub.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            wanted.append(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            wanted.append(node.name)
        elif isinstance(node, ast.ClassDef):
            members = (m for m in node.body if isinstance(m, ast.FunctionDef))
            wanted += [node.name, *(f"{node.name}.{member.name}" for member in members)]
    wanted.remove("__all__")  # of the stub alone
    return [name for name in dict.fromkeys(wanted) if not _has(core, name)]


def _has(core: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(core, part):
            return False
        core = getattr(core, part)
    return True


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says, of 300 characters at most."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def raised_line(told: str) -> str:
    """The line of a process's output that says what its traceback raised; without a traceback the
    last line. Errors of CUDA go on for several lines with general advice."""
    lines = [line for line in told.splitlines() if line.strip()]
    begins = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    raised = [line for line in lines[begins[-1] + 1 :] if line[0] != " "] if begins else lines[-1:]
    return raised[0] if raised else ""
