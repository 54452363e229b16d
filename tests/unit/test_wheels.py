"""The tool that builds wheels: one core for all Pythons, and checks that can fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from build_wheels import PYTHONS
from check_wheels import Report, check_contents, check_tag
from cmake_at_hand import CMAKE
from pythons import find_python

REPOSITORY = Path(__file__).resolve().parents[2]
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="no cmake"),
    pytest.mark.skipif(
        importlib.util.find_spec("auditwheel") is None,
        reason="no auditwheel, which `make test` installs",
    ),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class Built:
    """What one run of the tool left."""

    pythons: tuple[str, ...]
    work: Path
    wheels: dict[str, Path]

    def log(self, python: str) -> str:
        return (self.work / f"cp{python.replace('.', '')}" / "build.log").read_text()

    @property
    def core(self) -> Path:
        return self.work / "core-off-minimal"


def _others() -> list[str]:
    found = []
    for version in PYTHONS:
        try:
            found.append(find_python(version).version)
        except FileNotFoundError:
            continue
    return [version for version in found if version != THIS]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheels without CUDA for this Python and, where there is one, for another."""
    folder = tmp_path_factory.mktemp("wheels")
    pythons = (THIS, *_others()[-1:])
    options = ["--cuda", "OFF", "--kernels", "minimal", "--build-type", "Debug", "--no-install"]
    options += ["--work", str(folder / "work"), "--out", str(folder / "dist"), "--jobs", "2"]
    tool = str(REPOSITORY / "tools" / "build_wheels.py")
    done = subprocess.run(
        [sys.executable, tool, *options, "--pythons", *pythons],
        env={k: v for k, v in os.environ.items() if not k.startswith("AGMM_")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if "pip: ERROR: No matching distribution" in done.stderr:
        pytest.skip(f"no build requirements for {pythons}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    wheels = {
        version: next((folder / "dist").glob(f"agmm-*-cp{version.replace('.', '')}-*.whl"))
        for version in pythons
    }
    return Built(pythons, folder / "work", wheels)


def test_each_wheel_has_its_pythons_and_a_manylinux_tag(built: Built) -> None:
    for python, wheel in built.wheels.items():
        abi = f"cp{python.replace('.', '')}"
        assert re.fullmatch(
            rf"agmm-[\d.]+-{abi}-{abi}-manylinux_2_\d+_x86_64(\.\w+)?\.whl", wheel.name
        )
        report = Report(wheel)
        check_contents(wheel, report)
        check_tag(wheel, report)
        assert report.faults == []
        assert (report.python, report.exported) == (python, "PyInit__core")


def test_a_wheel_holds_what_users_need_and_no_tests(built: Built) -> None:
    with zipfile.ZipFile(built.wheels[THIS]) as archive:
        names = set(archive.namelist())
    tables = {p.name for p in (REPOSITORY / "python" / "agmm" / "tables").glob("*.json")}
    assert tables
    assert names >= {f"agmm/tables/{name}" for name in tables}
    assert names >= {"agmm/py.typed", "agmm/_core.pyi", "agmm/__init__.py"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest|include)[/.]", name)]


def test_the_core_is_compiled_once(built: Built) -> None:
    sources = [*REPOSITORY.glob("src/cpu/*.cpp"), *REPOSITORY.glob("src/sync/*.cpp")]
    log = built.core.with_suffix(".log").read_text()
    for source in sources:
        assert log.count(f"src/{source.parent.name}/{source.name}.o") == 1
    bindings = {path.name for path in REPOSITORY.glob("src/bindings/*.cpp")} - {"cuda_absent.cpp"}
    for python in built.pythons:
        compiled = re.findall(r"Building \w+ object (\S+)\.o", built.log(python))
        assert sorted(compiled) == sorted(
            f"CMakeFiles/_core.dir/src/bindings/{n}" for n in bindings
        )
    archive = (built.core / "libagmm_core.a").stat()
    assert all(archive.st_mtime < wheel.stat().st_mtime for wheel in built.wheels.values())


def test_what_the_wheel_holds_imports(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheels[THIS]) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = "import agmm, agmm._core; print(agmm.__file__, agmm._core.cuda_built)"
    for arguments, wanted in (
        (["-c", program], f"{tmp_path / 'agmm' / '__init__.py'} False"),
        (["-m", "agmm", "--version"], f"agmm {built.wheels[THIS].name.split('-')[1]}"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        assert (done.stdout.strip(), done.returncode) == (wanted, 0), done.stderr


# --- what is wrong is found ---


def _module(folder: Path) -> Path:
    return next((folder / "agmm").glob("_core.*.so"))


def _add_tests(folder: Path) -> None:
    (folder / "agmm" / "tests").mkdir()
    (folder / "agmm" / "tests" / "test_ops.py").touch()


def _lose_a_table(folder: Path) -> None:
    next((folder / "agmm" / "tables").glob("*.json")).unlink()


def _bundle(folder: Path) -> None:
    (folder / "agmm.libs").mkdir()
    shutil.copy(_module(folder), folder / "agmm.libs" / "libcudart-1234.so.13")


def _export_more(folder: Path) -> None:
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", _module(folder))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_add_tests, "files: not the package's: ['agmm/tests/test_ops.py']"),
        (_lose_a_table, "files: missing: ['agmm/tables/"),
        (_bundle, "libraries: found ["),
        (_export_more, "exports: found ["),
        (_export_more, "linked libraries: found ["),
    ],
)
def test_what_should_not_be_in_a_wheel_is_found(
    built: Built, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    with zipfile.ZipFile(built.wheels[THIS]) as archive:
        archive.extractall(tmp_path / "content")
    spoil(tmp_path / "content")
    wheel = tmp_path / built.wheels[THIS].name
    shutil.make_archive(str(wheel), "zip", tmp_path / "content")
    Path(f"{wheel}.zip").rename(wheel)
    report = Report(wheel)
    check_contents(wheel, report)
    assert [fault for fault in report.faults if fault.startswith(said)]


def test_a_tag_that_promises_too_much_is_found(built: Built, tmp_path: Path) -> None:
    name = re.sub(r"manylinux_2_\d+", "manylinux_2_5", built.wheels[THIS].name)
    report = Report(wheel := Path(shutil.copy(built.wheels[THIS], tmp_path / name)))
    check_contents(wheel, report)
    check_tag(wheel, report)
    assert report.faults[0].startswith("tag: found manylinux_2_5_x86_64, auditwheel: manylinux_2_")


# --- which core a module takes ---


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("AGMM_FAULT=no_wait", "AGMM_CORE_DIR: found it set, wanted it unset"),
        ("AGMM_STRESS_DELAYS=ON", "AGMM_CORE_DIR: found it set, wanted it unset"),
        ("SKBUILD_PROJECT_VERSION_FULL=9.9", "AGMM_CORE_DIR: found a core of version"),
    ],
)
def test_a_core_for_something_else_is_refused(
    built: Built, tmp_path: Path, setting: str, said: str
) -> None:
    settings = [f"AGMM_CORE_DIR={built.core}", "AGMM_PYTHON=OFF", setting]
    done = subprocess.run(
        [str(CMAKE), "-S", str(REPOSITORY), "-B", str(tmp_path), *(f"-D{s}" for s in settings)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"found none by the name '3\.1', wanted a path"):
        find_python("3.1")
