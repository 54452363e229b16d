"""The kernels that need no tensor cores, as other GPUs than Hopper run them: from their PTX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import collectives_stand_in
import pytest

PROGRAM = Path(__file__).parent / "small_kernels_stand_in.py"


def _run(results: Path, cache: Path, variables: dict[str, str]) -> list[Path]:
    """The files that the driver kept of what it compiled."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(results)],
        env={
            **os.environ,
            "AGMM_TIMEOUT_S": collectives_stand_in.LIMIT_S,
            "CUDA_CACHE_PATH": str(cache),
            "CUDA_CACHE_DISABLE": "0",
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path]),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.timeout(600)
def test_the_ptx_of_sm_80_computes_what_hopper_code_does(tmp_path: Path) -> None:
    """Bit for bit what collectives sum and quantisers make."""
    results = tmp_path / "results.pt"
    assert _run(results, tmp_path / "none", {}) == []
    assert _run(results, tmp_path / "compiled", {"CUDA_FORCE_PTX_JIT": "1"})
