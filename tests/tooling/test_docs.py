"""The documentation says what the package has: variables, commands, messages, links, code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torchrun
from typer.main import get_command

from agmm import _env
from agmm.cli.app import app
from agmm.testing.ranks import RankPool

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README = (REPOSITORY / "README.md").read_text()
RESULTS = REPOSITORY / "benchmarks" / "results"
TROUBLESHOOTING = [DOCS / "troubleshooting.md", *sorted((DOCS / "troubleshooting").glob("*.md"))]


def _id(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# --- environment variables ---


def test_readme_has_each_variable_as_the_package_defines_it() -> None:
    text = (REPOSITORY / "README.md").read_text()
    section = text.split("[start:environment]")[1].split("[end:environment]")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "| `" in line]
    found = [tuple(cell.replace("`", "") for cell in row) for row in rows]
    kinds = (("run", _env.RUN_TIME), ("build", _env.BUILD_TIME))
    assert found == [
        (variable.name, when, variable.default or "–", variable.meaning.replace("`", ""))
        for when, variables in kinds
        for variable in variables
    ]


def test_pages_speak_of_all_variables_and_no_others() -> None:
    known = {variable.name for variable in (*_env.RUN_TIME, *_env.BUILD_TIME)}
    of_cmake = {"AGMM_FAULT", "AGMM_STRESS_DELAYS", "AGMM_VIRTUAL_LINK"}
    known |= {*_env.TEST_TIME, *of_cmake}
    found = {name for page in PAGES for name in re.findall(r"\bAGMM_[A-Z_]+\b", page.read_text())}
    assert found | {"CUTLASS_DIR"} == known


# --- commands ---


def test_each_command_and_option_is_described() -> None:
    text = (REPOSITORY / "docs" / "reference" / "commands.md").read_text()
    sections = dict(re.findall(r"^## agmm (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    assert set(sections) == set(commands)
    for name, command in commands.items():
        options = {o for parameter in command.params for o in parameter.opts if o.startswith("--")}
        missing = {o for o in options if f"`{o}" not in sections[name]} - {"--help"}
        assert not missing, f"agmm {name}"


# --- messages ---

_CALLS = {
    *("warn", "warn_once", "_warn", "_fall_back"),
    *("AgmmError", "InvalidArgument", "RuntimeError", "TableError", "Unsupported"),
}


_NO_MESSAGES = {"why_cpu", "why_not_fused"}
"""What commands say of this machine. Other functions why_… give reasons of warnings and errors."""


def _gives_a_reason(name: str) -> bool:
    return name.startswith("why_") and name not in _NO_MESSAGES


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr)


def _template(node: ast.expr) -> str:
    """A message with `…` for what it fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "…"


def _messages(source: str) -> Iterator[str]:
    """What is raised, warned of, or given as a reason why a call is not fused."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and _gives_a_reason(node.name.lstrip("_")):
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            yield from (_template(value) for value in returned if value and _is_text(value))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
            yield from (_template(node.value),) if _is_text(node.value) else ()
        if isinstance(node, ast.Call) and node.args:
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in _CALLS:
                yield _template(node.args[0])


def _subject(message: str) -> str | None:
    """What a reader would look up: of "argument: found …" the argument, else the first words. None
    where the message is put together elsewhere, or begins with what was found."""
    begin = re.split(r": | \(|…", message, maxsplit=1)[0].strip()
    return begin or None


def _undescribed(messages: Iterator[str], text: str) -> list[str]:
    return sorted({m for m in messages if (s := _subject(m)) is not None and f"`{s}" not in text})


@pytest.mark.parametrize(
    "path",
    [p for p in sorted((REPOSITORY / "python" / "agmm").rglob("*.py")) if "testing" not in p.parts],
    ids=_id,
)
def test_each_message_is_in_troubleshooting(path: Path) -> None:
    text = "".join(page.read_text() for page in TROUBLESHOOTING)
    assert _undescribed(_messages(path.read_text()), text) == []


def test_a_new_message_is_missed() -> None:
    source = "raise InvalidArgument(f'colour: found {x}, wanted red')\nwarnings.warn('agmm is sad')"
    assert _undescribed(_messages(source), "| `group` |") == [
        "agmm is sad",
        "colour: found …, wanted red",
    ]
    assert _undescribed(_messages(source), "| `colour`, `agmm is sad` |") == []


# --- links ---


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"[\s-]+", "-", kept.strip().lower())


def _anchors(page: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {_slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), link
        assert not anchor or anchor in _anchors(target), link


_NAMED = re.compile(r"(?<![\w/.-])(?:docs|tests|benchmarks|tools|examples|src)/[\w/-]+\.\w+")


def _files_named(text: str) -> set[str]:
    """Files of the repository by their paths in it, as comments and pages name them."""
    return {name for name in _NAMED.findall(text) if "*" not in name}


@pytest.mark.parametrize("folder", ["src", "include", "python", "docs", "benchmarks", "examples"])
def test_files_that_are_named_are_there(folder: str) -> None:
    kinds = {".hpp", ".cu", ".cpp", ".py", ".md"}
    paths = [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in kinds]
    assert paths
    missing = {
        (_id(path), name)
        for path in paths
        for name in _files_named(path.read_text())
        if not (REPOSITORY / name).is_file()
    }
    assert not missing


def test_a_file_that_is_not_there_is_found() -> None:
    assert _files_named("as (docs/gone.md) says; /docs/x.md; a/src/b.hpp") == {"docs/gone.md"}


# --- figures ---


def _rows(text: str) -> list[list[str]]:
    """The cells of a table below its head."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.parametrize("name", ["nvidia-h200-x2", "nvidia-h200-x4", "nvidia-h100-x4"])
def test_times_of_the_op_are_those_of_the_report(name: str) -> None:
    text = (REPOSITORY / "docs" / "performance.md").read_text()
    section = text.split(f"(`{name}.json`")[1].split("\n\n")[1]
    report = json.loads((RESULTS / f"{name}.json").read_text())
    assert report["commit"] in text
    wanted = []
    for shape in report["shapes"]:
        us = {name: way["median_us"] for name, way in shape["ways"].items()}
        others = {n: v for n, v in us.items() if not n.startswith(("roof", "agmm"))}
        with_A = {
            n: v for n, v in others.items() if not re.fullmatch("torch-decomposed(-graph)?", n)
        }
        best = min(others.values())
        times = [f"{time:.1f}" for time in (us["roof"], best, us["agmm"])]
        ratios = [f"{ratio:.2f}" for ratio in (us["agmm"] / us["roof"], best / us["agmm"])]
        times_A = [f"{time:.1f}" for time in (min(with_A.values()), us["agmm-A"])]
        wanted.append([f"{shape['M']} × {shape['N']} × {shape['K']}", *times, *ratios, *times_A])
    assert _rows(section) == wanted


def test_times_of_scatters_are_those_of_the_report() -> None:
    section = (DOCS / "performance-sums.md").read_text().split("## The second half")[1]
    report = json.loads((RESULTS / "scatter" / "nvidia-h200-x2.json").read_text())
    assert report["commit"] in section
    wanted = []
    for shape in report["shapes"]:
        us = {name: way["median_us"] for name, way in shape["ways"].items()}
        times = [f"{us[n]:.1f}" for n in ("roof", "unfused", "torch-fused-graph", "agmm")]
        ratio = f"{us['agmm'] / us['roof']:.2f}"
        wanted.append([f"{shape['M']} × {shape['N']} × {shape['K']}", *times, ratio])
    table = section.split("(`scatter/nvidia-h200-x2.json`")[1].split("\n\n")[1]
    assert _rows(table) == wanted


def test_times_of_the_block_are_those_of_the_report() -> None:
    text = (DOCS / "performance-block.md").read_text()
    names = ("nccl", "nccl-compiled", "torch-async-tp", "agmm", "agmm-compiled", "agmm-async-tp")
    report = RESULTS / "block" / "nvidia-h200-x4-save-gathered.json"
    for entry in json.loads(report.read_text())["shapes"]:
        times = [f"{entry['ways'][name]['median_us']:.0f}" for name in names]
        assert f"| {entry['tokens']} | {entry['pass']} | {' | '.join(times)} |" in text


RANGES = {
    "all-gather + matmul": ("nvidia-h200-x4", "nvidia-h100-x4", "nvidia-h200-x2"),
    "matmul + reduce-scatter": tuple(
        f"scatter/{name}" for name in ("nvidia-h200-x4", "nvidia-h100-x4", "nvidia-h200-x2")
    ),
}
"""The reports behind each row of the README's table of gains, in the order of its columns."""


@pytest.mark.parametrize("op", RANGES)
def test_ranges_of_the_readme_are_those_of_the_reports(op: str) -> None:
    (row,) = re.findall(rf"^\| {re.escape(op)}, (\d+) shapes \| (.*) \|$", README, re.MULTILINE)
    shapes, cells = int(row[0]), re.findall(r"([\d.]+) to ([\d.]+) ×", row[1])
    for name, cell in zip(RANGES[op], cells, strict=True):
        entries = json.loads((RESULTS / f"{name}.json").read_text())["shapes"]
        ways = [entry["ways"] for entry in entries]
        gains = [way["unfused"]["median_us"] / way["agmm"]["median_us"] for way in ways]
        assert (shapes, *cell) == (len(entries), f"{min(gains):.2f}", f"{max(gains):.2f}")


def test_readme_says_the_gains_over_the_fastest_other_way() -> None:
    (cells,) = re.findall(
        r"^\| the same, against the fastest .*? \| (.*) \|$", README, re.MULTILINE
    )
    gains = re.findall(r"([\d.]+) to ([\d.]+) ×", cells)
    for name, cell in zip(RANGES["all-gather + matmul"], gains, strict=True):
        text = (DOCS / "performance.md").read_text()
        rows = _rows(text.split(f"(`{name}.json`")[1].split("\n\n")[1])
        ratios = sorted(float(row[5]) for row in rows)
        assert cell == (f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}")


def test_gains_of_the_block_are_those_of_the_report() -> None:
    text = (DOCS / "performance-block.md").read_text()
    report = RESULTS / "block" / "nvidia-h200-x4-save-gathered.json"
    for entry in json.loads(report.read_text())["shapes"]:
        us = {name: way["median_us"] for name, way in entry["ways"].items()}
        compiled = min(us["agmm-compiled"], us["agmm-async-tp"])
        pairs = (("nccl", us["agmm"]), ("nccl-compiled", compiled), ("torch-async-tp", compiled))
        gains = " | ".join(f"{us[name] / ours:.2f}" for name, ours in pairs)
        assert f"| {entry['tokens']} | {entry['pass']} | {gains} |" in text


def test_each_public_header_is_in_the_table() -> None:
    text = (DOCS / "reference" / "cpp.md").read_text()
    headers = {path.name for path in (REPOSITORY / "include" / "agmm").glob("*.hpp")}
    assert set(re.findall(r"^\| `(\w+\.hpp)` \|", text, re.MULTILINE)) == headers


# --- the site ---


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """The plugin that lets files be searched names a script of another site, unless one of such a
    name is given."""
    found = re.search(
        r"^  polyfills: \[(\S*iframe-worker\S*)\]",
        (REPOSITORY / "mkdocs.yml").read_text(),
        re.MULTILINE,
    )
    assert found is not None
    for script in (found[1], "site.css"):
        assert "://" not in (DOCS / script).read_text()


# --- code ---


def _blocks() -> Iterator[tuple[str, bool, str]]:
    """Each block's name, whether it runs as it stands, and its code."""
    pattern = re.compile(r"^(<!-- run -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        for i, (run, code) in enumerate(pattern.findall(page.read_text())):
            yield f"{_id(page)}-{i}", bool(run), code


BLOCKS = list(_blocks())


@pytest.mark.parametrize("code", [b[2] for b in BLOCKS], ids=[b[0] for b in BLOCKS])
def test_code_uses_what_there_is(code: str) -> None:
    """It compiles, and what it takes from agmm is there and has such arguments."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agmm"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(submodule), submodule
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("agmm."):
            found: Any = importlib.import_module("agmm")
            for name in ast.unparse(node.func).split(".")[1:]:
                found = getattr(found, name)
            names = [keyword.arg for keyword in node.keywords if keyword.arg]
            inspect.signature(found).bind(*node.args, **dict.fromkeys(names))


RUN = [block for block in BLOCKS if block[1]]


def test_code_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    name, _, code = RUN[0]
    assert name.startswith("README.md")
    script = tmp_path / "first_call.py"
    script.write_text(code)
    process = torchrun.run(tmp_path, ["--nproc-per-node=2"], [str(script)])
    assert process.returncode == 0, process.stdout + process.stderr
    assert "agmm takes the unfused path" not in process.stderr


def _run_as_under_torchrun(code: str, port: int) -> None:
    """In a rank that has no group yet, and the variables by which torchrun's ranks find another."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    warnings.simplefilter("error")
    exec(compile(code, "documentation", "exec"), {})


@pytest.mark.parametrize("code", [b[2] for b in RUN[1:]], ids=[b[0] for b in RUN[1:]])
def test_code_runs_on_two_ranks(code: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with RankPool(2) as pool:
        pool.run(_run_as_under_torchrun, code, port)


PROGRAMS = [page for page in PAGES if "<!-- program -->" in page.read_text()]


@pytest.mark.parametrize("page", PROGRAMS, ids=_id)
def test_a_tutorial_is_one_program(page: Path) -> None:
    """The blocks of the page that are marked run one after the other, as a reader puts them into a
    file, and agmm serves their calls."""
    pattern = re.compile(r"^<!-- program -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = pattern.findall(page.read_text())
    assert len(blocks) == page.read_text().count("<!-- program -->")
    served = 'assert "agmm\'s CPU backend" in str(agmm.status())'
    test_code_runs_on_two_ranks("\n\n".join([*blocks, served]))
