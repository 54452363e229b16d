"""torchtitan's eager async-TP linears, which call torch's ops by name, on CPU ranks over agmm."""

from __future__ import annotations

import importlib.util

import pytest
import titan_work
import torch

from agmm.testing.ranks import RankPool

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types")),
    reason="needs torchtitan 0.3.0 and spmd_types 0.2.3: pip install --no-deps "
    "torchtitan==0.3.0 spmd_types==0.2.3",
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "which", ["AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"]
)
def test_linears_of_torchtitan(
    pool: RankPool, which: str, dtype: torch.dtype, world_size: int
) -> None:
    results = pool.run(titan_work.run, world_size, which, dtype)
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []
