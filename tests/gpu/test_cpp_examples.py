"""The C++ example with a kernel of the user's own runs: PersistentAsyncInputScheduler as the fourth
argument of GemmUniversal, with signals that a second stream sets while the kernel runs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = [name for name in ("cmake", "nvcc") if shutil.which(name) is None]


def _cutlass() -> str:
    given = os.environ.get("CUTLASS_DIR")
    if given:
        return given
    try:
        package = importlib.metadata.distribution("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no CUTLASS: neither CUTLASS_DIR nor the package nvidia-cutlass")
    return str(package.locate_file("cutlass_library/source"))


def _run(*command: str, timeout: float = 120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(bool(TOOLS), reason=f"no {' and no '.join(TOOLS)}")
@pytest.mark.timeout(600)
def test_a_kernel_of_the_users_own_waits_for_its_chunks(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    settings = ("AGMM_PYTHON=OFF", "AGMM_CUDA=OFF", "AGMM_INSTALL_CPP=ON")
    core, examples = str(tmp_path / "core"), str(tmp_path / "examples")
    _run("cmake", "-S", str(REPOSITORY), "-B", core, *(f"-D{s}" for s in settings))
    _run("cmake", "--install", core, "--component", "cpp", "--prefix", str(prefix))
    paths = (f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCUTLASS_DIR={_cutlass()}")
    _run("cmake", "-S", str(REPOSITORY / "examples" / "cpp"), "-B", examples, *paths)
    _run("cmake", "--build", examples, "--target", "scheduler", timeout=500)
    assert _run(str(tmp_path / "examples" / "scheduler")) == "right: 0 wrong elements\n"
