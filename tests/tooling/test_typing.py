"""Types of the installed package, as a user's type checker sees them (py.typed)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("typed_program.py")
WRONG = """

def wrong(x: torch.Tensor) -> None:
    agmm.all_gather_matmul(x, "no weight")
    y: torch.Tensor = agmm.all_gather_matmul(x, [x, x])
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed (the extra lint)")
def test_mypy_finds_the_types_of_a_users_program(tmp_path: Path) -> None:
    """A program with two faults has these two; agmm without types would have none."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text() + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", program.name],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "MYPYPATH"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    faults = [line for line in done.stdout.splitlines() if ": error: " in line]
    last = len(program.read_text().splitlines())
    assert [fault.split(":")[1] for fault in faults] == [str(last - 1), str(last)], done.stdout
    assert ["[call-overload]" in faults[0], "[assignment]" in faults[1]] == [True, True]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_them_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text() + WRONG)
    done = subprocess.run(
        ["pyright", "--pythonpath", sys.executable, "--outputjson", program.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    last = len(program.read_text().splitlines())
    lines = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert lines == {last - 1, last}, done.stdout
