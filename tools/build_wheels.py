"""Build the wheels of agmm: the core once, then a module and a wheel for each Python.

What takes long, the kernels, knows no Python: it is compiled once into a build tree below `--work`,
and each wheel compiles the bindings alone and links them with it (-DAGMM_CORE_DIR). auditwheel then
gives each wheel the lowest manylinux tag that its symbols allow, and refuses one that would need
another library packed in. The core's machine code is looked through for faults, and
`check_wheels.py` checks the wheels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_machine_code
import check_wheels
from pythons import Python, find_python, make_environment

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SCRIPTS = Path(sys.executable).parent


class BuildFailed(Exception):
    """A step failed; the message has its last lines."""


def _run(log: Path, *command: str, **variables: str) -> str:
    """Runs a step with its output in `log`."""
    environment = {**os.environ, **variables}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{environment['PATH']}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    said = log.read_text()
    if done.returncode != 0:
        last = "\n".join(said.splitlines()[-30:])
        raise BuildFailed(f"{' '.join(command)}: exit code {done.returncode}\n{last}\n{log}")
    return said


def find_toolkit() -> str:
    """The version of the CUDA toolkit whose nvcc CMake will find, as "13.0".

    Raises:
        FileNotFoundError: there is no nvcc.
    """
    nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc: found none, wanted it on PATH, CUDACXX=<nvcc> or --cuda OFF")
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    if release is None:
        raise FileNotFoundError(f"{nvcc}: found no version in what it says, wanted nvcc")
    return release[1]


def build_core(given: argparse.Namespace) -> Path:
    """Compiles all that knows no Python; returns its build tree."""
    # One tree for each toolkit: CMake keeps the nvcc that a tree was made with.
    what = f"cuda{find_toolkit()}-{given.kernels}" if given.cuda == "ON" else "cpu"
    tree = Path(given.work).resolve() / f"core-{what}"
    log = tree.parent / f"{tree.name}.log"
    print(f"core: {what}; log in {log}", flush=True)
    settings = {
        "AGMM_PYTHON": "OFF",
        "CMAKE_BUILD_TYPE": given.build_type,
        "Python_EXECUTABLE": sys.executable,
    }
    # The environment wins over -D there.
    variables = {"AGMM_CUDA": given.cuda, "AGMM_KERNELS": given.kernels}
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    configure = ["cmake", "-S", str(REPOSITORY), "-B", str(tree), "-G", "Ninja", *defines]
    _run(log, *configure, **variables)
    _run(log, "cmake", "--build", str(tree), "--target", "agmm_core", "-j", str(given.jobs))
    if given.cuda == "ON":
        read_machine_code(tree / "libagmm_core.a")
    return tree


def read_machine_code(core: Path) -> None:
    """Looks for faults in the machine code of a core's kernels.

    Raises:
        BuildFailed: a kernel has one, or there is no matmul kernel.
        FileNotFoundError: there is no cuobjdump.
    """
    kernels = check_machine_code.inspect(core)
    print(f"core: {len(kernels)} kernels in its machine code", flush=True)
    faults = [f"{kernel.name}: {fault}" for kernel in kernels for fault in kernel.faults()]
    faults += check_machine_code.missing(kernels)
    faults += filter(None, [check_machine_code.why_no_ptx(check_machine_code.list_ptx(core))])
    if not any(kernel.is_gemm for kernel in kernels):
        faults.append("found no matmul kernel, wanted some")
    if faults:
        raise BuildFailed("\n".join([f"{core}: faults in its machine code", *faults]))


def _requirements() -> list[str]:
    """What has to be in the Python that a wheel is built for. CMake and Ninja are this one's."""
    command = [sys.executable, str(REPOSITORY / "tools" / "build_requirements.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith(("cmake", "ninja"))]


def build_wheel(python: Python, core: Path, given: argparse.Namespace) -> Path:
    """Links the module of one Python with the core; returns its wheel with its final tag."""
    work = Path(given.work).resolve() / python.abi
    log = work / "build.log"
    print(f"Python {python.version}: {python.path}; log in {log}", flush=True)
    environment = make_environment(python, work / "venv", _requirements())
    raw = work / "wheel"
    for old in raw.glob("*.whl"):
        old.unlink()
    settings = {
        "build-dir": str(work / core.name),
        "cmake.build-type": given.build_type,
        "cmake.define.AGMM_CORE_DIR": str(core),
    }
    _run(
        log,
        *(sys.executable, "-m", "pip", "--disable-pip-version-check"),
        *("--python", str(environment.python), "wheel", "-v", "--no-deps", "--no-build-isolation"),
        *(word for item in settings.items() for word in ("-C", "=".join(item))),
        *("-w", str(raw), str(REPOSITORY)),
        CMAKE_BUILD_PARALLEL_LEVEL=str(given.jobs),
        PYTHONPATH="",
    )
    (wheel,) = raw.glob("*.whl")
    out = Path(given.out).resolve()
    for old in out.glob(f"agmm-*-{python.abi}-*.whl"):
        old.unlink()
    repair = ["-m", "auditwheel", "repair", "--plat", given.plat, "-w", str(out), str(wheel)]
    _run(work / "repair.log", sys.executable, *repair)
    (repaired,) = out.glob(f"agmm-*-{python.abi}-*.whl")
    return repaired


def main() -> None:
    """Build them, then check them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pythons", nargs="+", default=PYTHONS, help="versions, or paths of interpreters"
    )
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="ON")
    parser.add_argument("--kernels", choices=("minimal", "ci", "default", "all"), default="all")
    parser.add_argument("--plat", default="auto", help="the tag to have or fail; auto: the lowest")
    parser.add_argument("--torch", default=check_wheels.TORCH, help="what to test the wheels with")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--build-type", default="Release")
    parser.add_argument("--work", default=str(REPOSITORY / "build" / "wheels"))
    parser.add_argument("--out", default=str(REPOSITORY / "dist"))
    parser.add_argument("--no-install", action="store_true", help="only look into the wheels")
    given = parser.parse_args()
    try:
        pythons = [find_python(name) for name in given.pythons]
        core = build_core(given)
        wheels = [build_wheel(python, core, given) for python in pythons]
    except (BuildFailed, FileNotFoundError, RuntimeError) as error:
        print(f"build_wheels.py: {error}", file=sys.stderr)
        sys.exit(1)
    if not check_wheels.check(wheels, pythons, given.torch, not given.no_install):
        sys.exit(1)


if __name__ == "__main__":
    main()
