"""The order of matmul + reduce-scatter against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agmm import _core

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_start_with_the_next_one_and_end_with_themselves(world_size: int) -> None:
    ranks = range(world_size)
    orders = [[_core.scatter_owner(rank, i, world_size) for i in ranks] for rank in ranks]
    for rank, order in enumerate(orders):
        assert order == [(rank + 1 + i) % world_size for i in range(world_size)]
    for step in zip(*orders, strict=True):  # no two send to the same rank at a time
        assert sorted(step) == list(range(world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parts_lie_by_the_distance_in_the_ring(world_size: int) -> None:
    for owner in range(world_size):
        for place in range(world_size - 1):
            source = (owner + 1 + place) % world_size
            assert _core.part_place(source, owner, world_size) == place


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.scatter_bands(7, 2), "rows: found 7, wanted a multiple of the world size 2"),
        (lambda: _core.scatter_bands(-2, 2), "rows: found -2, wanted a multiple of the world size"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
