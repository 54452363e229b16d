"""Which Python module may import which: pyproject.toml says it to import-linter, which `make lint`
runs. Here: that each of its contracts can fail, and what it cannot see."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "python" / "agmm"

needs_import_linter = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None,
    reason="import-linter is not installed (the extra lint; `make lint` has it)",
)


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """The contracts of pyproject.toml, asked of the package in a folder."""
    script = "from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "--no-cache",
            "--config",
            str(REPOSITORY / "pyproject.toml"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@needs_import_linter
@pytest.mark.parametrize(
    ("path", "text", "contract"),
    [
        ("runtime/cpu.py", "from agmm.planning import plans", "a call goes down"),
        ("planning/plans.py", "from agmm.ops import pipeline", "a call goes down"),
        ("ops/pipeline.py", "from agmm.testing import ranks", "a call goes down"),
        ("nn/styles.py", "from agmm.integrations import async_tp", "a call goes down"),
        ("bench/ways.py", "from agmm.cli import terminal", "a call goes down"),
        ("newcomer.py", "import math", "a call goes down"),
        ("planning/legality.py", "import torch.distributed", "a plan needs no torch"),
        ("ops/checks.py", "def draw() -> None:\n    import matplotlib", "an op needs no extra"),
        ("runtime/devices.py", "import cuda.bindings.driver", "an op needs no extra"),
        ("bench/reports.py", "from rich.table import Table", "tables of rich"),
        ("testing/cases.py", "import hypothesis", "test tools stay in tests"),
        ("ops/checks.py", "from agmm.ops import pipeline", "no package goes in circles"),
    ],
)
@pytest.mark.slow
def test_each_contract_can_fail(tmp_path: Path, path: str, text: str, contract: str) -> None:
    copied = tmp_path / "agmm"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (copied / path).open("a") as file:
        file.write(f"\n{text}\n")
    done = _lint(tmp_path)
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    if path == "newcomer.py":  # a module without a place
        broken = [contract] if "newcomer" in done.stdout else []
    assert any(line.startswith(contract) for line in broken), done.stdout
    assert done.returncode == 1


@needs_import_linter
def test_the_contracts_are_kept() -> None:
    done = _lint(PACKAGE.parent)
    assert done.returncode == 0, done.stdout + done.stderr


BELOW_BENCH = ("collectives", "integrations", "nn", "ops", "planning", "runtime")


def _taken_from_the_root(path: Path) -> list[str]:
    """What a module takes from `agmm` itself, which imports all that users see. import-linter
    cannot tell it from `agmm._core`, which is no Python."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "agmm"]
        elif isinstance(node, ast.ImportFrom) and node.module == "agmm" and not node.level:
            modules = {entry.name.removesuffix(".py") for entry in PACKAGE.iterdir()}
            found += [a.name for a in node.names if a.name not in modules | {"_core"}]
    return found


@pytest.mark.parametrize("package", BELOW_BENCH)
def test_what_an_op_needs_does_not_import_what_users_see(package: str) -> None:
    paths = [*(PACKAGE / package).rglob("*.py")]
    assert paths
    assert {path: found for path in paths if (found := _taken_from_the_root(path))} == {}


def test_an_import_of_what_users_see_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from agmm import _core, errors, all_gather_matmul\ndef late():\n    import agmm\n"
    )
    assert _taken_from_the_root(planted) == ["all_gather_matmul", "agmm"]


def test_the_page_on_the_package_names_what_there_is() -> None:
    """Every package, in the order of the layers."""
    page = (REPOSITORY / "docs" / "dev" / "python.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page.partition("\n## ")[0], re.MULTILINE)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(found) == packages
    config = (REPOSITORY / "pyproject.toml").read_text()
    layers = re.findall(r'"(.*)"', config.partition("layers = [")[2].partition("]")[0])
    order = [name for layer in layers for name in layer.split(" | ") if name in packages]
    assert found == order


def _without_docstring(folder: Path) -> list[str]:
    paths = sorted(folder.rglob("*.py"))
    return [path.name for path in paths if not ast.get_docstring(ast.parse(path.read_text()))]


def test_each_module_says_what_it_is_for(tmp_path: Path) -> None:
    assert _without_docstring(PACKAGE) == []
    (tmp_path / "planted.py").write_text("# What this is for.\nx = 1\n")
    assert _without_docstring(tmp_path) == ["planted.py"]


def test_no_module_is_long() -> None:
    """More than 400 lines are several things: a module each."""
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 400} == {}
