"""Gated feed-forward modules that are found in models, and packed linears of a plan, against the
whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gated_work
import pytest
import quick
import torch

from agmm.errors import InvalidArgument
from agmm.nn import GatedGatherParallel, PackedColwiseParallel, gated_plan
from agmm.testing.ranks import RankPool

_ACTIVATIONS = {"llama": "silu_mul", "gemma": "gelu_tanh_mul", "titan": "silu_mul", "phi": "gelu_mul"}


@pytest.mark.parametrize("world_size", quick.first(1, [2, 4]))
@pytest.mark.parametrize("kind", gated_work.KINDS)
@pytest.mark.parametrize("way", ["own", "sequence", "all rows"])
def test_a_gated_module_in_a_model(
    pool: RankPool, tmp_path: Path, kind: str, way: str, world_size: int
) -> None:
    path = str(tmp_path / "{rank}.json")
    found = pool.run(gated_work.against_whole, world_size, kind, way, path)
    wanted: Any = [
        ("all_gather_matmul", 2, _ACTIVATIONS[kind]),
        ("matmul_reduce_scatter", 1, None),
    ]
    if way == "all rows":
        wanted = [("matmul_all_reduce", 1, None)]
    assert found[5 - world_size :] == [([], wanted)] * world_size
