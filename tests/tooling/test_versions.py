"""`make test-versions`: which versions it tests, and what it says of them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from agmm.cli import doctor

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$STAND_IN_ARGUMENTS.$(ls "$STAND_IN_FOLDER" | wc -l)"
for argument in "$@"; do case $argument in VENV=*) venv=${argument#VENV=} ;; esac; done
echo "of $venv"
case " $* " in *2.12*) exit 1 ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, and a make that only notes its arguments."""
    for name in ("tools/test_versions.sh", "CMakeLists.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    (tmp_path / "tools" / "test_versions.sh").chmod(0o755)
    (tmp_path / "make").write_text(STAND_IN)
    (tmp_path / "make").chmod(0o755)
    (tmp_path / "calls").mkdir()
    return tmp_path


def _run(checkout: Path, *torches: str) -> subprocess.CompletedProcess[str]:
    calls = checkout / "calls"
    return subprocess.run(
        [str(checkout / "tools" / "test_versions.sh"), *torches],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "MAKE": str(checkout / "make"),
            "PYTEST_ARGS": "-x",
            "STAND_IN_FOLDER": str(calls),
            "STAND_IN_ARGUMENTS": str(calls / "call"),
        },
    )


def test_each_torch_is_tested_and_a_failure_is_said_at_the_end(checkout: Path) -> None:
    done = _run(checkout, "torch==2.11.*", "torch==2.12.0", "torch")
    assert done.returncode == 1
    calls = [path.read_text().splitlines() for path in sorted((checkout / "calls").iterdir())]
    assert [call[:2] for call in calls] == [["--no-print-directory", "test"]] * 3
    assert len({c for call in calls for c in call if c.startswith(("BUILD_", "SETTINGS="))}) == 6
    venvs = ["build/versions/torch__2.11._", "build/versions/torch__2.12.0", "build/versions/torch"]
    for call, torch, venv in zip(
        calls, ("torch==2.11.*", "torch==2.12.0", "torch"), venvs, strict=True
    ):
        assert {f"TORCH={torch}", f"VENV={venv}", "AGMM_CUDA=OFF", "PYTEST_ARGS=-x"} <= {*call}
    oldest = re.search(r"VERSION ([0-9.]+)", (REPOSITORY / "CMakeLists.txt").read_text())
    assert oldest is not None
    assert [c for call in calls for c in call if c.startswith("CMAKE_")] == [
        f"CMAKE_REQUIREMENT=cmake=={oldest[1]}.*",
        "CMAKE_REQUIREMENT=",
        "CMAKE_REQUIREMENT=",
    ]
    results = [line.split()[:2] for line in done.stdout.splitlines()[-3:]]
    assert results == [
        ["passed", "torch==2.11.*:"],
        ["FAILED", "torch==2.12.0:"],
        ["passed", "torch:"],
    ]
    assert done.stdout.splitlines()[-1].endswith("of build/versions/torch")


def test_all_passed_and_none_given(checkout: Path) -> None:
    assert _run(checkout, "torch").returncode == 0
    assert _run(checkout).returncode == 2


def test_the_versions_are_those_that_the_project_states() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    found = re.search(r"^TEST_TORCHES \?= (.*)$", makefile, re.MULTILINE)
    assert found is not None
    oldest, usual, newest = found[1].split()
    stated = ".".join(map(str, doctor.OLDEST_TORCH))
    assert f'"torch>={stated}"' in (REPOSITORY / "pyproject.toml").read_text()
    assert oldest == f"torch=={stated}.*"
    assert f"TORCH='{usual}'" in (REPOSITORY / "tools" / "make_venv.sh").read_text()
    assert newest == "torch"


def test_what_names_this_version_names_the_project_s() -> None:
    def found(pattern: str, file: str) -> list[str]:
        return re.findall(pattern, (REPOSITORY / file).read_text(), re.M)

    (version,) = found(r'^version = "(\d+\.\d+)\.\d+"', "pyproject.toml")
    assert found(r"agmm-(\d+\.\d+)\.\d+-cp312", "README.md") == [version]
    for file in ("docs/reference/cpp.md", "examples/cpp/CMakeLists.txt"):
        assert found(r"find_package\(agmm (\S+) REQUIRED", file) == [version]
    released = found(r"^## \[(\d+\.\d+)\.\d+\]", "CHANGELOG.md")
    assert released[0] == version
