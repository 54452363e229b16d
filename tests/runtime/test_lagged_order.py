"""The order of matmul + all-reduce against its definition, and that no ranks wait in a ring."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agmm import _core

orders = st.tuples(
    st.sampled_from([1, 2, 3, 4, 5, 8]),  # ranks
    st.integers(0, 200),  # blocks of a chunk
    st.integers(1, 40),  # of a group
    st.integers(0, 9),  # groups of lag
)


@settings(deadline=None)
@given(orders)
def test_each_block_once_and_own_ones_behind_the_others(order: tuple[int, int, int, int]) -> None:
    world_size, blocks, group, lag = order
    steps = _core.lagged_steps(world_size, blocks, group, lag)
    assert sorted(steps) == [(p, i) for p in range(world_size) for i in range(blocks)]
    at = {place: step for step, place in enumerate(steps)}
    groups = -(-blocks // group)
    for position in range(world_size):
        # Sums are added in the order in which they come; blocks of a chunk come in their order.
        of_position = [at[position, i] for i in range(blocks)]
        assert of_position == sorted(of_position)
    for i in range(blocks):
        own = at[world_size - 1, i]
        assert all(at[position, i] < own for position in range(world_size - 1))
        # The lag, but where the others' blocks have come to their end.
        if i // group + lag < groups - 1:
            between = set(steps[at[max(0, world_size - 2), i] : own])
            behind = range((i // group + 1) * group, (i // group + lag + 1) * group)
            if world_size > 1:
                assert {(world_size - 2, j) for j in behind} <= between


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3), st.randoms())
def test_ranks_of_any_speed_come_to_an_end(
    world_size: int, blocks: int, group: int, lag: int, draw: random.Random
) -> None:
    """Each rank has workers of its own number, of which each takes its steps in their order and
    waits at an own block for the others' parts of it. Whoever goes on when, all come to an end."""
    steps = _core.lagged_steps(world_size, blocks, group, lag)
    workers = [draw.randint(1, 7) for _ in range(world_size)]
    next_steps = [list(range(count)) for count in workers]
    done: set[tuple[int, int, int]] = set()  # source, owner, block
    left = world_size * len(steps)
    while left:
        ready = []
        for rank, of_rank in enumerate(next_steps):
            for worker, step in enumerate(of_rank):
                if step >= len(steps):
                    continue
                position, block = steps[step]
                owner = _core.scatter_owner(rank, position, world_size)
                sources = range(world_size) if owner == rank else ()
                if all(s == rank or (s, rank, block) in done for s in sources):
                    ready.append((rank, worker, owner, block))
        assert ready, "all wait"
        rank, worker, owner, block = draw.choice(ready)
        done.add((rank, owner, block))
        next_steps[rank][worker] += workers[rank]
        left -= 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("blocks", [1, 7, 64, 257, 1024])
def test_own_blocks_are_a_wave_behind_and_spread_over_the_workers(
    world_size: int, blocks: int
) -> None:
    workers = 132
    group, lag = _core.lag_for(world_size, blocks, workers)
    steps = _core.lagged_steps(world_size, blocks, group, lag)
    at = {place: step for step, place in enumerate(steps)}
    rest = [at[world_size - 1, i] - at[world_size - 2, i] for i in range(blocks)]
    groups = -(-blocks // group)
    # The first groups, among which there are no own ones yet, and the last ones are left out.
    usual = rest[lag * group : (groups - lag - 1) * group]
    assert min(usual, default=workers) >= workers
    own = [0] * workers
    for step, (position, _) in enumerate(steps):
        own[step % workers] += position == world_size - 1
    assert max(own) <= blocks / workers * 1.25 + 2
    assert _core.lag_for(world_size, blocks, workers) == (group, lag)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="lag: found 0, -1, 1, 0, wanted at least 1, 0, 1, 0"):
        _core.lagged_steps(0, -1, 1, 0)
