"""Docstrings and comments are sentences of their own: docs/dev/writing.md has the rule."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "include", "python", "tests", "benchmarks", "examples", "tools")
CXX = {".hpp", ".cpp", ".cu", ".cuh", ".h"}

# First words whose subject stands elsewhere.
_LEANING = re.compile(
    r"(of|those|the same|as|that|such|likewise|whose|also|not|nor|and|but|or"
    r"|which (is|are|was|were|has|have|had|may|can|does|do)"
    r"|so (long|much|many|old|few|do|does|is|are|it is))\b(?!=|\()",
    re.IGNORECASE,
)
_PREPOSITION = re.compile(
    r"(after|among|at|before|behind|beside|between|by|for|from|in|into|like|on|over|since|to|under"
    r"|until|up to|with|within|without)\b",
    re.IGNORECASE,
)
_FEW = 5


def is_fragment(text: str) -> bool:
    """Whether a text begins with words that lean on another, or with a phrase and no sentence."""
    text = " ".join(text.split())
    if _LEANING.match(text):
        return True
    first = re.split(r"[.;:](?: |$)", text, maxsplit=1)[0]
    return bool(_PREPOSITION.match(first)) and len(first.split()) <= _FEW


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The strings that stand alone: of modules, classes and functions, and below attributes."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def _comments(source: str) -> Iterator[tuple[int, int, bool, str]]:
    """Line, column, whether code precedes it, and text of each comment in a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            yield line, column, bool(token.line[:column].strip()), token.string[1:]


def _cxx_comments(source: str) -> Iterator[tuple[int, int, bool, str]]:
    """The equivalent of `_comments` for C++. A `//` within a string counts as code."""
    for number, line in enumerate(source.splitlines(), 1):
        found = re.match(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?!/))*)//+<?(.*)', line)
        if found:
            yield number, len(found[1]), bool(found[1].strip()), found[2]


def _blocks(comments: Iterator[tuple[int, int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Comments without code on their first line; lines one below the other are one text."""
    begin, last, column, beside, lines = 0, -1, -1, False, list[str]()
    for number, at, behind_code, text in comments:
        if number == last + 1 and at == column and not behind_code:
            lines.append(text)
        else:
            if lines and not beside:
                yield begin, " ".join(lines)
            begin, column, beside, lines = number, at, behind_code, [text]
        last = number
    if lines and not beside:
        yield begin, " ".join(lines)


def texts(name: str, source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, each with its line."""
    if name.endswith(".py"):
        yield from _docstrings(source)
        yield from _blocks(_comments(source))
    else:
        yield from _blocks(_cxx_comments(source))


def _files(folder: str) -> list[Path]:
    paths = sorted((REPOSITORY / folder).rglob("*"))
    return [path for path in paths if path.suffix in CXX | {".py"}]


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_are_sentences(folder: str) -> None:
    names = {str(path.relative_to(REPOSITORY)): path for path in _files(folder)}
    assert names
    found = [
        f"{name}:{line}: {' '.join(text.split())[:60]}"
        for name, path in names.items()
        for line, text in texts(name, path.read_text())
        if is_fragment(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "Of one CTA.",
        "Those of `gather`.",
        "The same for a reduce-scatter.",
        "As `measure`.",
        "That this can fail.",
        "Which is traced as a constant.",
        "So long may a call take.",
        "Not by split(), whose views nobody may change.",
        "By rank.",
        "In float64: an error is the op's.",
    ],
)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.py", "def f():\n    '''{}'''\n"),
        ("a.py", "x = 1\n'''{}'''\n"),
        ("a.py", "# {}\nx = 1\n"),
        ("a.hpp", "// {}\nint x;\n"),
        ("a.cu", "int x;  // bytes\n/// {}\nint y;\n"),
    ],
)
def test_a_fragment_is_found(text: str, name: str, form: str) -> None:
    assert [is_fragment(found) for _, found in texts(name, form.format(text))][-1]


@pytest.mark.parametrize(
    "text",
    [
        "Return the sum.",
        "The bytes of one chunk.",
        "Whether a peer has called.",
        "What the ranks tell each other.",
        "It waits for the store, which ends it.",
        "In a virtual machine the other end may be a switch that cannot be seen.",
        "Asynchronous copies need no fence.",
    ],
)
def test_a_sentence_and_a_name_are_not(text: str) -> None:
    assert not is_fragment(text)


def test_a_comment_beside_code_may_be_a_phrase() -> None:
    cxx = 'int rows;  // of a chunk\n           // of the call\nconst char* at = "//of";\n'
    assert list(texts("a.hpp", cxx)) == []
    assert list(texts("a.py", "rows = 1  # of a chunk\n")) == []
