"""Chunk and tile arithmetic against its definitions, over thousands of problems."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, product, zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agmm import _core

INT32_MAX = 2**31 - 1

Step = tuple[int, int, int, int]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Case:
    """The arguments of `_core.tile_order`, and what its answer is measured by."""

    m: int
    n: int
    block_rows: int
    block_cols: int
    chunks: int
    pivot: int
    max_swizzle: int = 1
    raster: str = "along_m"

    @cached_property
    def steps(self) -> list[Step]:
        return _core.tile_order(*astuple(self))

    @property
    def blocks_m(self) -> int:
        return ceil_div(self.m, self.block_rows)

    @property
    def blocks_n(self) -> int:
        return ceil_div(self.n, self.block_cols)

    @property
    def rows_per_chunk(self) -> int:
        return ceil_div(self.m, self.chunks)

    @property
    def has_empty_chunk(self) -> bool:
        return (self.chunks - 1) * self.rows_per_chunk >= self.m

    @cached_property
    def chunks_of_block(self) -> list[list[int]]:
        """The chunks that each row of blocks needs, row by row of A."""
        rows = [row // self.rows_per_chunk for row in range(self.m)]
        size = self.block_rows
        return [sorted(set(rows[i * size : (i + 1) * size])) for i in range(self.blocks_m)]

    @cached_property
    def position_of_block(self) -> list[int]:
        """Ring position of the chunk that arrives last among those that a row of blocks needs."""
        return [
            max((chunk - self.pivot) % self.chunks for chunk in chunks)
            for chunks in self.chunks_of_block
        ]

    @cached_property
    def block_ring(self) -> list[int]:
        """Rows of blocks in ring order, from the first that starts at the pivot chunk or later."""
        pivot_row = self.pivot * self.rows_per_chunk
        ring = list(range(self.blocks_m))
        return sorted(ring, key=lambda block: (block * self.block_rows < pivot_row, block))

    def groups(self) -> Iterator[list[Step]]:
        """The steps, cut where the last chunk that they need changes."""
        for _, steps in groupby(self.steps, key=lambda step: self.position_of_block[step[0]]):
            yield list(steps)


def expected_steps(case: Case) -> list[Step]:
    along_n = case.raster == "along_n"
    columns = list(range(case.blocks_n))
    width = 1
    while 2 * width <= min(case.max_swizzle, 8, case.blocks_m if along_n else case.blocks_n):
        width *= 2
    steps = []
    for position in sorted(set(case.position_of_block)):
        rows = [b for b in case.block_ring if case.position_of_block[b] == position]
        major, minor = (columns, rows) if along_n else (rows, columns)
        for begin in range(0, len(minor), width):
            for i in major:
                for j in minor[begin : begin + width]:
                    row, column = (j, i) if along_n else (i, j)
                    needed = case.chunks_of_block[row]
                    steps.append((row, column, needed[0], needed[-1] + 1))
    return steps


def random_case(draw: random.Random) -> Case:
    if draw.random() < 0.8:
        m, n = draw.randint(1, 160), draw.randint(1, 40)
        block_rows, block_cols = draw.choice((1, 2, 3, 4, 7, 8, 16, 64)), draw.choice((1, 4, 7, 16))
    else:
        m, n = draw.randint(1, 5000), draw.randint(1, 3000)
        # 256 rows and 512 columns are two tiles of a cluster.
        block_rows, block_cols = draw.choice((128, 256)), draw.choice((128, 160, 256, 512))
    chunks = draw.randint(1, min(m, 70))
    if draw.random() < 0.4:
        m = ceil_div(m, chunks) * chunks
    return Case(
        m,
        n,
        block_rows,
        block_cols,
        chunks,
        draw.randrange(chunks),
        draw.choice((1, 2, 3, 4, 8, 16)),
        draw.choice(("along_m", "along_n")),
    )


def edge_cases() -> Iterator[Case]:
    for raster in ("along_m", "along_n"):
        for swizzle in (1, 8):
            for m, block_rows, chunks in (
                (1, 128, 1),  # one row
                (5, 1, 5),  # one row per chunk and per block
                (70, 16, 70),  # one row per chunk, chunks smaller than a block
                (70, 256, 70),  # all chunks in one block
                (140, 3, 70),
                (1024, 128, 8),  # blocks that divide the chunks
                (1024, 256, 8),
                (1000, 256, 8),  # blocks that straddle them
                (1003, 128, 8),  # a shorter last chunk
                (768, 256, 2),  # a block split between the two chunks
                (385, 128, 3),
            ):
                for pivot in {0, 1 % chunks, chunks // 2, chunks - 1}:
                    yield Case(m, 1100, block_rows, 128, chunks, pivot, swizzle, raster)


def make_cases() -> list[Case]:
    draw = random.Random(20260)
    drawn = [random_case(draw) for _ in range(6000)]
    # What a chunk without rows does is a test of its own.
    return [case for case in (*edge_cases(), *drawn) if not case.has_empty_chunk]


CASES = make_cases()


def test_cases_cover_what_is_hard() -> None:
    assert len(CASES) > 4000
    for many in (
        [c for c in CASES if c.m % c.block_rows],
        [c for c in CASES if c.rows_per_chunk < c.block_rows],
        [c for c in CASES if c.m % c.chunks],
        [c for c in CASES if c.block_rows == 256 and c.m > 256],
        [c for c in CASES if c.pivot * c.rows_per_chunk % c.block_rows],
    ):
        assert len(many) > 200
    assert max(case.chunks for case in CASES) == 70
    assert any(case.chunks == case.m == 70 for case in CASES)


def test_every_block_exactly_once() -> None:
    for case in CASES:
        blocks = [(m, n) for m, n, _, _ in case.steps]
        everything = [(m, n) for m in range(case.blocks_m) for n in range(case.blocks_n)]
        assert sorted(blocks) == everything, case


def test_the_first_blocks_are_those_of_the_first_steps() -> None:
    for steps in (1, 132, 264, 400):
        for case in CASES[:: 1 if steps == 132 else 10]:
            arguments: list[Any] = [*astuple(case), steps]
            first = _core.first_blocks(*arguments)
            # A table has room for two waves of 144.
            assert first == [step[:2] for step in case.steps[: min(steps, 288)]], case


def test_chunks_of_a_step_are_those_of_its_rows() -> None:
    for case in CASES:
        for block, _, first, end in case.steps:
            assert 0 <= first < end <= case.chunks, case
            assert list(range(first, end)) == case.chunks_of_block[block], case


def test_arrival_position_never_decreases() -> None:
    for case in CASES:
        positions = [
            max((chunk - case.pivot) % case.chunks for chunk in range(first, end))
            for _, _, first, end in case.steps
        ]
        assert positions == sorted(positions), case


def test_first_group_starts_in_the_pivot_chunk() -> None:
    checked = 0
    for case in CASES:
        whole = [b for b, chunks in enumerate(case.chunks_of_block) if chunks == [case.pivot]]
        if whole:
            assert case.steps[0] == (whole[0], 0, case.pivot, case.pivot + 1), case
            checked += 1
    assert checked > 1000


def test_without_swizzle_a_group_is_scanned_line_by_line() -> None:
    checked = 0
    for case in CASES:
        if case.max_swizzle != 1:
            continue
        # along_n goes through the columns of one row of blocks, along_m through the rows of one
        # column; rows come in ring order.
        for group in case.groups():
            rows = [b for b in case.block_ring if b in {step[0] for step in group}]
            columns = range(case.blocks_n)
            if case.raster == "along_n":
                wanted = [(row, column) for row in rows for column in columns]
            else:
                wanted = [(row, column) for column in columns for row in rows]
            assert [step[:2] for step in group] == wanted, case
            checked += 1
    assert checked > 1000


def test_order_is_the_expected_one() -> None:
    for case in CASES:
        assert case.steps == expected_steps(case), case


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    chunks = draw(st.integers(1, 9))
    rows_per_chunk = draw(st.integers(1, 12))
    # Only the last chunk is shorter, and it keeps a row.
    short_by = draw(st.integers(0, min(chunks, rows_per_chunk) - 1))
    return Case(
        chunks * rows_per_chunk - short_by,
        draw(st.integers(1, 20)),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 4)),
        chunks,
        draw(st.integers(0, chunks - 1)),
        draw(st.sampled_from((1, 2, 4, 8))),
        draw(st.sampled_from(("along_m", "along_n"))),
    )


@settings(max_examples=500, deadline=None)
@given(small_cases())
def test_order_of_small_problems(case: Case) -> None:
    assert not case.has_empty_chunk
    assert case.steps == expected_steps(case)


@pytest.mark.parametrize(
    ("raster", "max_swizzle", "wanted"),
    [
        ("along_m", 1, "20 30 21 31 22 32 | 00 10 01 11 02 12"),
        ("along_n", 1, "20 21 22 30 31 32 | 00 01 02 10 11 12"),
        ("along_m", 2, "20 21 30 31 22 32 | 00 01 10 11 02 12"),
        ("along_n", 2, "20 30 21 31 22 32 | 00 10 01 11 02 12"),
    ],
)
def test_order_written_out(raster: str, max_swizzle: int, wanted: str) -> None:
    case = Case(4, 3, 1, 1, 2, 1, max_swizzle, raster)
    groups = [" ".join(f"{m}{n}" for m, n, _, _ in group) for group in case.groups()]
    assert " | ".join(groups) == wanted


def test_block_split_by_the_pivot_comes_last() -> None:
    # Rows 0-2, 3-5, 6-8 in blocks of 2: the block of rows 2 and 3 needs chunk 0, the last to come.
    assert Case(9, 1, 2, 1, 3, 1).steps == [
        (2, 0, 1, 2),
        (3, 0, 2, 3),
        (4, 0, 2, 3),
        (0, 0, 0, 1),
        (1, 0, 0, 2),
    ]


def test_padding_of_columns_changes_nothing() -> None:
    for case in CASES:
        assert replace(case, n=case.blocks_n * case.block_cols).steps == case.steps, case


def test_order_depends_on_proportions_only() -> None:
    for case in CASES[::4]:
        if case.m % case.chunks == 0:
            larger = replace(case, m=3 * case.m, block_rows=3 * case.block_rows)
            assert larger.steps == case.steps, case


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 3, 1, 1, 4, 0),
        Case(5, 3, 4, 1, 4, 0),
        Case(7, 3, 1, 1, 6, 5),
        Case(7, 3, 2, 1, 6, 5),
        Case(123, 38, 8, 4, 65, 17, 4),
    ],
)
def test_chunks_without_rows_are_refused_or_ordered_right(case: Case) -> None:
    assert case.has_empty_chunk
    # In another process, as it might not survive.
    script = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("agmm._core", {_core.__file__!r})
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
try:
    print(core.tile_order{astuple(case)})
except ValueError as error:
    assert "chunks" in str(error)
    print("refused")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, f"exit code {found.returncode}: {found.stderr}"
    assert found.stdout.strip() in ("refused", str(expected_steps(case)))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"m": 0}, "^m, "),
        ({"n": 0}, "n, "),
        ({"block_rows": 0}, "block_rows"),
        ({"block_cols": -1}, "block_cols"),
        ({"chunks": 0}, "^chunks: "),
        ({"chunks": 11}, "^chunks: "),
        ({"pivot": -1}, "^pivot: "),
        ({"pivot": 2}, "^pivot: "),
        ({"raster": "across"}, "^raster: found 'across', wanted along_m or along_n$"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, int | str], names: str) -> None:
    problem: dict[str, int | str] = {
        "m": 10,
        "n": 10,
        "block_rows": 2,
        "block_cols": 2,
        "chunks": 2,
        "pivot": 0,
        "max_swizzle": 1,
        "raster": "along_m",
        **change,
    }
    with pytest.raises(ValueError, match=names):
        _core.tile_order(*problem.values())  # type: ignore[arg-type]


@given(units=st.integers(1, 4096), wanted=st.integers(1, 512))
def test_chunks_of_columns(units: int, wanted: int) -> None:
    """SM push cuts K in as many chunks as `wanted` columns (times 8) make, none of them empty, all
    but the last equal and beginning at 16-byte addresses."""
    depth = 8 * units
    chunks = -(-units // wanted)
    ranges = [_core.chunk_columns(depth, chunks, i) for i in range(chunks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == depth
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert all(size == sizes[0] <= 8 * wanted for size in sizes[:-1])
    assert 0 < sizes[-1] <= sizes[0]
    assert all(begin % 8 == 0 for begin, _ in ranges)


@given(
    chunks=st.integers(1, 128),
    log_parts=st.integers(0, 6),
    head_chunks=st.integers(1, 128),
    levels=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    rounds=st.integers(1, 2),
    stretches=st.tuples(st.integers(1, 8), st.floats(0, 1)),
)
def test_push_order(
    chunks: int,
    log_parts: int,
    head_chunks: int,
    levels: tuple[int, int],
    rounds: int,
    stretches: tuple[int, float],
) -> None:
    """Every part of every chunk once per round, chunk by chunk, with stretches in turn; items of
    one size in the head, of another in the tail."""
    head_chunks = chunks if rounds == 2 else min(head_chunks, chunks)
    head_level, tail_level = (min(level, log_parts) for level in levels)
    length = int(chunks / stretches[0] * stretches[1])
    items = _core.push_order(
        chunks, log_parts, head_chunks, head_level, tail_level, rounds, stretches[0], length
    )
    begins = [i * length for i in range(stretches[0])]
    cut = [range(*ends) for ends in pairwise([*begins, chunks])]
    turns = [c for turn in zip_longest(*cut) for c in turn if c is not None]
    parts = [
        (round_, chunk, part)
        for round_, chunk, first, count in items
        for part in range(first, first + count)
    ]
    assert parts == [
        (round_, chunk, part)
        for round_ in range(rounds)
        for chunk in turns
        for part in range(1 << log_parts)
    ]
    assert turns[0] == 0  # whose first item takes the credits
    for _, chunk, _, count in items:
        is_head = turns.index(chunk) < head_chunks
        assert count == 1 << (head_level if is_head else tail_level)


@given(k_tiles=st.integers(1, 1000), parts=st.integers(1, 8))
def test_parts_of_k(k_tiles: int, parts: int) -> None:
    """The parts follow one another, equal but for the last, which is a little longer."""
    parts = min(parts, k_tiles)
    ranges = _core.k_parts(k_tiles, parts)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == k_tiles
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert sizes[:-1] == [sizes[0]] * (parts - 1)
    assert 1 <= sizes[0] <= sizes[-1] <= sizes[0] + 6 + parts


@given(k_tiles=st.integers(1, 1000), parts=st.integers(1, _core.MAX_CLUSTER_SPLITS))
def test_parts_of_k_in_a_cluster(k_tiles: int, parts: int) -> None:
    """The parts follow one another, and all have a k tile more or less."""
    parts = min(parts, k_tiles)
    ranges = _core.k_parts(k_tiles, parts, in_cluster=True)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == k_tiles
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@given(
    units=st.integers(1, 1200),
    parts=st.integers(2, 8),
    columns=st.integers(1, 32),
    in_cluster=st.booleans(),
)
def test_stretches_begin_where_the_parts_do(
    units: int, parts: int, columns: int, in_cluster: bool
) -> None:
    """So a part's first chunk is sent in one of the first turns."""
    k, columns, tile_k = 8 * units, 8 * columns, 64
    k_tiles, chunks = ceil_div(k, tile_k), ceil_div(k, columns)
    parts = min(parts, k_tiles)
    length = _core.stretch_chunks(k, tile_k, parts, columns, in_cluster)
    assert 0 <= length * parts <= chunks
    cut = _core.chunk_columns(k, chunks, 0)[1]
    for i, (begin, _) in enumerate(_core.k_parts(k_tiles, parts, in_cluster)):
        first = begin * tile_k // cut
        assert i * length <= first
        if columns >= tile_k:
            # A part of a cluster may be a k tile longer than the shortest.
            assert first <= i * length + (2 if in_cluster else 1) * i


@settings(max_examples=400)
@given(
    st.integers(1, 20000),
    st.integers(1, 16000),
    st.sampled_from([128, 256, 512]),
    st.sampled_from([96, 128, 144, 160, 224, 256]),
    st.integers(1, 8),
    st.integers(1, 160),
)
def test_fewer_clusters_take_no_more_waves(
    m: int, n: int, block_rows: int, block_cols: int, chunks: int, at_once: int
) -> None:
    rows = -(-m // chunks)
    if (chunks - 1) * rows >= m:
        return
    found = _core.clusters_to_launch(m, n, block_rows, block_cols, chunks, at_once)
    blocks_n = -(-n // block_cols)
    blocks = [range(b, min(b + block_rows, m)) for b in range(0, m, block_rows)]
    assert 1 <= found <= at_once
    if found == at_once:
        return
    waves = -(-len(blocks) * blocks_n // at_once)
    assert waves >= 3
    assert 0.84 * at_once <= found <= 0.97 * at_once
    assert -(-len(blocks) * blocks_n // found) == waves
    # The blocks that need one of the chunks that are still to come make no more waves, on any rank.
    for pivot, coming in product(range(chunks), range(1, chunks)):
        last = {(pivot - i) % chunks for i in range(1, coming + 1)}
        left = blocks_n * sum(
            any(b.start < (c + 1) * rows and c * rows < b.stop for c in last) for b in blocks
        )
        assert -(-left // found) == -(-left // at_once)


@pytest.mark.parametrize(
    ("m", "n", "block_rows", "block_cols", "chunks", "at_once", "wanted"),
    [
        (16384, 3584, 256, 256, 4, 66, 64),  # 1241 us with all, 1232 with 64: the matmul alone
        (8192, 8192, 256, 256, 4, 66, 64),
        (7104, 1536, 256, 192, 4, 66, 66),  # with 56 the last chunk's blocks would be two waves
        (4968, 1536, 128, 128, 4, 132, 132),
        (6216, 2048, 256, 224, 2, 66, 66),  # 325 us with 63, 289 predicted with all
        (7584, 2304, 512, 144, 2, 66, 66),  # 219 and 190
        (7376, 2112, 256, 128, 2, 66, 66),
        (2048, 3584, 256, 224, 4, 66, 66),  # two waves
        (8192, 14336, 128, 160, 4, 132, 132),  # 131 would do
        (512, 3584, 256, 128, 4, 66, 66),  # one
        (16384, 3584, 256, 256, 32, 66, 66),  # too many chunks to look at
    ],
)
def test_clusters_to_launch(
    m: int, n: int, block_rows: int, block_cols: int, chunks: int, at_once: int, wanted: int
) -> None:
    found = _core.clusters_to_launch(m, n, block_rows, block_cols, chunks, at_once)
    assert found == wanted


def test_chunks_of_rows() -> None:
    draw = random.Random(7)
    for _ in range(5000):
        m = draw.randint(1, 300)
        chunks = draw.randint(1, m)
        rows_per_chunk = ceil_div(m, chunks)
        begin, end = draw.randint(0, m + 20), draw.randint(0, m + 20)
        touched = sorted({row // rows_per_chunk for row in range(begin, min(end, m))})
        wanted = (touched[0], touched[-1] + 1) if touched else (0, 0)
        assert _core.chunks_of_rows(m, chunks, begin, end) == wanted, (m, chunks, begin, end)


def rows_in_shared_tiles(begin: int, end: int, tile_rows: int, total_rows: int) -> list[int]:
    rows = []
    for row in range(begin, end):
        tile = row // tile_rows * tile_rows
        tile_end = min(tile + tile_rows, total_rows)
        if not (begin <= tile and tile_end <= end):
            rows.append(row)
    return rows


def check_shared_rows(begin: int, end: int, tile_rows: int, total_rows: int) -> None:
    problem = (begin, end, tile_rows, total_rows)
    head_begin, head_end, tail_begin, tail_end = _core.shared_rows(*problem)
    assert head_begin == begin and tail_end == end, problem
    assert head_begin <= head_end <= tail_begin <= tail_end, problem
    rows = [*range(head_begin, head_end), *range(tail_begin, tail_end)]
    assert rows == rows_in_shared_tiles(*problem), problem


def test_shared_rows_of_all_small_shards() -> None:
    for total_rows in range(1, 19):
        for tile_rows in range(1, 21):
            for begin in range(total_rows):
                for end in range(begin, total_rows + 1):
                    check_shared_rows(begin, end, tile_rows, total_rows)


def test_shared_rows_of_shards_as_they_come() -> None:
    draw = random.Random(3)
    for _ in range(400):
        world_size, m_local = draw.randint(1, 9), draw.randint(1, 900)
        for rank in range(world_size):
            check_shared_rows(
                rank * m_local,
                (rank + 1) * m_local,
                draw.choice((64, 128, 192, 256)),
                world_size * m_local,
            )


def test_fast_division_is_division() -> None:
    draw = random.Random(11)
    powers = [1 << i for i in range(31)]
    near_powers = {p + d for p in powers for d in (-1, 0, 1)} | {INT32_MAX}
    edges = sorted(v for v in near_powers if 1 <= v <= INT32_MAX)
    divisors = [*edges, *(draw.randint(1, INT32_MAX) for _ in range(300)), *range(1, 300)]
    for divisor in divisors:
        last = INT32_MAX // divisor * divisor
        numbers = {0, divisor - 1, divisor, min(divisor + 1, INT32_MAX), last - 1, last, INT32_MAX}
        numbers.update(edges)
        numbers.update(draw.randint(0, INT32_MAX) for _ in range(50))
        for n in numbers:
            assert _core.fast_divide(n, divisor) == n // divisor, (n, divisor)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, INT32_MAX), st.integers(1, INT32_MAX))
def test_fast_division_of_any_numbers(n: int, divisor: int) -> None:
    assert _core.fast_divide(n, divisor) == n // divisor
