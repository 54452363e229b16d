"""`agmm.learn_plans` on GPUs: plans are timed by events, a capture in between counts for nothing,
and what was learnt is in the user's table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import learning_gpu_work as work
import pytest
from at_hand import needs_nccl, needs_two

from agmm.testing.ranks import RankPool

pytestmark = [needs_two, needs_nccl]  # the unfused plan is among those that are tried

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("best", [None, 0, -1], ids=["timed", "the first", "the last"])
def test_ranks_learn_one_plan_and_keep_it(
    rank_pools: Callable[..., RankPool], tmp_path: Path, op: str, best: int | None
) -> None:
    m = 1024 + 64 * OPS.index(op) + 16 * (0 if best is None else 1 + abs(best))
    found = rank_pools(2, "cuda").run(work.learnt, op, m, str(tmp_path), best)
    assert all(one == found[0] for one in found)
    of = found[0]
    assert of["learns"]
    assert of["same"]
    assert of["kept"] in of["tried"]
    assert of["us"] is not None
    assert 6 <= of["calls"] <= 40
    if best is not None:
        assert of["kept"] == of["tried"][best]
        assert of["us"] == 10.0
    (file,) = tmp_path.glob("*-x2.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["op"], row["m"]) == (op, m)
    assert of["kept"].startswith(row["plan"]["transport"])
