from __future__ import annotations

from collections.abc import Callable

import pytest

from agmm.testing.ranks import RankPool


@pytest.fixture
def pool(rank_pools: Callable[..., RankPool]) -> RankPool:
    """Five CPU ranks; smaller world sizes are groups of the last ones (see rank_work.group_of)."""
    return rank_pools(5)
