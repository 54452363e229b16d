"""What a C++ file may include: the rules, and a check that each of them can fail. Those of Python
are in test_import_contracts.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# What a C++ file may reach, by the name in its #include. A role is a folder of src/.
ROLES = (
    "order",
    "sync",
    "symmetric",
    "transport",
    "collectives",
    "gemm",
    "ops",
    "runtime",
    "cpu",
    "bindings",
)
CXX_KINDS = {
    "torch": r"(torch|ATen|c10)/",
    "python": r"(pybind11/|Python\.h$)",
    "cutlass": r"(cutlass|cute)/",
    "cuda": r"(cuda|cuda_\w+|driver_types|vector_types|nccl)\.h$|(cuda|nv)/",
    "scheduler": r"agmm/persistent_async_input_scheduler\.hpp$",
    "launch": r"agmm/(async_input_mm|fused_\w+|collectives)\.hpp$",
    "transport but push": (
        r"transport/(?!(sm_push|push_(cta|warp)|tile_push(_(return_)?device)?)\.hpp$)"
    ),
    "symmetric but packets": r"symmetric/(?!collective_layout\.hpp$)",
    "testing": "testing/",
    **{role: f"{role}/" for role in ROLES},
}


@dataclass(frozen=True)
class Rule:
    """The files that match `files` reach nothing of the kinds in `forbidden`."""

    files: tuple[str, ...]
    forbidden: tuple[str, ...]


MATMUL = ("gemm", "ops", "launch", "scheduler")
CXX_RULES = {
    "no torch in C++": Rule(("include/**/*", "src/**/*"), ("torch",)),
    "only the bindings know Python": Rule(
        ("include/**/*", *(f"src/{role}/**/*" for role in (*ROLES[:-1], "testing"))),
        ("python", "bindings"),
    ),
    "the bindings know launchers, not kernels": Rule(
        ("src/bindings/**/*",), ("cutlass", "cuda", "scheduler")
    ),
    "order is arithmetic": Rule(
        ("src/order/**/*",), ("cutlass", "cuda", "launch", "scheduler", *ROLES[1:])
    ),
    "sync knows neither transports nor matmuls": Rule(
        ("src/sync/**/*",), ("symmetric", "transport", "runtime", "cpu", *MATMUL)
    ),
    "symmetric memory is laid out without CUDA": Rule(
        ("src/symmetric/**/*",), ("cutlass", "cuda", "transport", "cpu", *MATMUL)
    ),
    "collectives know neither transports nor matmuls": Rule(
        ("src/collectives/**/*",), ("transport", "gemm", "ops", "scheduler", "runtime", "cpu")
    ),
    "transports know no matmul": Rule(("src/transport/**/*",), ("cpu", *MATMUL)),
    "the transports' host code needs no CUTLASS": Rule(
        ("src/transport/*.cpp", "src/transport/all_gather.hpp"), ("cutlass",)
    ),
    "matmuls know of transports what push needs, of collectives what packets do": Rule(
        ("src/gemm/**/*",), ("transport but push", "symmetric but packets", "ops", "runtime", "cpu")
    ),
    "the CPU backend needs no CUDA": Rule(
        ("src/cpu/**/*", "src/sync/*.cpp"), ("cutlass", "cuda", "transport", "runtime", *MATMUL)
    ),
    "public headers include public headers": Rule(
        ("include/agmm/[!p]*.hpp", "include/agmm/problem.hpp"),
        ("cutlass", "cuda", "scheduler", "testing", *ROLES),
    ),
    "the scheduler's header reaches what is installed with it": Rule(
        ("include/agmm/persistent_async_input_scheduler.hpp",),
        ("launch", "symmetric", "transport", "ops", "runtime", "cpu"),
    ),
}


def _files(root: Path, rule: Rule) -> list[Path]:
    found = {path for pattern in rule.files for path in root.glob(pattern) if path.is_file()}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def _reached(root: Path, path: Path) -> Iterator[tuple[str, str]]:
    """Each include that `path` reaches through the project's headers, with the file that has it."""
    seen = {path}
    queue = [path]
    while queue:
        file = queue.pop()
        for name in _includes(file):
            yield name, str(file.relative_to(root))
            for candidate in (root / "include" / name, root / "src" / name):
                if candidate.is_file() and candidate not in seen:
                    seen.add(candidate)
                    queue.append(candidate)


def cxx_violations(root: Path, rule: Rule) -> list[str]:
    """One line for each include in `root` that breaks `rule`."""
    patterns = {kind: re.compile(CXX_KINDS[kind]) for kind in rule.forbidden}
    return [
        f"{path.relative_to(root)}: {name} ({kind}), included by {includer}"
        for path in _files(root, rule)
        for name, includer in _reached(root, path)
        for kind, pattern in patterns.items()
        if pattern.match(name)
    ]


@pytest.mark.parametrize("name", CXX_RULES)
def test_cxx_room(name: str) -> None:
    rule = CXX_RULES[name]
    assert _files(REPOSITORY, rule)
    assert cxx_violations(REPOSITORY, rule) == []


def test_third_party_holds_no_vendored_code() -> None:
    files = [path for path in (REPOSITORY / "third_party").rglob("*") if path.is_file()]
    assert files
    assert [p for p in files if p.suffix not in {".cmake", ".txt", ".md"}] == []


def _plant(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("name", "path", "include"),
    [
        ("no torch in C++", "src/gemm/launch.cu", "<ATen/ATen.h>"),
        ("no torch in C++", "include/agmm/problem.hpp", '"torch/extension.h"'),
        ("only the bindings know Python", "src/cpu/workspace.cpp", "<pybind11/pybind11.h>"),
        ("the bindings know launchers, not kernels", "src/bindings/m.cpp", '"cute/tensor.hpp"'),
        ("order is arithmetic", "src/order/grid.hpp", '"sync/signals.hpp"'),
        ("order is arithmetic", "src/order/grid.hpp", "<cuda_runtime.h>"),
        ("sync knows neither transports nor matmuls", "src/sync/w.hpp", '"transport/stage.hpp"'),
        ("sync knows neither transports nor matmuls", "src/sync/w.hpp", '"gemm/split_k.hpp"'),
        ("symmetric memory is laid out without CUDA", "src/symmetric/l.hpp", "<cuda.h>"),
        (
            "collectives know neither transports nor matmuls",
            "src/collectives/packets.cu",
            '"transport/stage.hpp"',
        ),
        ("transports know no matmul", "src/transport/stage.cu", '"gemm/sm90/chunk_gate.hpp"'),
        ("transports know no matmul", "src/transport/pull.cpp", '"agmm/async_input_mm.hpp"'),
        (
            "the transports' host code needs no CUTLASS",
            "src/transport/pull.cpp",
            '"cutlass/cutlass.h"',
        ),
        (
            "matmuls know of transports what push needs, of collectives what packets do",
            "src/gemm/sm90/mainloop.hpp",
            '"transport/all_gather.hpp"',
        ),
        ("the CPU backend needs no CUDA", "src/cpu/w.cpp", "<cuda_runtime.h>"),
        (
            "public headers include public headers",
            "include/agmm/async_input_mm.hpp",
            '"cutlass/cutlass.h"',
        ),
    ],
)
def test_planted_include_is_found(tmp_path: Path, name: str, path: str, include: str) -> None:
    _plant(tmp_path, path, f"#pragma once\n#  include {include}\n")
    assert len(cxx_violations(tmp_path, CXX_RULES[name])) == 1


@pytest.mark.parametrize("name", CXX_RULES)
def test_each_cxx_rule_can_fail(tmp_path: Path, name: str) -> None:
    samples = {"torch": "torch/a.h", "python": "Python.h", "cuda": "cuda.h"}
    samples |= {"scheduler": "agmm/persistent_async_input_scheduler.hpp"}
    samples |= {"launch": "agmm/async_input_mm.hpp", "transport but push": "transport/pull.hpp"}
    samples |= {"symmetric but packets": "symmetric/layout.hpp"}
    rule = CXX_RULES[name]
    (path,) = rule.files[:1]
    file = path.replace("**/*", "file.hpp").replace("[!p]*", "file").replace("*", "file")
    for kind in rule.forbidden:
        include = samples.get(kind, f"{kind}/file.hpp")
        _plant(tmp_path, file, f'#include "{include}"\n')
        assert cxx_violations(tmp_path, rule), kind


def test_what_push_needs_is_allowed_in_a_matmul(tmp_path: Path) -> None:
    _plant(tmp_path, "src/gemm/sm90/mainloop.hpp", '#include "transport/push_warp.hpp"\n')
    rule = CXX_RULES["matmuls know of transports what push needs, of collectives what packets do"]
    assert cxx_violations(tmp_path, rule) == []


def test_include_is_found_through_a_header(tmp_path: Path) -> None:
    _plant(tmp_path, "src/sync/signals.hpp", "#include <cuda_runtime.h>\n")
    _plant(tmp_path, "src/cpu/workspace.cpp", '#include "sync/signals.hpp"\n')
    rule = CXX_RULES["the CPU backend needs no CUDA"]
    assert [line.split(":")[0] for line in cxx_violations(tmp_path, rule)] == [
        "src/cpu/workspace.cpp"
    ]
