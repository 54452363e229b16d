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

import compiles
import pytest
import torch
from build_wheels import find_toolkit
from check_wheels import Report, check_contents, check_tag, read_elf
from cmake_at_hand import CMAKE
from pythons import find_python
from test_exports import import_in_order

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = REPOSITORY / "tools"
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

    work: Path
    wheel: Path

    @property
    def core(self) -> Path:
        return self.work / "core-cpu"


def _static_flags() -> str:
    """What links libstdc++ statically, where the compiler can."""
    compiler = os.environ.get("CXX", "c++")
    done = subprocess.run(
        [compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=False
    )
    return "-static-libstdc++ -static-libgcc" if os.path.isabs(done.stdout.strip()) else ""


def _build(folder: Path) -> Built:
    """A wheel for this Python: no CUDA, not optimised, libstdc++ linked statically."""
    options = ["--cuda", "OFF", "--build-type", "None", "--no-install"]
    options += ["--work", str(folder / "work"), "--out", str(folder / "dist"), "--jobs", "2"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGMM_")}
    done = compiles.run(
        [sys.executable, str(TOOLS / "build_wheels.py"), *options, "--pythons", THIS],
        env={**environment, "LDFLAGS": _static_flags()},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(folder / "work", wheel)


@pytest.fixture
def built() -> Built:
    return compiles.result(_build)


of_a_wheel = pytest.mark.compiles.with_args(_build)


@pytest.fixture
def content(built: Built, tmp_path: Path) -> Path:
    """A folder with what is in the wheel."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "content")
    return tmp_path / "content"


@of_a_wheel
@pytest.mark.slow
def test_a_wheel_is_for_one_python_and_manylinux(built: Built) -> None:
    abi = f"cp{THIS.replace('.', '')}"
    assert re.fullmatch(
        rf"agmm-[\d.]+-{abi}-{abi}-manylinux_2_\d+_x86_64(\.\w+)?\.whl", built.wheel.name
    )
    report = Report(built.wheel)
    check_contents(built.wheel, report)
    check_tag(built.wheel, report)
    assert report.faults == []
    assert (report.python, report.exported) == (THIS, "PyInit__core")


@of_a_wheel
@pytest.mark.slow
def test_a_wheel_holds_what_users_need_and_no_tests(content: Path) -> None:
    names = {path.relative_to(content).as_posix() for path in content.rglob("*")}
    tables = {p.name for p in (REPOSITORY / "python" / "agmm").rglob("tables/*.json")}
    assert tables and tables <= {Path(name).name for name in names}
    assert names >= {"agmm/py.typed", "agmm/_core.pyi", "agmm/__init__.py"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest|include)[/.]", name)]


@of_a_wheel
@pytest.mark.slow
def test_the_core_is_compiled_once(built: Built) -> None:
    """The core's own build compiles it; the wheel's compiles the bindings alone."""
    sources = [*REPOSITORY.glob("src/cpu/*.cpp"), *REPOSITORY.glob("src/sync/*.cpp")]
    log = (built.work / "core-cpu.log").read_text()
    for source in sources:
        assert log.count(f"src/{source.parent.name}/{source.name}.o") == 1
    bindings = {path.name for path in REPOSITORY.glob("src/bindings/*.cpp")} - {"cuda_absent.cpp"}
    log = (built.work / f"cp{THIS.replace('.', '')}" / "build.log").read_text()
    compiled = re.findall(r"Building \w+ object (\S+)\.o", log)
    assert sorted(compiled) == sorted(f"CMakeFiles/_core.dir/src/bindings/{n}" for n in bindings)


@of_a_wheel
@pytest.mark.slow
def test_a_module_with_a_static_libstdcpp_works_beside_torch(content: Path) -> None:
    """torch's libraries took some of 4623 symbols that it exported, and the process ended by a
    segmentation fault."""
    if not _static_flags():
        pytest.skip("the compiler has no libstdc++.a")
    library = _module(content)
    assert not [n for n in read_elf(library.read_bytes()).needed if n.startswith("libstdc++")]
    done = import_in_order("agmm", path=content)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(library)


# --- what is wrong is found ---


def _module(folder: Path) -> Path:
    return next((folder / "agmm").glob("_core.*.so"))


def _add_tests(folder: Path) -> None:
    (folder / "agmm" / "tests").mkdir()
    (folder / "agmm" / "tests" / "test_ops.py").touch()


def _lose_a_table(folder: Path) -> None:
    next((folder / "agmm").rglob("tables/*.json")).unlink()


def _bundle(folder: Path) -> None:
    (folder / "agmm.libs").mkdir()
    shutil.copy(_module(folder), folder / "agmm.libs" / "libcudart-1234.so.13")


def _export_more(folder: Path) -> None:
    shutil.copy(Path(torch.__file__).parent / "lib" / "libshm.so", _module(folder))


@of_a_wheel
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_add_tests, "files: not the package's: ['agmm/tests/test_ops.py']"),
        (_lose_a_table, "files: missing: ['agmm/"),
        (_bundle, "libraries: found ["),
        (_export_more, "exports: found ["),
        (_export_more, "linked libraries: found ["),
    ],
)
@pytest.mark.slow
def test_what_should_not_be_in_a_wheel_is_found(
    built: Built, content: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(content)
    wheel = content.parent / built.wheel.name
    shutil.make_archive(str(wheel), "zip", content)
    Path(f"{wheel}.zip").rename(wheel)
    report = Report(wheel)
    check_contents(wheel, report)
    assert [fault for fault in report.faults if fault.startswith(said)]


@of_a_wheel
@pytest.mark.slow
def test_a_tag_that_promises_too_much_is_found(built: Built, tmp_path: Path) -> None:
    name = re.sub(r"manylinux_2_\d+", "manylinux_2_5", built.wheel.name)
    report = Report(wheel := Path(shutil.copy(built.wheel, tmp_path / name)))
    check_contents(wheel, report)
    check_tag(wheel, report)
    assert report.faults[0].startswith("tag: found manylinux_2_5_x86_64, auditwheel: manylinux_2_")


# --- which core a module takes ---


@of_a_wheel
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


def test_the_toolkit_is_that_of_the_nvcc_that_cmake_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that an nvcc of another version made would go on with that one."""
    for version in ("12.8", "13.0"):
        nvcc = tmp_path / version / "nvcc"
        nvcc.parent.mkdir()
        said = f"Cuda compilation tools, release {version}, V{version}"
        nvcc.write_text(f"#!/bin/sh\necho '{said}'\n")
        nvcc.chmod(0o755)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvcc: found none, wanted it on PATH"):
        find_toolkit()
    monkeypatch.setenv("PATH", str(tmp_path / "13.0"))
    assert find_toolkit() == "13.0"
    monkeypatch.setenv("CUDACXX", str(tmp_path / "12.8" / "nvcc"))
    assert find_toolkit() == "12.8"
