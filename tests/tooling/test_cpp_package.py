"""The C++ API as it is installed: headers that stand alone, and examples that find the package."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import compiles
import pytest
from cmake_at_hand import CMAKE

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NVCC = shutil.which("nvcc")
PUBLIC = sorted(path.name for path in (REPOSITORY / "include" / "agmm").glob("*.hpp"))
OF_CUTLASS = {"persistent_async_input_scheduler.hpp"}

pytestmark = pytest.mark.skipif(CMAKE is None or COMPILER is None, reason="no cmake, or no C++")


def _cutlass() -> Path | None:
    given = os.environ.get("CUTLASS_DIR")
    if given:
        return Path(given)
    try:
        distribution = importlib.metadata.distribution("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file("cutlass_library/source")))


def _run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGMM_")}
    done = compiles.run(command, environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def _installed(folder: Path) -> Path:
    """An installation of the headers, which needs neither CUDA nor Python."""
    settings = ["AGMM_PYTHON=OFF", "AGMM_CUDA=OFF", "AGMM_INSTALL_CPP=ON"]
    settings.append(f"CMAKE_INSTALL_PREFIX={folder / 'prefix'}")
    _run(
        str(CMAKE),
        *("-S", str(REPOSITORY), "-B", str(folder / "build")),
        *(f"-D{setting}" for setting in settings),
    )
    _run(str(CMAKE), "--install", str(folder / "build"), "--component", "cpp")
    return folder / "prefix"


@pytest.fixture
def prefix() -> Path:
    return compiles.result(_installed)


installs = pytest.mark.compiles.with_args(_installed)


@installs
def test_what_is_installed_is_the_api_and_what_the_scheduler_needs(prefix: Path) -> None:
    include = prefix / "include" / "agmm"
    assert sorted(path.name for path in include.glob("*.hpp")) == PUBLIC
    roles = {path.parent.name for path in (include / "detail").rglob("*.hpp")}
    assert roles == {"order", "sync", "gemm"}


@pytest.mark.slow
@installs
@pytest.mark.parametrize("header", [name for name in PUBLIC if name not in OF_CUTLASS])
def test_public_header_stands_alone(prefix: Path, tmp_path: Path, header: str) -> None:
    source = tmp_path / "only.cpp"
    source.write_text(f'#include "agmm/{header}"\n#include "agmm/{header}"\nint main() {{}}\n')
    command = [str(COMPILER), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    _run(*command, f"-I{prefix / 'include'}", str(source))


def _examples(folder: Path) -> str:
    """The scheduler's is linked; the launcher's is not, since it would want all kernels."""
    prefix = _installed(folder / "of examples")
    settings = [f"CMAKE_PREFIX_PATH={prefix}", f"CUTLASS_DIR={_cutlass()}"]
    _run(
        str(CMAKE),
        *("-S", str(REPOSITORY / "examples" / "cpp"), "-B", str(folder)),
        *(f"-D{setting}" for setting in settings),
    )
    said = _run(str(CMAKE), "--build", str(folder))
    assert (folder / "scheduler").is_file()
    return said


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(_cutlass() is None, reason="no CUTLASS")
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.compiles.with_args(_examples)
def test_the_examples_find_the_package_and_compile() -> None:
    # What CUTLASS's kernels say where something in them is not inlined.
    assert "Potential Performance Loss" not in compiles.result(_examples)
