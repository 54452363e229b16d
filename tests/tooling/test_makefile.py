"""What the Makefile builds for the demo and for the tests, on machines with and without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def _command(folder: Path, name: str, code: int) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho GPU 0\nexit {code}\n" if code == 0 else "exit 1\n")
    (folder / name).chmod(0o755)


def _dry_run(folder: Path, *arguments: str) -> str:
    """What make would run, in an environment that is yet to be made."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AGMM_", "CUD"))}
    process = subprocess.run(
        ["make", "-n", *arguments, f"VENV={folder.parent / 'venv'}"],
        cwd=REPOSITORY,
        env={**environment, "PATH": f"{folder}:{environment['PATH']}", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return process.stdout


@pytest.mark.parametrize(
    ("gpu", "arguments", "cuda"),
    [
        (False, ["demo"], False),
        (True, ["demo"], True),
        (False, ["bench"], False),
        (True, ["bench"], True),
        (False, ["test"], True),
        (False, ["demo", "test"], True),
        (False, ["demo", "bench"], False),
        (False, ["demo", "AGMM_CUDA=ON"], True),
        (True, ["demo", "AGMM_CUDA=OFF"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_kernels_are_left_out_of_demo_and_bench_without_a_gpu(
    commands: Path, gpu: bool, arguments: list[str], cuda: bool
) -> None:
    _command(commands, "nvcc", 0)
    _command(commands, "nvidia-smi", 0 if gpu else 1)
    run = _dry_run(commands, *arguments)
    assert ("--cutlass" in run) is cuda
    # Each kind of build has a tree of its own.
    assert ("-C build-dir=build/cpu/" in run) is not cuda
    assert f"nvcc {commands / 'nvcc' if cuda else 'not used'};" in run
    assert ("AGMM_CUDA=OFF" in run) is not cuda


@pytest.mark.parametrize(
    ("arguments", "cuda", "kernels"),
    [
        ([], "ON", "all"),
        (["AGMM_KERNELS=minimal"], "ON", "minimal"),
        (["AGMM_CUDA=OFF"], "OFF", "all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wheels_have_all_kernels_unless_asked_for_otherwise(
    commands: Path, arguments: list[str], cuda: str, kernels: str
) -> None:
    """Also where no nvcc is found: that fails, for a wheel without kernels would pass for one."""
    _command(commands, "nvcc", 1)
    run = _dry_run(commands, "wheels", *arguments)
    assert f"--cuda {cuda} --kernels {kernels} " in run
    assert ("--cutlass" in run) is (cuda == "ON")
