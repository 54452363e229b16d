"""An installation that lacks something. Commands say what in a line where torch, the core or an
extra is missing or broken; ops need torch alone; what is imported is declared."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import agmm
from agmm import _installation

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
BROKEN_CORE = 'raise ImportError("libfoo.so.1: cannot open shared object file")\n'
STALE_CORE = '__version__ = "0.0.1"\n'
BROKEN_TORCH = 'raise ImportError("libtorch.so: undefined symbol: _Z3foo")\n'


def _missing(package: str) -> str:
    return f"raise ModuleNotFoundError(\"No module named '{package}'\", name={package!r})\n"


NO_TORCH = _missing("torch")

Run = Callable[..., subprocess.CompletedProcess[str]]


def _entry_point() -> str:
    found = re.search(
        r'\[project\.scripts\]\nagmm = "([\w.]+):(\w+)"',
        (REPOSITORY / "pyproject.toml").read_text(),
    )
    assert found is not None
    return f"import sys\nfrom {found[1]} import {found[2]}\nsys.exit({found[2]}())\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a fresh process, as a script and by -m, with some modules replaced: a text
    is the module's source, None takes the core away."""

    def run(*arguments: str, how: str, **modules: str | None) -> subprocess.CompletedProcess[str]:
        source = Path(agmm.__file__).parent
        if "core" in modules:
            ignored = shutil.ignore_patterns("_core.*.so", "__pycache__")
            shutil.copytree(source, tmp_path / "agmm", ignore=ignored)
        else:
            (tmp_path / "agmm").symlink_to(source)
        for name, text in modules.items():
            if text is not None:
                file = "agmm/_core.py" if name == "core" else f"{name}.py"
                (tmp_path / file).write_text(text)
        script = tmp_path / "bin" / "agmm"
        script.parent.mkdir()
        script.write_text(_entry_point())
        command = [str(script)] if how == "script" else ["-m", "agmm"]
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *command, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path / "bin",
            env={**os.environ, "PYTHONPATH": path, "AGMM_CACHE": "off"},
        )

    return run


KINDS: dict[str, tuple[dict[str, str | None], str, str]] = {
    "no torch": (
        {"torch": NO_TORCH},
        "torch does not load: ModuleNotFoundError: No module named 'torch'",
        "install torch",
    ),
    "broken torch": (
        {"torch": BROKEN_TORCH},
        "torch does not load: ImportError: libtorch.so: undefined symbol: _Z3foo",
        "install torch",
    ),
    "no core": (
        {"core": None},
        "agmm._core does not load: ModuleNotFoundError: No module named 'agmm._core'",
        "reinstall it",
    ),
    "broken core": (
        {"core": BROKEN_CORE},
        "agmm._core does not load: ImportError: libfoo.so.1: cannot open shared object file",
        "reinstall it",
    ),
    "stale core": (
        {"core": STALE_CORE},
        "agmm._core does not load: it is stale, it lacks CpuWorkspace",
        "reinstall it",
    ),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("no torch", "script"),
        pytest.param("no torch", "-m", marks=pytest.mark.slow),
        ("broken torch", "script"),
        ("no core", "-m"),
        pytest.param("broken core", "script", marks=pytest.mark.slow),
        pytest.param("stale core", "script", marks=pytest.mark.slow),
    ],
)
def test_doctor_says_what_is_wrong(run: Run, kind: str, how: str) -> None:
    modules, line, cure = KINDS[kind]
    done = run("doctor", how=how, **modules)
    assert "Traceback" not in done.stderr
    assert (done.returncode, "BROKEN" in done.stdout, cure in done.stdout) == (1, True, True)
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"agmm: {line}")
    assert "says more" not in said


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("no torch", "bench"),
        pytest.param("broken torch", "tune", marks=pytest.mark.slow),
        ("no core", "explain"),
        pytest.param("stale core", "bench", marks=pytest.mark.slow),
    ],
)
def test_every_command_says_what_is_wrong(run: Run, kind: str, argument: str) -> None:
    modules, line, _ = KINDS[kind]
    done = run(argument, how="script", **modules)
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"agmm: {line}")
    assert said.endswith("; `agmm doctor` says more")
    assert (done.returncode, done.stdout) == (1, "")


SHAPE = ("--m", "4096", "--n", "3584", "--k", "8192", "--tp", "4", "--gpu", "h200")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Usage: agmm"),
        (["--version"], "agmm "),
        ([], "Usage: agmm"),
        (["tune", "-h"], "Usage: agmm tune"),
        (["explain", *SHAPE], "plan: "),
        (["explain", *SHAPE, "--dtype", "float8_e4m3fn"], "plan: "),
        (["explain", "--m", "64", "--k", "8192", "--tp", "8", "--op", "all_reduce"], "plan: "),
    ],
    ids=["help", "version", "nothing", "help of a command", "plan", "fp8 plan", "all_reduce"],
)
def test_what_needs_no_torch_does_not_wait_for_it(
    run: Run, arguments: list[str], said: str
) -> None:
    done = run(*arguments, how="script", torch=BROKEN_TORCH)
    assert said in done.stdout + done.stderr
    assert "torch does not load" not in done.stderr and "Traceback" not in done.stderr


def test_a_sound_installation_says_nothing(run: Run) -> None:
    done = run("--version", how="-m")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"agmm {_installation.version()}\n"


@pytest.mark.parametrize(
    ("how", "package", "argument"),
    [
        ("script", "typer", "--help"),
        pytest.param("-m", "rich", "demo", marks=pytest.mark.slow),
    ],
)
def test_commands_name_the_extra_that_is_missing(
    run: Run, how: str, package: str, argument: str
) -> None:
    done = run(argument, how=how, **{package: _missing(package)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"agmm: {package} is not installed; pip install 'agmm[cli]' brings it\n")


@pytest.mark.parametrize(
    "package", ["typer", pytest.param("rich", marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
def test_doctor_needs_no_extra(run: Run, package: str) -> None:
    done = run("doctor", how="script", **{package: _missing(package)})
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"agmm: {package} is not installed; pip install 'agmm[cli]' brings it\n"
    assert {"Python", "torch", "agmm"} <= set(done.stdout.split())
    if package == "rich":  # whose tables the lines take the place of
        assert {line.split()[0] for line in done.stdout.splitlines()} <= {"ok", "note"}


def test_without_torch_and_extras_both_are_named(run: Run) -> None:
    done = run("doctor", how="script", torch=NO_TORCH, typer=_missing("typer"))
    assert done.returncode == 1
    assert [line.partition(" ")[2][:9] for line in done.stderr.splitlines()] == [
        "torch doe",
        "typer is ",
    ]


BARE = """
import sys
import warnings

import torch  # which warns itself where numpy is missing
import torch.distributed as dist

warnings.simplefilter("error")
import agmm
from agmm.bench import runner
from agmm.bench.options import Options
from agmm.nn import ColumnParallelLinear
from agmm.planning.shapes import Shape
from agmm.testing.ranks import RankPool


def work():
    rank = float(dist.get_rank())
    gathered = agmm.all_gather_matmul(torch.full((2, 8), rank), torch.eye(8))
    scattered = agmm.matmul_reduce_scatter(torch.ones(4, 8), torch.eye(8))
    outputs = ColumnParallelLinear(8, 8)(torch.ones(2, 8))
    outputs.sum().backward()
    return gathered[:, 0].tolist(), scattered.shape[0]


if __name__ == "__main__":
    with RankPool(2) as pool:
        assert pool.run(work) == [([0.0, 0.0, 1.0, 1.0], 2)] * 2
    options = Options(device="cpu", world_size=2, shapes=[Shape(8, 8, 8)], samples=1)
    (shape,) = runner.run(options.resolved())["shapes"]
    assert shape["ways"]["agmm"]["median_us"] > 0, shape
    print(sorted(set(sys.modules) & {"cuda", "matplotlib", "numpy", "rich", "typer"}))
"""


@pytest.mark.slow
def test_an_op_needs_torch_alone(tmp_path: Path) -> None:
    """A layer and a measurement, which the commands only show, need torch alone too."""
    for package in ("cuda", "matplotlib", "numpy", "rich", "typer"):
        (tmp_path / f"{package}.py").write_text(_missing(package))
    (tmp_path / "bare.py").write_text(BARE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "bare.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "AGMM_CACHE": "off"},
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def _declared() -> dict[str, set[str]]:
    """The required packages by extra; those that are always required by the empty one."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {
        extra: {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
        for extra, requirements in {
            "": project["dependencies"],
            **project["optional-dependencies"],
        }.items()
    }


SERVED = {"megatron", "peft", "torchtitan", "transformers", "vllm"}
"""The packages that an integration serves: who uses it has them already."""


def _imported() -> set[str]:
    """The packages that agmm imports, by any of its modules, but for those that it serves."""
    names: set[str] = set()
    for path in Path(agmm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                names |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    packages = {name.partition(".")[0] for name in names}
    return packages - set(sys.stdlib_module_names) - {"agmm"} - SERVED


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    declared, extras = _declared(), _installation.EXTRAS
    distributions = {"cuda": "cuda-bindings"}
    brought: dict[str, set[str]] = {extra: set() for extra in ("", *extras.values())}
    for package in _imported():
        brought[extras.get(package, "")].add(distributions.get(package, package))
    assert {extra: declared[extra] for extra in brought} == brought


def test_all_brings_every_extra_that_a_user_may_want() -> None:
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    wanted = ",".join(sorted(set(_installation.EXTRAS.values())))
    assert f'all = ["agmm[{wanted}]"]' in pyproject


def test_doctor_as_json_without_torch(run: Run) -> None:
    done = run("doctor", "--json", how="-m", torch=NO_TORCH)
    assert done.returncode == 1
    assert '"torch": null' in done.stdout


def test_users_get_the_error_itself(tmp_path: Path) -> None:
    """Only commands go on: an `import agmm` in a program fails as any other."""
    (tmp_path / "torch.py").write_text(BROKEN_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", "import agmm"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: libtorch.so: undefined symbol: _Z3foo"


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    slow = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "agmm", "demo"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "agmm: interrupted\n")


@pytest.mark.parametrize(
    ("orig_argv", "argv", "wanted"),
    [
        (["python", "/usr/bin/agmm", "demo"], ["/usr/bin/agmm", "demo"], True),
        (["python", "-u", "-m", "agmm", "demo"], ["-m", "demo"], True),
        (["python", "-m", "pytest", "agmm"], ["-m", "agmm"], False),
        (["python", "train.py", "agmm"], ["train.py", "agmm"], False),
        (["python"], [""], False),
        ([], [], False),
    ],
)
def test_what_is_a_command(
    monkeypatch: pytest.MonkeyPatch, orig_argv: list[str], argv: list[str], wanted: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    monkeypatch.setattr(sys, "argv", argv)
    assert _installation.is_command() is wanted


def test_a_core_of_another_version_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _installation.fault() is None
    monkeypatch.setattr(agmm._core, "__version__", "0.0.1")
    found = _installation.fault()
    assert found == f"agmm._core is stale: found version 0.0.1, wanted {_installation.version()}"


FRAMES = "Traceback (most recent call last):\n  File 'a', line 1, in f\n    f()\n"


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (f"rank 0: {FRAMES}E: CUDA error: bad\nCompile with more.\n", "E: CUDA error: bad"),
        (
            f"{FRAMES}KeyError: 1\n\nDuring this another:\n\n{FRAMES}E: what counts",
            "E: what counts",
        ),
        ("ended with exit code 9\nlast words\n", "last words"),
        ("", ""),
    ],
    ids=["advice behind it", "two", "none", "nothing"],
)
def test_of_a_traceback_what_was_raised_is_told(told: str, line: str) -> None:
    assert _installation.raised_line(told) == line
