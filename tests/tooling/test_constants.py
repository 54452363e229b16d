"""Each constant of the package says where it comes from: in a comment, or in the text below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "python" / "agmm"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_core.pyi")

OBVIOUS = {0, 1, -1}


def _numbers(node: ast.expr) -> list[object]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]


def _is_number(node: ast.expr) -> bool:
    """Written out, by arithmetic at most: no table of names, no call."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Tuple) and all(map(_is_number, node.elts))


def unexplained(source: str) -> list[str]:
    """The constants beside which nothing is said. One text serves those of one block: without an
    empty line between them."""
    lines = source.splitlines()
    body = ast.parse(source).body
    found: list[str] = []
    for i, node in enumerate(body):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if not isinstance(target, ast.Name) or not target.id.isupper() or not _is_number(value):
            continue
        if set(_numbers(value)) <= OBVIOUS:
            continue
        first = node.lineno
        while first > 1 and lines[first - 2].strip():
            first -= 1
        last = node.lineno
        while last < len(lines) and lines[last].strip():
            last += 1
        block = lines[first - 1 : last]
        follows = body[i + 1] if i + 1 < len(body) else None
        is_text = isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant)
        if not is_text and not any("#" in line or '"""' in line for line in block):
            found.append(target.id)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_constants_say_where_they_come_from(path: Path) -> None:
    assert unexplained(path.read_text()) == []


def test_a_constant_without_a_word_is_found() -> None:
    assert unexplained("A = 3\n\nB = 4  # seconds\n\nC = 5\n'''Why.'''\n\n_D: int = 6 << 2\n") == [
        "A",
        "_D",
    ]
    assert unexplained("A = 0\nNAMES = {'a': 7}\nlower = 3\n") == []
