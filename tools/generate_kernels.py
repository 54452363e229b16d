"""Write what is rendered from the table of kernels, `python/agmm/planning/kernels.json`.

CMake calls it for the translation units of a build, and for the table that lists their kernels:
`generate_kernels.py --kernels default --directory build/kernels` prints the files' names. With
`--docs` it writes the page that lists the kernels. It needs no package but the standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agmm.planning import kernel_table
    from agmm.planning.kernel_table import KernelRow

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "src" / "gemm"
PAGE = REPOSITORY / "docs" / "reference" / "kernels.md"


def _loaded() -> ModuleType:
    """The package's reader of the table; the package itself would want torch."""
    path = REPOSITORY / "python" / "agmm" / "planning" / "kernel_table.py"
    spec = importlib.util.spec_from_file_location("agmm_kernel_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    kernel_table = _loaded()

ROWS_PER_UNIT, ROWS_PER_UNIT_OF_CI = 3, 4
"""Rows in a translation unit. Its first kernel takes most of the time, in headers and in what of
CuTe the others instantiate too. Three rows, 24 kernels, take up to 7.5 GB of memory, four 9.4; and
more would leave too few units for many cores. In the set ci a row has a quarter or half as many
kernels, which have less in common."""

TABLES = ("kernel", "fp8", "scatter", "fp8_scatter", "lagged", "grouped")
"""The tables of `kernel_table.cpp.in`; the names of its kernels begin with theirs."""
LAYOUTS = {"row": "row", "column": "col"}
ACCUMULATIONS = {"fast": "Fast", "slow": "Slow", "block": "Block", "block_1x128": "Block1x128"}


def table_of(row: KernelRow) -> str:
    """The table that lists the row's kernels."""
    if row.op == kernel_table.ALL_REDUCE:
        return "lagged"
    if row.op == kernel_table.GROUPED:
        return "grouped"
    scatters = row.op == kernel_table.SCATTER
    if row.is_fp8:
        return "fp8_scatter" if scatters else "fp8"
    return "scatter" if scatters else "kernel"


def class_of(table: str) -> str:
    """The classes of a table's entries are `<class>Entry`."""
    if table == "grouped":
        return "Grouped"
    return "Kernel" if table in ("kernel", "fp8") else "Scatter"


def template_of(row: KernelRow) -> str:
    """The template of a row's kernels is `<template>Instance`."""
    return "Streaming" if row.schedule == kernel_table.STREAMING else class_of(table_of(row))


def arguments_of(row: KernelRow) -> str:
    """The template's arguments behind the operands, up to the last that is none by default."""
    accumulation = f"Accumulation::{ACCUMULATIONS[row.accumulation]}"
    epilogue = f"Epilogue::{kernel_table.EPILOGUES[row.epilogue]}"
    flags = {True: "true", False: "false"}
    if row.op == kernel_table.GROUPED:
        more = [epilogue]
    elif row.schedule == kernel_table.STREAMING:
        more = [accumulation, epilogue]
    elif row.op == kernel_table.GATHER:
        more = [flags[row.timed], flags[row.swapped], accumulation, epilogue]
    else:
        returns = flags[row.op == kernel_table.ALL_REDUCE]
        more = [flags[row.timed], accumulation, returns, epilogue]
    by_default = ["false", "Epilogue::Bias"]
    if not row.is_fp8:
        by_default.append("Accumulation::Fast")
    while more and more[-1] in by_default:
        more.pop()
    sizes = map(str, (*row.tile, *row.cluster))
    return ", ".join([*sizes, f"Schedule::{row.schedule.capitalize()}", *more])


def entries_of(row: KernelRow, kernels: str) -> dict[str, str]:
    """The operands that the template gets, by the name of what is exported."""
    name = f"{table_of(row)}_{row.kernel}"
    if row.is_fp8:
        name += f"_{ACCUMULATIONS[row.accumulation].lower()}"
    if row.epilogue != "plain":
        name += f"_{row.epilogue}"
    operands = [(format_, LAYOUTS[layout]) for format_, layout in row.operands(kernels)]
    return {f"{name}_{format_}_{layout}": f"{format_}, {layout}" for format_, layout in operands}


def kind_of(row: KernelRow) -> str:
    """Rows of one kind share units: of a schedule, as they have most in common, with an activation
    of any kind or without one; of grouped matmuls; or of fp8 of an op, streaming or not."""
    if row.op == kernel_table.GROUPED:
        return table_of(row) + "_fp8" * row.is_fp8
    if row.is_fp8:
        return table_of(row) + "_streaming" * (row.schedule == kernel_table.STREAMING)
    return row.schedule + "_swapped" * row.swapped + "_activations" * (row.epilogue != "plain")


def render(rows: Sequence[KernelRow], kernels: str) -> dict[str, str]:
    """The files of a build with these AGMM_KERNELS, by name."""
    rows_per_unit = ROWS_PER_UNIT_OF_CI if kernels == "ci" else ROWS_PER_UNIT
    declarations: dict[str, str] = defaultdict(str)
    lists: dict[str, str] = defaultdict(str)
    units: dict[str, str] = defaultdict(str)
    rows_of_kind: dict[str, int] = defaultdict(int)
    for row in rows:
        if kernels not in row.sets:
            continue
        table, kind = table_of(row), kind_of(row)
        unit = f"{kind}_{rows_of_kind[kind] // rows_per_unit}"
        rows_of_kind[kind] += 1
        for entry, operands in entries_of(row, kernels).items():
            declaration = f"extern {class_of(table)}Entry const {entry};\n"
            instance = f"{template_of(row)}Instance<{operands}, {arguments_of(row)}>"
            declarations[table] += declaration
            lists[table] += f"\n    &{entry},"
            units[unit] += f"{declaration}{class_of(table)}Entry const {entry} =\n"
            units[unit] += f"    {instance}::entry();\n"
    listed = {f"{table.upper()}_DECLARATIONS": declarations[table] for table in TABLES}
    listed |= {f"{table.upper()}_LIST": lists[table] for table in TABLES}
    files = {"kernel_table.cpp": _filled("kernel_table.cpp.in", listed)}
    for unit, entries in units.items():
        files[f"{unit}.cu"] = _filled("sm90/instances.cu.in", {"ENTRIES": entries})
    return files


def _filled(template: str, values: dict[str, str]) -> str:
    text = (TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def write(directory: Path, files: dict[str, str]) -> None:
    """Leaves files that are right as they are, so that nothing is compiled again."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = directory / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


_OPERANDS = (("16 bits", False), ("fp8", True))
_PAGE = """\
# Kernels

<!-- Rendered from python/agmm/planning/kernels.json by tools/generate_kernels.py --docs. -->

`AGMM_KERNELS` says which of these kernels of matmuls a build has. The last column names the sets
that hold the kernel. The set `all` holds every one. [How to add a kernel](../dev/add-a-kernel.md)
explains the columns.

A name has the tile's M, N and K, the cluster, the schedule and the variant. Plans and `agmm
explain` call kernels by it. With `AGMM_KERNELS=ci` kernels of 16 bits are built for bf16 with B by
column or for fp16 with B by row. Few of them are built for both.
"""


def page(rows: Sequence[KernelRow]) -> str:
    """The page that lists the kernels."""
    parts = [_PAGE]
    for op in kernel_table.OPS:
        for words, is_fp8 in _OPERANDS:
            found = [row for row in rows if (row.op, row.is_fp8) == (op, is_fp8)]
            if not found:
                continue
            more = " accumulation |" if is_fp8 else ""
            parts.append(f"## {op}, {words}\n")
            parts.append(f"| kernel | formats |{more} B by | epilogue | sets |")
            parts.append(f"|---|---|{'---|' if is_fp8 else ''}---|---|---|")
            parts += [_line(row) for row in found]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _line(row: KernelRow) -> str:
    sets = [name for name in row.sets if name != "all"]
    cells = [f"`{row.kernel}`", ", ".join(row.formats)]
    cells += [row.accumulation] if row.is_fp8 else []
    cells += [", ".join(row.b_layouts), row.epilogue, ", ".join(sets) or "–"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", choices=kernel_table.SETS, default="default")
    parser.add_argument("--directory", type=Path, help="where the files of a build go")
    parser.add_argument("--docs", action="store_true", help="write the page that lists the kernels")
    parser.add_argument("--table", type=Path, default=kernel_table.TABLE)
    given = parser.parse_args()
    try:
        rows = kernel_table.parse(given.table.read_text(), str(given.table))
    except ValueError as error:
        sys.exit(str(error))
    if given.docs:
        PAGE.write_text(page(rows))
    if given.directory is not None:
        files = render(rows, given.kernels)
        write(given.directory, files)
        print(";".join(str(given.directory / name) for name in files))


if __name__ == "__main__":
    main()
