"""The kernels that a build can have: the rows of ``kernels.json``.

This is the one reader of that file. CMake's generator (`tools/generate_kernels.py`) loads this
module by its path, in a Python that may have no torch, so it imports the standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("kernels.json")
SETS = ("minimal", "ci", "default", "all")
"""The values of AGMM_KERNELS. Each but ``ci`` holds the one before it."""
GATHER, SCATTER, ALL_REDUCE, GROUPED = OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "grouped_matmul",
)
FORMATS_OF_16_BITS = ("bf16", "fp16")
FP8_FORMATS = ("e4m3", "e4m3_e5m2", "e5m2_e4m3")
"""The formats of A, and of B where that has another."""
B_LAYOUTS = ("row", "column")
STREAMING = "streaming"
"""The schedule of the kernels for few rows, whose template is another (`src/gemm/sm90`)."""
SCHEDULES = ("cooperative", "pingpong", STREAMING)
ACCUMULATIONS = ("fast", "slow", "block", "block_1x128")
EPILOGUES = {"plain": "Bias", "activation": "Activation", "gate": "Gate", "gate_fp8": "GateFp8"}
"""The epilogues, with their names in `agmm::Epilogue`."""

_LAYOUTS_OF_CI = {"bf16": ("column",), "fp16": ("row",)}
"""The set ``ci`` builds kernels of 16 bits for these layouts of B alone, and a row for its
``ci_formats`` alone: it is for machines that compile kernels and cannot run them, and wants each
way through the templates once."""
_MOST_CTAS_OF_A_CLUSTER = 2
"""The most CTAs of a cluster. Clusters of 4 would leave multiprocessors without one."""
_MMA_ROWS, _MMA_COLUMNS = 64, 8
"""The steps in which a warpgroup's MMA can be larger."""
_COLUMNS_OF_HALVES = {"row": 128, "column": 32}
"""The step of a gate's columns: B by row comes in pieces of 64 columns, each of one weight; results
are stored 16 columns at a time."""
_COLUMNS_OF_TWO = 256
"""The columns of a gate's tile whose sums are promoted: those of two MMAs, one for each weight.
Half as many are those of one scale of a result in fp8."""
_STREAMED_K = 128
"""The K of a tile of a streaming kernel (`agmm::kStreamedK`)."""
_ROWS_OF_GROUPED = 64
"""The step of a grouped tile's rows, of which it can leave out quarters (`agmm::kTileQuarters`)."""
_MOST_CHARACTERS = 60
"""The most characters of a row that a message shows."""


@dataclass(frozen=True)
class KernelRow:
    """A kernel of the table: one shape for an op, in some formats and layouts of B."""

    op: str
    tile: tuple[int, int, int]
    """M, N and K of what one CTA computes at a time, in rows and columns of out."""
    cluster: tuple[int, int]
    """The CTAs of a cluster along M and N."""
    schedule: str
    sets: tuple[str, ...]
    """The values of AGMM_KERNELS whose builds have the kernel."""
    formats: tuple[str, ...]
    ci_formats: tuple[str, ...]
    """The formats of 16 bits that the set ``ci`` has of the row."""
    b_layouts: tuple[str, ...]
    swapped: bool
    """Whether the kernel multiplies transposed: the tile's rows are columns of the MMA."""
    timed: bool
    """Whether the kernel is the variant that records when each tile waited and ran, for
    pictures."""
    accumulation: str
    """How sums of fp8 products are accumulated and scaled."""
    epilogue: str

    @property
    def is_fp8(self) -> bool:
        return self.formats[0] in FP8_FORMATS

    @property
    def kernel(self) -> str:
        """The name that plans and the core have for the shape."""
        tile, cluster = ("x".join(map(str, sizes)) for sizes in (self.tile, self.cluster))
        variant = "_swapped" * self.swapped + "_timed" * self.timed
        return f"{tile}_{cluster}_{self.schedule}{variant}"

    def operands(self, kernels: str) -> Iterator[tuple[str, str]]:
        """The formats and layouts of B that a build with these AGMM_KERNELS compiles it for."""
        for format_ in self.formats:
            taken: tuple[str, ...] = B_LAYOUTS
            if kernels == "ci" and format_ in FORMATS_OF_16_BITS:
                taken = _LAYOUTS_OF_CI[format_] if format_ in self.ci_formats else ()
            yield from ((format_, layout) for layout in self.b_layouts if layout in taken)


@cache
def rows() -> tuple[KernelRow, ...]:
    """The rows of the package's table."""
    return parse(TABLE.read_text(), TABLE.name)


def rows_of(
    kernels: str, op: str, *, is_fp8: bool = False, epilogue: str = "plain"
) -> tuple[KernelRow, ...]:
    """The rows that a build with these AGMM_KERNELS has for an op, timed ones left out."""
    wanted = op, is_fp8, False, epilogue
    return tuple(
        row
        for row in rows()
        if kernels in row.sets and (row.op, row.is_fp8, row.timed, row.epilogue) == wanted
    )


def parse(text: str, name: str) -> tuple[KernelRow, ...]:
    """The rows of a table.

    Args:
        name: what messages call it.

    Raises:
        ValueError: a row is wrong; the message names the row, its field, what was found and what is
            wanted.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: found {error}, wanted JSON") from None
    if set(table) != {"defaults", "kernels"}:
        raise ValueError(f"{name}: found {sorted(table)}, wanted ['defaults', 'kernels']")
    found: list[KernelRow] = []
    seen: set[tuple[Any, ...]] = set()
    for number, given in enumerate(table["kernels"], 1):
        where = f"{name}: row {number}, {_short(given)}"
        row = _row({**table["defaults"], **given}, where)
        shape = row.op, row.kernel, row.accumulation, row.epilogue
        kernels = {(*shape, *each) for each in row.operands("all")}
        if seen & kernels:
            raise ValueError(f"{where}: tile: found a kernel of an earlier row, wanted it once")
        seen |= kernels
        found.append(row)
    return tuple(found)


def _short(given: dict[str, Any]) -> str:
    words = json.dumps(given)
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}…"


def _row(given: dict[str, Any], where: str) -> KernelRow:
    wanted = [field.name for field in fields(KernelRow) if field.default is MISSING]
    for field in (*given, *wanted):
        if field not in wanted:
            raise ValueError(f"{where}: {field}: found it, wanted only {', '.join(wanted)}")
        if field not in given:
            raise ValueError(f"{where}: {field}: found none, wanted one")
    values = {}
    for field, (read, words) in _READ.items():
        values[field] = read(given[field])
        if values[field] is None:
            raise ValueError(f"{where}: {field}: found {given[field]!r}, wanted {words}")
    row = KernelRow(**values)
    for field, words in _against(row):
        raise ValueError(f"{where}: {field}: found {given[field]!r}, wanted {words}")
    return row


def _against(row: KernelRow) -> Iterator[tuple[str, str]]:
    """The fields that do not go with the others, and what they want."""
    is_streaming = row.schedule == STREAMING
    rows, columns = row.tile[:2][:: -1 if row.swapped or is_streaming else 1]
    of_mma = f"{_MMA_ROWS} in rows of the MMA, of {_MMA_COLUMNS} in its columns"
    if rows % _MMA_ROWS or columns % _MMA_COLUMNS:
        yield "tile", f"a multiple of {of_mma}{' (swapped)' if row.swapped else ''}"
    if is_streaming:
        yield from _against_streaming(row)
    if row.cluster[0] * row.cluster[1] > _MOST_CTAS_OF_A_CLUSTER:
        yield "cluster", f"at most {_MOST_CTAS_OF_A_CLUSTER} CTAs"
    if len({format_ in FP8_FORMATS for format_ in row.formats}) > 1:
        yield "formats", "all of 16 bits, or all of fp8"
    if row.is_fp8 and row.tile[2] != 128:
        yield "tile", "128 of K with fp8"
    if row.is_fp8 and row.b_layouts != ("column",):
        yield "b_layouts", "['column'] with fp8"
    if row.is_fp8 and row.timed:
        yield "timed", "false with fp8"
    if not row.is_fp8 and row.accumulation != "fast":
        yield "accumulation", "fast with operands of 16 bits"
    if row.op == GROUPED:
        yield from _against_grouped(row)
    elif row.op != GATHER and row.swapped:
        yield "swapped", f"false with {row.op}"
    if row.epilogue != "plain" and row.op != GROUPED:
        if row.op != GATHER or row.timed:
            yield "epilogue", f"plain but for {GATHER}, not timed"
        is_gate = row.epilogue.startswith("gate")
        if is_gate and row.accumulation != "fast" and row.tile[1] != _COLUMNS_OF_TWO:
            yield "tile", f"{_COLUMNS_OF_TWO} columns with a gate and {row.accumulation} sums"
        if row.epilogue == "gate_fp8" and row.tile[1] != _COLUMNS_OF_TWO:
            yield "tile", f"{_COLUMNS_OF_TWO} columns with {row.epilogue}"
        if is_gate and (row.swapped or row.cluster[1] != 1):
            yield "epilogue", "no gate with swapped, or a cluster of more than a tile along N"
        step = max(_COLUMNS_OF_HALVES[layout] for layout in row.b_layouts)
        if is_gate and row.tile[1] % step:
            yield "tile", f"a multiple of {step} columns with a gate"
    if row.op == ALL_REDUCE:
        if (row.schedule, row.cluster) != ("pingpong", (1, 1)):
            yield "schedule", f"pingpong, in clusters of 1x1, with {row.op}"
        if row.is_fp8 or row.timed:
            yield "formats", f"operands of 16 bits, not timed, with {row.op}"
    holders = {"all", *(("default",) if "minimal" in row.sets else ())}
    if not holders <= set(row.sets):
        yield "sets", f"{' and '.join(sorted(holders))} among them, which hold the others"


def _against_grouped(row: KernelRow) -> Iterator[tuple[str, str]]:
    """The fields that do not go with a grouped matmul, and what they want."""
    if not row.swapped:
        yield "swapped", f"true with {GROUPED}"
    if row.timed or set(row.formats) & set(FP8_FORMATS[1:]):
        yield "formats", f"operands of 16 bits or e4m3, not timed, with {GROUPED}"
    if row.is_fp8 and row.accumulation != "block":
        yield "accumulation", f"block with fp8 and {GROUPED}"
    if row.epilogue not in ("plain", "gate"):
        yield "epilogue", f"plain or gate with {GROUPED}"
    parts = (2 if row.schedule == "cooperative" else 1) * (2 if row.epilogue == "gate" else 1)
    k = 128 if row.is_fp8 else 64
    if row.tile[0] % _ROWS_OF_GROUPED or row.tile[1] % (64 * parts) or row.tile[2] != k:
        yield "tile", f"multiples of 64 rows and {64 * parts} columns, and {k} of K, with {GROUPED}"
    if row.cluster[0] != 1:
        yield "cluster", f"1x1 or 1x2 with {GROUPED}"


def _against_streaming(row: KernelRow) -> Iterator[tuple[str, str]]:
    """The fields that do not go with the schedule, and what they want."""
    if row.op != GATHER or row.swapped or row.timed:
        yield "schedule", f"another where the row is of {row.op}, swapped or timed"
    if row.is_fp8 and row.cluster != (1, 1):
        yield "cluster", f"1x1 with fp8 and {STREAMING}"
    if row.is_fp8 and row.epilogue != "plain":
        yield "epilogue", f"plain with fp8 and {STREAMING}"
    if row.tile[2] != _STREAMED_K or row.cluster[0] != 1:
        yield "tile", f"{_STREAMED_K} of K, in clusters of 1x1 or 1x2, with {STREAMING}"


def _one_of(names: Sequence[str]) -> tuple[Callable[[Any], str | None], str]:
    return lambda found: found if found in names else None, f"one of {', '.join(names)}"


def _some_of(names: Sequence[str]) -> tuple[Callable[[Any], tuple[str, ...] | None], str]:
    def read(found: Any) -> tuple[str, ...] | None:
        is_list = isinstance(found, list) and found and all(name in names for name in found)
        return tuple(found) if is_list and len(set(found)) == len(found) else None

    return read, f"a list of some of {', '.join(names)}"


def _sizes(count: int, such_as: str) -> tuple[Callable[[Any], tuple[int, ...] | None], str]:
    def read(found: Any) -> tuple[int, ...] | None:
        is_name = isinstance(found, str) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", found)
        sizes = tuple(map(int, found.split("x"))) if is_name else ()
        return sizes if len(sizes) == count else None

    return read, f"{count} sizes, such as {such_as}"


_FLAG = (lambda found: found if isinstance(found, bool) else None), "true or false"
_READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "op": _one_of(OPS),
    "tile": _sizes(3, "128x256x64"),
    "cluster": _sizes(2, "2x1"),
    "schedule": _one_of(SCHEDULES),
    "sets": _some_of(SETS),
    "formats": _some_of((*FORMATS_OF_16_BITS, *FP8_FORMATS)),
    "ci_formats": _some_of(FORMATS_OF_16_BITS),
    "b_layouts": _some_of(B_LAYOUTS),
    "swapped": _FLAG,
    "timed": _FLAG,
    "accumulation": _one_of(ACCUMULATIONS),
    "epilogue": _one_of(tuple(EPILOGUES)),
}
"""The reader of each field of a row, which returns None where the field is wrong, and what is
wanted then."""
