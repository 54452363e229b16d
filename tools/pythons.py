"""Find Python interpreters by version, and make bare virtual environments of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Python:
    """An interpreter and its version, as "3.12"."""

    path: str
    version: str

    @property
    def abi(self) -> str:
        """Its tag in a wheel's name."""
        return "cp" + self.version.replace(".", "")


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip: this process's pip installs into it."""

    python: Path

    def install(self, *requirements: str) -> str | None:
        """Installs them; pip's last line of error where that fails, else None."""
        if not requirements:
            return None
        done = _pip("--python", str(self.python), "install", "-q", *requirements)
        return None if done.returncode == 0 else _last_line(done)

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs its Python, with nothing of this process's packages."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "AGMM_")) and name != "VIRTUAL_ENV"
        }
        environment["PATH"] = f"{self.python.parent}{os.pathsep}{environment['PATH']}"
        return subprocess.run(
            [str(self.python), *arguments],
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=600,
            check=False,
        )


def find_python(name: str) -> Python:
    """An interpreter by its path, or by its version: the one that runs this, one on PATH, or
    pyenv's.

    Raises:
        FileNotFoundError: there is none.
    """
    for candidate in _candidates(name):
        done = subprocess.run(
            [candidate, "-c", _VERSION], capture_output=True, text=True, check=False
        )
        version = done.stdout.strip()
        if done.returncode == 0 and (version == name or os.sep in name):
            return Python(candidate, version)
    raise FileNotFoundError(
        f"Python: found none by the name {name!r}, wanted a path, or a version such as 3.12 with "
        "python3.12 on PATH or among pyenv's"
    )


def _candidates(name: str) -> Iterator[str]:
    if os.sep in name:
        yield name
        return
    yield sys.executable
    on_path = shutil.which(f"python{name}")
    if on_path:
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{name}.*/bin/python"), reverse=True))


def make_environment(python: Python, folder: Path, requirements: Sequence[str]) -> Environment:
    """A new virtual environment with these packages and nothing else, not even pip.

    Raises:
        RuntimeError: they cannot be installed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = [python.path, "-m", "venv", "--without-pip", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{python.path} -m venv: {_last_line(done)}")
    environment = Environment(folder / "bin" / "python")
    fault = environment.install(*requirements)
    if fault:
        raise RuntimeError(f"{folder}: pip: {fault}")
    return environment


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]
