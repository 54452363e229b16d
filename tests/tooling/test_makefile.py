"""What the Makefile builds for the demo and for the tests, on machines with and without a GPU."""

from __future__ import annotations

import os
import shutil
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
    return _run(folder, "-n", *arguments)


def _run(folder: Path, *arguments: str) -> str:
    ours = ("AGMM_", "CCACHE_", "CMAKE_", "CUD", "MAKE", "MFLAGS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    process = subprocess.run(
        ["make", *arguments, f"VENV={folder.parent / 'venv'}"],
        cwd=REPOSITORY,
        # A make that is not told of the one that may have started the tests.
        env={**environment, "PATH": f"{folder}:{environment['PATH']}"},
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
        (False, ["build"], False),
        (True, ["build"], True),
        (False, ["build", "AGMM_CUDA=ON"], True),
        (False, ["lint"], False),
        (False, ["stub"], False),
        (True, ["lint"], True),
        (False, ["lint", "AGMM_CUDA=ON"], True),
        (False, ["test"], True),
        (False, ["demo", "test"], True),
        (False, ["lint", "test"], True),
        (False, ["demo", "bench"], False),
        (False, ["demo", "AGMM_CUDA=ON"], True),
        (True, ["demo", "AGMM_CUDA=OFF"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_kernels_are_left_out_where_nothing_runs_them(
    commands: Path, gpu: bool, arguments: list[str], cuda: bool
) -> None:
    _command(commands, "nvcc", 0)
    _command(commands, "nvidia-smi", 0 if gpu else 1)
    run = _dry_run(commands, *arguments)
    assert ("--cutlass" in run) is cuda
    # Each kind of build has a tree of its own.
    assert ("-C build-dir=build/cpu/" in run) is not cuda
    assert ("-C build-dir=build/ci/" in run) is (cuda and not gpu)
    assert f"nvcc {commands / 'nvcc' if cuda else 'not used'};" in run
    assert ("AGMM_CUDA=OFF" in run) is not cuda


@pytest.mark.parametrize(
    ("gpu", "arguments", "kernels"),
    [
        (False, ["test"], "ci"),
        (False, ["test-slow"], "ci"),
        (False, ["test", "AGMM_KERNELS=default"], "default"),
        (False, ["test", "AGMM_CUDA=OFF"], "default"),
        (False, ["build"], "default"),
        (False, ["build", "test"], "ci"),
        (False, ["test-gpu"], "default"),
        (True, ["test"], "default"),
        (True, ["demo"], "default"),
        (True, ["build", "AGMM_KERNELS=ci"], "ci"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_without_a_gpu_the_tests_compile_a_kernel_of_each_kind(
    commands: Path, gpu: bool, arguments: list[str], kernels: str
) -> None:
    _command(commands, "nvcc", 0)
    _command(commands, "nvidia-smi", 0 if gpu else 1)
    run = _dry_run(commands, *arguments)
    assert f"AGMM_KERNELS={kernels}, " in run
    assert f"AGMM_KERNELS={kernels} CUTLASS_DIR" in run  # another set is another build
    assert ("-C build-dir=build/ci/" in run) is (kernels == "ci")


@pytest.mark.parametrize("given", [None, "another"])
def test_compilers_are_called_through_ccache(commands: Path, given: str | None) -> None:
    """Where there is one; whoever names another launcher gets that one."""
    _command(commands, "nvcc", 0)
    _command(commands, "ccache", 0)
    # CMake reads both from the environment.
    names = [f"CMAKE_{language}_COMPILER_LAUNCHER" for language in ("CUDA", "CXX")]
    show = "--eval=show: ; @echo " + " ".join(f"$${name}" for name in (*names, "CCACHE_BASEDIR"))
    arguments = [f"{name}={given}" for name in names] if given else []
    used = given or str(commands / "ccache")
    assert _run(commands, show, "show", *arguments).split() == [used, used, str(REPOSITORY)]
    assert f" jobs through {commands / 'ccache'}, nvcc " in _dry_run(commands, "build")


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
    """It is so where no nvcc is found too: that fails, for a wheel without kernels would pass for
    one."""
    _command(commands, "nvcc", 1)
    run = _dry_run(commands, "wheels", *arguments)
    assert f"--cuda {cuda} --kernels {kernels} " in run
    assert ("--cutlass" in run) is (cuda == "ON")
    # The wheels' machine code is read.
    assert ("--extra sass" in run) is (cuda == "ON" and shutil.which("cuobjdump") is None)


def test_what_reads_the_installed_module_takes_it_as_it_is(commands: Path) -> None:
    """`make lint` behind `make test` installs nothing, whatever was built; changes are seen."""
    _command(commands, "nvcc", 0)
    _command(commands, "nvidia-smi", 1)
    venv = commands.parent / "venv"
    venv.mkdir()
    for stamp in (".torch", ".build", ".lint", ".installed"):
        (venv / stamp).touch()
    settings = f"SETTINGS={commands.parent / 'settings'}"
    assert "pip install" not in _dry_run(commands, "lint", settings).replace(
        "--ignore-installed", ""
    )
    os.utime(venv / ".installed", (0, 0))
    run = _dry_run(commands, "lint", settings)
    assert "AGMM_CUDA=OFF" in run
    # The next `make test` sees that its kernels are not there any more.
    assert f"> {commands.parent / 'settings'}" in run


def test_a_build_shows_each_step_at_once_and_can_be_interrupted(commands: Path) -> None:
    out = _dry_run(commands, "demo")
    assert "PYTHONUNBUFFERED=1" in out  # pip would keep the steps until the end
    assert "sed -un" in out
    assert "exit 130" in out
