"""Fixtures for all tests: pools of rank processes, which are slow to start and so are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agmm.testing.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[..., RankPool]]:
    """`rank_pools(world_size, device="cpu")`: the session's pool of that kind, in working order."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world_size: int, device: str = "cpu") -> RankPool:
        pool = pools.get((world_size, device))
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = pools[world_size, device] = RankPool(world_size, device)
        return pool

    yield get
    for pool in pools.values():
        pool.close()
