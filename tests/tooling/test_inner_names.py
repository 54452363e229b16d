"""Tests do not know the private names of agmm's modules: a change of the inside breaks none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# Modules, of which the underscore says that they are not for users.
MODULES = {"_core", "_env", "_installation"}
PATCHES = {"setattr", "setitem", "delattr", "object"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in MODULES


def private_names(source: str) -> Iterator[str]:
    """The private names of agmm that a test imports, takes from what it imports of agmm, or
    replaces there."""
    tree = ast.parse(source)
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agmm":
            own |= {name.asname or name.name for name in node.names}
            for name in [*(node.module or "").split("."), *(name.name for name in node.names)]:
                if _is_private(name):
                    yield name
        elif isinstance(node, ast.Import):
            own |= {"agmm" for name in node.names if name.name.split(".")[0] == "agmm"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if isinstance(node.value, ast.Name | ast.Attribute) and _root(node.value) in own:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in PATCHES and len(node.args) > 1 and _root(node.args[0]) in own:
                replaced = node.args[1]
                if isinstance(replaced, ast.Constant) and _is_private(str(replaced.value)):
                    yield str(replaced.value)
            elif node.func.attr in {"setattr", "patch"} and node.args:
                place = node.args[0]
                if isinstance(place, ast.Constant) and str(place.value).startswith("agmm."):
                    yield from filter(_is_private, str(place.value).split("."))


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


FILES = sorted(TESTS.rglob("*.py"))


def test_no_test_knows_them() -> None:
    assert len(FILES) > 100
    found = [f"{path.name}: {name}" for path in FILES for name in private_names(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from agmm.ops.paths import _key", "_key"),
        ("from agmm.nn._held import Held", "_held"),
        ("from agmm.ops import paths\nx = paths._calls", "_calls"),
        ("import agmm\nagmm.ops.paths._calls.clear()", "_calls"),
        ("from agmm.ops import paths\nmonkeypatch.setattr(paths, '_calls', {})", "_calls"),
        ("from agmm.ops import paths\nmock.patch.object(paths, '_calls')", "_calls"),
        ("mock.patch('agmm.ops.paths._calls')", "_calls"),
    ],
)
def test_each_way_to_one_is_seen(source: str, name: str) -> None:
    assert list(private_names(source)) == [name]


def test_others_names_are_not_agmms() -> None:
    source = "import torch\nfrom agmm import _core\nx = torch._C, _core.kernels, mine._part"
    assert list(private_names(source)) == []
