"""The host code of the CUDA core on a CUDA that only notes what is enqueued: no GPU needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "cuda_host"
SOURCES = (
    *(
        source
        for role in ("sync", "symmetric", "transport", "ops", "runtime")
        for source in (REPOSITORY / "src" / role).glob("*.cpp")
    ),
    *HERE.glob("*.cpp"),
)
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc is not None:
        roots.append(str(Path(nvcc).resolve().parents[1]))
    for root in roots:
        if root and (Path(root) / "include" / "cuda_runtime_api.h").is_file():
            return Path(root) / "include"
    return None


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(_cuda_headers() is None, reason="no CUDA headers"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checks, compiled with the sources of the core."""
    built = tmp_path_factory.mktemp("cuda_host") / "checks"
    folders = (REPOSITORY / "include", REPOSITORY / "src", HERE, _cuda_headers())
    command = [str(COMPILER), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{folder}" for folder in folders]
    command += [*map(str, SOURCES), "-o", str(built), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return built


def _run(program: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), name], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "name",
    [
        "slots_of_captures",
        "captures_at_once",
        "failures",
        "failures_in_captures",
        "copies_come_first",
        "duties",
        "equality",
        "reserved_sms",
        "peer_atomics",
        "other_device",
        "no_device",
    ],
)
def test_host_code(program: Path, name: str) -> None:
    done = _run(program, name)
    assert done.returncode == 0, done.stderr


def test_reports_of_two_devices_do_not_mix(program: Path) -> None:
    done = _run(program, "two_devices_report")
    assert done.returncode == 124
    assert done.stderr.startswith("agmm: rank 5 waited 0.0 s for chunk 7 from rank 6: ")
    assert done.stderr.count("\n") == 1


def test_a_report_is_described_as_asked_for(program: Path) -> None:
    done = _run(program, "describes")
    assert (done.returncode, done.stderr) == (124, "rank 5 as asked for\n")
