"""Builds with a deliberate fault, or with delays: by name only, and never without a word."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import compiles
import pytest
from cmake_at_hand import CMAKE

import agmm
from agmm import _core

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS = (
    "no_fence",
    "signal_first",
    "no_credit",
    "no_wait",
    "no_sent",
    "read_signal",
    "no_parts",
    "early_sum",
    "one_slot",
)


def test_core_says_what_it_is() -> None:
    assert _core.fault in ("", *FAULTS)
    assert type(_core.stress_delays) is bool


def test_cmake_and_header_know_the_same_faults() -> None:
    choices = re.search(
        r'agmm_test_option\(AGMM_FAULT "([^"]+)"', (REPOSITORY / "CMakeLists.txt").read_text()
    )
    assert choices is not None
    assert choices[1].split(";") == list(FAULTS)
    header = (REPOSITORY / "src/testing/fault.hpp").read_text()
    assert re.findall(r'kFault == "(\w+)"', header) == list(FAULTS)


def _warnings_of_an_import() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(agmm)
    return [str(w.message) for w in caught]


def test_import_warns_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "fault", "no_fence")
    (warning,) = _warnings_of_an_import()
    assert "deliberate fault no_fence" in warning


def test_import_of_a_build_for_use_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "fault", "")
    assert _warnings_of_an_import() == []


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("AGMM_FAULT=no_fense", "found 'no_fense', wanted none or one of: " + ";".join(FAULTS)),
        ("AGMM_STRESS_DELAYS=maybe", "found 'maybe', wanted none or one of: ON;OFF"),
    ],
)
def test_typo_is_refused(tmp_path: Path, setting: str, wanted: str) -> None:
    done = subprocess.run(
        [str(CMAKE), "-S", str(REPOSITORY), "-B", str(tmp_path), f"-D{setting}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert f"{setting.split('=')[0]}: {wanted}" in " ".join(done.stderr.split())


def _a_fault_with_delays(folder: Path) -> None:
    """Compiles one gather and one scatter, which have the code of every fault of a matmul: what is
    off in a build is compiled too, and no fault knows dtypes or layouts."""
    import pybind11

    scripts = Path(sys.executable).parent
    unit = "pingpong_0.cu.o"
    settings = {
        "AGMM_CUDA": "ON",
        "AGMM_KERNELS": "minimal",
        "AGMM_FAULT": "no_wait",
        "AGMM_STRESS_DELAYS": "ON",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    environment = {k: v for k, v in os.environ.items() if k not in settings}  # it would win
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    environment["CMAKE_GENERATOR"] = "Ninja"

    def run(*arguments: str) -> None:
        done = compiles.run([str(CMAKE), *arguments], env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    run("-S", str(REPOSITORY), "-B", str(folder), *(f"-D{k}={v}" for k, v in settings.items()))
    source = folder / "kernels" / unit.removesuffix(".o")
    entry = re.compile(r"extern \w+ const (\w+);\n\w+ const \1 =\n.*;\n")
    compiled = [
        found for found in entry.finditer(source.read_text()) if found[1].endswith("g_bf16_col")
    ]
    assert [found[1].partition("_")[0] for found in compiled] == ["kernel", "scatter"]
    source.write_text(
        entry.sub(lambda found: found[0] * found[1].endswith("g_bf16_col"), source.read_text())
    )
    run("--build", str(folder), "--target", f"CMakeFiles/agmm_kernels.dir/kernels/{unit}")


@pytest.mark.slow
@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.timeout(600)
@pytest.mark.compiles.with_args(_a_fault_with_delays)
def test_a_fault_with_delays_compiles() -> None:
    compiles.result(_a_fault_with_delays)
