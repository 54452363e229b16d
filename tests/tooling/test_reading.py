"""Pages are short, and so are their sentences: docs/dev/writing.md has the rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def _id(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


PROOFS = {"agreement", "collectives", "no-ring", "scales", "scatter", "sm-push", "waiting"}
MOST_WORDS, LONGEST_MEAN = 1500, 18.0
"""What a reader takes in at one sitting, and the mean sentence of a page in words: issue 57."""


def _prose(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without code, tables and headings."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not block.lstrip().startswith(("#", "|", "![", "--8<--")):
            yield re.sub(r"\s+", " ", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)).strip()


def _sentences(text: str) -> list[int]:
    """The number of words of each sentence. A code span is one word."""
    found = []
    for paragraph in _prose(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", paragraph))
        for sentence in re.split(r"(?<=[.!?:])\*{0,2}\)?\s+(?=[A-Z\"(*])", plain):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            found += [len(words)] if words else []
    return found


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    """Proofs may be long, and pages for maintainers may have longer sentences. Lists that are
    rendered, and the README's table of variables, have no end that an author sets."""
    text = page.read_text()
    if page.parent.name != "dev":
        lengths = _sentences(text)
        assert sum(lengths) <= LONGEST_MEAN * max(len(lengths), 1)
    is_proof = page.parent.name == "dev" and page.stem in PROOFS
    if not is_proof and "<!-- Rendered from" not in text:
        read = re.sub(r"\[start:environment\].*\[end:environment\]", "", text, flags=re.DOTALL)
        assert len(read.split()) <= MOST_WORDS


def test_sentences_are_counted() -> None:
    text = (
        "# A heading\n\nOne `a b c` two. It is **bold.** And\nthree\n\n- An item: Yes.\n\n| a | b |"
    )
    assert _sentences(text) == [3, 3, 2, 2, 1]
