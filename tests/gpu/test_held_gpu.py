"""Calls of ranks whose GPU is in part another kernel's: they end, with the right sums."""

from __future__ import annotations

import held_gpu_work
import pytest
from at_hand import RANKS, needs_two

from agmm.testing.ranks import RankPool


@needs_two
@pytest.mark.parametrize("op", ["gather", "scatter", "all_reduce"])
def test_calls_end_on_a_part_of_the_gpu(op: str) -> None:
    shapes = [(512, 1408, 64), (4096, 1408, 64), (2560, 5120, 64), (8192, 8192, 128)]
    with RankPool(min(RANKS, 4), "cuda", 150, {"AGMM_TIMEOUT_S": "20"}) as pool:
        results = pool.run(held_gpu_work.calls_on_a_part, op, shapes)
    assert [fault for result in results for fault in result or []] == []
