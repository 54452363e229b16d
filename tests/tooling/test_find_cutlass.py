"""Which CUTLASS a build takes, and that it refuses one of another version."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from cmake_at_hand import CMAKE, CMAKES

REPOSITORY = Path(__file__).resolve().parents[2]
WANTED = re.search(
    r"set\(AGMM_CUTLASS_VERSION (\S+)\)", (REPOSITORY / "CMakeLists.txt").read_text()
)

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(finds NONE)
list(APPEND CMAKE_MODULE_PATH "{modules}")
find_package(CUTLASS {version} EXACT REQUIRED)
get_target_property(found agmm::cutlass INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "found ${{CUTLASS_VERSION}} in ${{found}}")
"""


def _wanted() -> str:
    assert WANTED is not None
    return WANTED[1]


def _checkout(folder: Path, version: str | None) -> Path:
    headers = folder / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()
    if version is not None:
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        lines = [f"#define CUTLASS_{name} {value}\n" for name, value in parts]
        (headers / "version.h").write_text("".join(lines))
    return folder


def _find(folder: Path, checkout: Path, cmake: str) -> subprocess.CompletedProcess[str]:
    (folder / "CMakeLists.txt").write_text(
        PROJECT.format(modules=REPOSITORY / "third_party", version=_wanted())
    )
    return subprocess.run(
        [cmake, "-S", str(folder), "-B", str(folder / "build")],
        env={**os.environ, "CUTLASS_DIR": str(checkout)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_package_has_the_version_that_is_wanted() -> None:
    pinned = re.search(r'"nvidia-cutlass==([^"]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert pinned is not None
    assert pinned[1] == f"{_wanted()}.0"


@pytest.mark.parametrize("cmake", CMAKES)
def test_the_wanted_version_is_found(tmp_path: Path, cmake: str) -> None:
    checkout = _checkout(tmp_path / "cutlass", _wanted())
    done = _find(tmp_path, checkout, cmake)
    assert done.returncode == 0, done.stderr
    assert f"found {_wanted()} in {checkout / 'include'}" in done.stdout


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "3.9.2", None])
def test_another_version_is_refused(tmp_path: Path, version: str | None) -> None:
    done = _find(tmp_path, _checkout(tmp_path / "cutlass", version), str(CMAKE))
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    if version is not None:
        assert f'"{version}"' in said
        assert f'required is exact version "{_wanted()}"' in said
    else:
        assert "CUTLASS_VERSION" in said
