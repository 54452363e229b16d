"""What the compiled core shows to other libraries: its entry and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from check_wheels import read_elf

from agmm import _core

ENTRY = {"PyInit__core"}


def exported(library: Path) -> set[str]:
    """The symbols that a library defines for others."""
    return set(read_elf(library.read_bytes()).exported)


def test_the_reader_sees_what_another_library_exports() -> None:
    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    assert len(exported(library)) > 1


def test_the_core_exports_its_entry_alone() -> None:
    assert exported(Path(_core.__file__)) == ENTRY


def import_in_order(*modules: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Imports them in this order in a new process, and throws and catches an exception in each."""
    program = "\n".join(
        [
            *(f"import {module}" for module in modules),
            "import torch",
            "from agmm import _core",
            "torch.ones(2, 2) @ torch.ones(2, 2)",
            "calls = [lambda: torch.ones(2) @ torch.ones(3)]",
            "calls += [lambda: _core.KernelConfig(1, 1, 1, 1, 1, 'none')]",
            "for call in calls:",
            "    try:",
            "        call()",
            "    except (RuntimeError, ValueError):",
            "        continue",
            "    raise SystemExit('nothing was raised')",
            "print(_core.__file__)",
        ]
    )
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("first", ["agmm", pytest.param("torch", marks=pytest.mark.slow)])
def test_import_order_is_free(first: str) -> None:
    done = import_in_order(first)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == _core.__file__
