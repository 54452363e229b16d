"""Fused calls of several ranks on one GPU, plain and under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "stand_in.py"


def run(*tool: str, arguments: Sequence[str] = ()) -> str:
    process = subprocess.run(
        [*tool, sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "AGMM_TIMEOUT_S": "60"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process.stdout


def test_results() -> None:
    assert "all equal" in run()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    output = run(sanitizer, "--tool", tool, "--error-exitcode", "9", arguments=["--in-turn"])
    assert "all equal" in output
    assert re.search(r"\b0 errors", output)
