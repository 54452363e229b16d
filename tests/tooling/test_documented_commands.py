"""What README and documentation show and no test can run: the options, values, modules and targets
of commands are there, and programs for GPUs run dry."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.main import get_command

from agmm.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
_ENDS = {"|", "&&", ";", ">", "2>&1"}


def _lines(text: str) -> Iterator[str]:
    """The lines of blocks without code of a language, and code spans that hold a command."""
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose))


def _words(line: str) -> list[str]:
    """The words of a command without variables in front and what a shell does with its output;
    nothing for a line that only looks like one."""
    if "..." in line.split() or "…" in line:
        return []
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    ends = [i for i, word in enumerate(words) if word in _ENDS]
    return words[: ends[0]] if ends else words


def _of_agmm(words: list[str]) -> list[str] | None:
    """The arguments of `agmm`, however it is started."""
    if words[:1] == ["agmm"]:
        return words[1:]
    for i in range(len(words) - 1):
        if words[i : i + 2] == ["-m", "agmm"] and words[0] in ("python", "torchrun"):
            return words[i + 2 :]
    return None


USAGE_ERROR: Any = typer.BadParameter.__base__
"""The base of all errors of arguments, of the click that typer holds or depends on."""
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def why_not(line: str) -> str | None:
    """Why a documented command cannot be as it stands, or None."""
    words = _words(line)
    arguments = _of_agmm(words)
    if arguments and arguments[0] in COMMANDS and "--help" not in arguments:
        try:
            COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])
        except USAGE_ERROR as error:
            is_named_alone = arguments[-1].startswith("--") and "requires an arg" in str(error)
            return None if is_named_alone else str(error) or repr(error)
        return None
    if words[:1] == ["make"]:
        targets = [word for word in words[1:] if "=" not in word]
        missing = [one for one in targets if not re.search(rf"^{one}:", MAKEFILE, re.MULTILINE)]
        return f"make: no {missing}" if missing else None
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        found = REPOSITORY.joinpath(*words[2].split("."))
        return None if found.is_dir() or found.with_suffix(".py").is_file() else f"no {words[2]}"
    if words[:1] == ["python"] and words[1:] and words[1].startswith(("benchmarks/", "tools/")):
        return None if (REPOSITORY / words[1]).is_file() else f"no {words[1]}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_documented_commands_can_be_given(page: Path) -> None:
    faults = {line: why_not(line) for line in _lines(page.read_text())}
    assert {line: why for line, why in faults.items() if why is not None} == {}


@pytest.mark.parametrize(
    "line",
    [
        "agmm bench --op all_reduced",
        "AGMM_CACHE=off agmm tune --shape 4x4x4",
        "torchrun --nproc-per-node 2 -m agmm bench --tp none",
        "agmm explain --m many | jq .",
        "make tests",
        "python -m benchmarks.picture docs/images",
        "python benchmarks/group.py --gate",
    ],
)
def test_wrong_commands_are_found(line: str) -> None:
    assert why_not(line) is not None


def test_commands_are_found_on_the_pages() -> None:
    found = [line for page in PAGES for line in _lines(page.read_text()) if _of_agmm(_words(line))]
    assert len(found) > 60
    assert importlib.util.find_spec("agmm.__main__") is not None


# --- programs for GPUs ---

_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    str(page.relative_to(REPOSITORY)): code
    for page in PAGES
    for code in _PROGRAM.findall(page.read_text())
    if 'init_process_group("nccl")' in code
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_for_gpus_run_dry(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of the fake backend, with CPU tensors of a 64th of each size."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    small = re.sub(r"\d{4,}", lambda found: str(int(found[0]) // 64), code)
    there = small.replace(', device="cuda"', "").replace(
        'init_process_group("nccl")', "is_initialized()"
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        exec(compile(there, "documentation", "exec"), {})
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
