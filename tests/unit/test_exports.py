"""What the compiled core shows to other libraries: its entry and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from check_wheels import read_elf
from cmake_at_hand import CMAKE

from agmm import _core

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY = {"PyInit__core"}


def exported(library: Path) -> set[str]:
    """The symbols that a library defines for others."""
    return set(read_elf(library.read_bytes()).exported)


def test_the_reader_sees_what_another_library_exports() -> None:
    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    assert len(exported(library)) > 1


def test_the_core_exports_its_entry_alone() -> None:
    assert exported(Path(_core.__file__)) == ENTRY


def _import(*modules: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
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


@pytest.mark.parametrize("first", ["agmm", "torch"])
def test_import_order_is_free(first: str) -> None:
    done = _import(first)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == _core.__file__


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.timeout(600)
def test_a_static_build_exports_no_more(tmp_path: Path) -> None:
    """As on machines whose compiler links libstdc++ statically: of 4623 exported symbols torch's
    libraries took some, and the process ended by a segmentation fault."""
    import pybind11

    compiler = os.environ.get("CXX", "c++")
    archive = subprocess.run(
        [compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not os.path.isabs(archive):
        pytest.skip(f"{compiler} has no libstdc++.a")
    package = tmp_path / "path" / "agmm"
    shutil.copytree(REPOSITORY / "python" / "agmm", package, ignore=shutil.ignore_patterns("*.so"))
    settings = {
        "AGMM_CUDA": "OFF",
        "CMAKE_BUILD_TYPE": "Debug",  # compiles in half of the time
        "CMAKE_MODULE_LINKER_FLAGS": "-static-libstdc++ -static-libgcc",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(package),
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    environment = {k: v for k, v in os.environ.items() if k not in settings}  # it would win
    scripts = Path(sys.executable).parent
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    environment["CMAKE_GENERATOR"] = "Ninja"
    build = tmp_path / "build"
    for command in (
        ["-S", str(REPOSITORY), "-B", str(build), *(f"-D{k}={v}" for k, v in settings.items())],
        ["--build", str(build), "--parallel"],
    ):
        done = subprocess.run(
            [str(CMAKE), *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    library = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert exported(library) == ENTRY
    done = _import("agmm", path=package.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(library)
