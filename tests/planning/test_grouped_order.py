"""The tiles of a grouped matmul, as its kernel takes them, and which kernel a call gets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from agmm import _core
from agmm.planning import grouped_kernels, kernel_table
from agmm.planning.problems import KernelConfig

TILES = ((256, 256), (128, 256), (64, 128), (64, 64))
"""Rows of a tile, and columns of a block."""


def offsets_of(counts: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def cases() -> dict[str, list[int]]:
    """How many rows the experts have."""
    drawn = random.Random(1)
    return {
        "one row": [1],
        "none": [0, 0, 0],
        "one expert has all": [0, 0, 5000, 0],
        "ends are empty": [0, 7, 0, 64, 0],
        "whole tiles": [256] * 5,
        "one more": [257] * 5,
        "few each": [drawn.randrange(4) for _ in range(512)],
        "some each": [drawn.randrange(300) for _ in range(64)],
        "many": [2049, 1, 4097, 3000],
    }


@pytest.mark.parametrize("columns", [8, 256, 1032])
@pytest.mark.parametrize(("tile_rows", "block_columns"), TILES)
@pytest.mark.parametrize("case", cases())
def test_each_tile_comes_once(case: str, tile_rows: int, block_columns: int, columns: int) -> None:
    offsets, quarter = offsets_of(cases()[case]), tile_rows // 4
    for room in (0, 1000):
        rows = offsets[-1] + room
        found = _core.grouped_blocks(offsets, rows, columns, tile_rows, block_columns)
        wanted = {
            (expert, begin, min(begin + tile_rows, end), column)
            for expert, (first, end) in enumerate(pairwise(offsets))
            for begin in range(first, end, tile_rows)
            for column in range(-(-columns // block_columns))
        }
        tiles = [(expert, begin, end, column) for expert, begin, end, _, _, column in found]
        assert len(tiles) == len(wanted) and set(tiles) == wanted
        assert [tile[0] for tile in tiles] == sorted(tile[0] for tile in tiles)
        for _, begin, end, first, quarters, _ in found:
            loaded = quarters * quarter
            assert 1 <= quarters <= 4 and 0 <= loaded - (end - begin) < quarter
            assert first <= begin and end <= first + loaded
            # Nothing beyond the last row is loaded, if there are so many rows.
            assert first >= 0 and first + loaded <= max(rows, loaded)


def test_tiles_begin_where_rows_come_first() -> None:
    """An order that begins elsewhere has the same tiles."""
    drawn = random.Random(7)
    for counts in cases().values():
        offsets = offsets_of(counts)
        for tile_rows, block_columns in TILES:
            firsts = [drawn.randrange(begin, end + 1) for begin, end in pairwise(offsets)]
            given = offsets, offsets[-1] + 9, 1032, tile_rows, block_columns
            found = _core.grouped_blocks(*given, firsts)
            assert sorted(found) == sorted(_core.grouped_blocks(*given))
            seen: set[int] = set()
            for expert, begin, end, *_ in found:
                if expert not in seen and firsts[expert] < offsets[expert + 1]:
                    assert begin <= firsts[expert] < end
                seen.add(expert)


def test_blocks_that_follow_one_another_share_operands() -> None:
    """A wave of blocks reads few rows of A and columns of B, whatever the shape is."""
    for tile_rows, block_columns in TILES:
        found = _core.grouped_blocks([0, 16384], 16384, 16384, tile_rows, block_columns)
        wave = found[: 132 // max(1, block_columns // 128)]
        rows = tile_rows * len({begin for _, begin, *_ in wave})
        columns = block_columns * len({column for *_, column in wave})
        assert rows == 2048 and columns <= 2 * 132 * 256 * 128 // 2048


@pytest.mark.parametrize(
    "offsets", [[5, 3, 900], [0, -7, 20], [0, 2**31 - 1, 4], [-5, -3, -1], [100, 100, 100]]
)
def test_wrong_offsets_reach_no_other_rows(offsets: list[int]) -> None:
    for tile_rows, block_columns in TILES:
        for _, begin, end, first, quarters, _ in _core.grouped_blocks(
            offsets, 100, 512, tile_rows, block_columns
        ):
            assert 0 <= begin < end <= 100 and 1 <= quarters <= 4 and first >= 0


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of a default build."""
    facts = [
        SimpleNamespace(
            op=row.op,
            kernel=row.kernel,
            config=KernelConfig.parse(row.kernel).core,
            dtype=_core.DType.bfloat16,
            accumulation=_core.Accumulation.fast,
            b_layout="column",
            epilogue=epilogue,
            timed=False,
            is_fp8=False,
        )
        for epilogue in ("plain", "gate")
        for row in kernel_table.rows_of("default", kernel_table.GROUPED, epilogue=epilogue)
    ]
    for fact in facts:
        fact.epilogue = "bias" if fact.epilogue == "plain" else fact.epilogue
    monkeypatch.setattr(_core, "kernel_facts", lambda: facts)
    grouped_kernels.chosen.cache_clear()
    yield
    grouped_kernels.chosen.cache_clear()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("rows", "n", "k", "experts", "epilogue", "wanted"),
    [
        (64, 14336, 4096, 8, "bias", "64x128x64_1x1_cooperative_swapped"),
        (64, 4096, 14336, 2, "bias", "64x64x64_1x1_pingpong_swapped"),
        (512, 14336, 4096, 8, "bias", "64x128x64_1x1_cooperative_swapped"),
        (1024, 14336, 4096, 8, "bias", "128x128x64_1x2_pingpong_swapped"),
        (16384, 14336, 4096, 8, "bias", "256x128x64_1x2_cooperative_swapped"),
        (16384, 2048, 768, 32, "bias", "128x128x64_1x2_pingpong_swapped"),
        (512, 14336, 4096, 8, "gate", "64x256x64_1x1_cooperative_swapped"),
        (16384, 2048, 768, 8, "gate", "128x256x64_1x2_cooperative_swapped"),
        (16384, 2048, 768, 8, "activation", None),
    ],
)
def test_the_kernel_of_a_call(
    rows: int, n: int, k: int, experts: int, epilogue: str, wanted: str | None
) -> None:
    sizes = rows, n, k, experts
    found = grouped_kernels.chosen(*sizes, "bfloat16", "column", epilogue)
    assert (None if found is None else found.name) == wanted
    other: Any = grouped_kernels.chosen(*sizes, "bfloat16", "row", epilogue)
    assert other is None  # which this build has not


@pytest.mark.parametrize(
    ("rows", "experts", "wanted"),
    [(128, 2, True), (129, 2, False), (2048, 64, True), (16384, 64, False), (1, 1, True)],
)
def test_few_rows_of_fp8_are_not_left_to_torch(rows: int, experts: int, wanted: bool) -> None:
    assert grouped_kernels.are_few(rows, experts) is wanted
