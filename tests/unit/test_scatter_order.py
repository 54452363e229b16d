"""The order of matmul + reduce-scatter against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agmm import _core

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_start_with_the_next_one_and_end_with_themselves(world_size: int) -> None:
    orders = [_core.scatter_owners(rank, world_size) for rank in range(world_size)]
    for rank, order in enumerate(orders):
        assert order == [(rank + 1 + i) % world_size for i in range(world_size)]
    for step in zip(*orders, strict=True):  # no two send to the same rank at a time
        assert sorted(step) == list(range(world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parts_lie_in_the_order_of_the_ranks(world_size: int) -> None:
    for owner in range(world_size):
        sources = [source for source in range(world_size) if source != owner]
        places = [_core.part_place(source, owner) for source in sources]
        assert places == list(range(world_size - 1))


@given(st.sampled_from(WORLD_SIZES), st.integers(0, 40_000))
@settings(deadline=None)
def test_bands_are_the_rows_in_order_and_bound_the_memory(
    world_size: int, rows_per_rank: int
) -> None:
    bands = _core.scatter_bands(world_size * rows_per_rank, world_size)
    assert [row for begin, end in bands for row in range(begin, end)] == list(range(rows_per_rank))
    lengths = [end - begin for begin, end in bands]
    assert all(length * world_size <= _core.SCATTER_BAND_ROWS == 8192 for length in lengths)
    assert len(set(lengths[:-1])) <= 1 and lengths == sorted(lengths, reverse=True)
    found = _core.scatter_slot_bytes(world_size * rows_per_rank, 10, world_size)
    assert found == (world_size - 1) * max(lengths, default=0) * 10


def test_memory_of_a_call() -> None:
    assert _core.scatter_slot_bytes(8192, 2 * 8192, 4) == 3 * 8192 * 8192 * 2 // 4
    assert _core.scatter_slot_bytes(16384, 2 * 8192, 4) == 3 * 8192 * 8192 * 2 // 4
    assert _core.scatter_slot_bytes(2**31 - 1, 2 * 8192, 1) == 0
    assert _core.scatter_slot_bytes(20_000, 2, 10_000) == 9_999 * 2  # a row of each at least


@given(
    st.sampled_from(WORLD_SIZES),
    st.integers(0, 7),
    st.one_of(st.integers(1, 40), st.integers(1, 300)),
    st.sampled_from((1, 2, 3, 8, 64, 128, 256)),
)
@settings(deadline=None, max_examples=400)
def test_order_of_tiles(world_size: int, rank: int, rows_per_rank: int, tile_rows: int) -> None:
    rank %= world_size
    rows = world_size * rows_per_rank
    steps = _core.scatter_tiles(rank, world_size, rows_per_rank, tile_rows)
    tiles = [tile for tile, _ in steps]
    assert sorted(tiles) == list(range(-(-rows // tile_rows)))

    def owners(tile: int) -> set[int]:
        touched = range(tile * tile_rows, min((tile + 1) * tile_rows, rows))
        return {touched[0] // rows_per_rank, *(row // rows_per_rank for row in touched)}

    kinds = ["foreign" if rank not in o else "own" if len(o) == 1 else "mixed" for o in
             map(owners, tiles)]  # fmt: skip
    assert kinds == sorted(kinds, key=["foreign", "mixed", "own"].index)
    for kind in ("mixed", "own"):
        group = [tile for tile, found in zip(tiles, kinds, strict=True) if found == kind]
        assert group == sorted(group)
    positions = [place for (_, place), kind in zip(steps, kinds, strict=True) if kind == "foreign"]
    assert positions == sorted(positions)
    # When the next owner's tiles begin, all rows of the one before have been computed, but for
    # those beside own rows.
    for step, (tile, kind) in enumerate(zip(tiles, kinds, strict=True)):
        if kind != "foreign":
            break
        first = min(owners(tile), key=lambda owner: (owner - rank - 1) % world_size)
        done = set(tiles[:step])
        for position in range((first - rank - 1) % world_size):
            owner = (rank + 1 + position) % world_size
            for row in range(owner * rows_per_rank, (owner + 1) * rows_per_rank):
                assert row // tile_rows in done or rank in owners(row // tile_rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.scatter_bands(7, 2), "rows: found 7, wanted a multiple of the world size 2"),
        (lambda: _core.scatter_bands(-2, 2), "rows: found -2, wanted a multiple of the world size"),
        (lambda: _core.scatter_owners(2, 2), "rank: found 2, wanted 0 to 1"),
        (lambda: _core.scatter_tiles(0, 2, 0, 8), "rows_per_rank: found 0, wanted at least 1"),
        (lambda: _core.scatter_tiles(0, 2, 1, 0), "tile_rows: found 0, wanted at least 1"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
