"""Styles without sequence parallelism on CPU ranks, against the whole module."""

from __future__ import annotations

import pytest
import replicated_work
import torch

from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("which", replicated_work.STYLES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_styles_are_the_whole_module(
    pool: RankPool, world_size: int, which: str, bias: bool
) -> None:
    results = pool.run(replicated_work.against_whole, world_size, which, bias)
    assert results == [None] * (5 - world_size) + [[]] * world_size


def test_styles_compiled(pool: RankPool) -> None:
    assert pool.run(replicated_work.against_whole, 2, "both", True, True)[3:] == [[]] * 2


def test_autocast_casts_as_linear_does(pool: RankPool) -> None:
    dtypes = [torch.bfloat16, *[torch.float32] * 6]
    assert pool.run(replicated_work.under_autocast, 2)[3:] == [dtypes] * 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "module",
            (
                "RowwiseAllReduceParallel on ReLU(): found torch.nn.modules.activation.ReLU, "
                "wanted torch.nn.Linear"
            ),
        ),
        (
            "row size",
            (
                "RowwiseAllReduceParallel on Linear(in_features=7, out_features=8, bias=True): "
                "in_features: found 7, wanted a multiple of 2 ranks"
            ),
        ),
        (
            "column size",
            (
                "ReplicatedColwiseParallel on Linear(in_features=8, out_features=7, bias=True): "
                "out_features: found 7, wanted a multiple of 2 ranks"
            ),
        ),
        (
            "features",
            (
                "RowwiseAllReduceParallel on Linear(in_features=8, out_features=8, bias=True): "
                "x: found 8 features in its last dimension, wanted 4"
            ),
        ),
        (
            "column features",
            (
                "ReplicatedColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "
                "x: found 4 features in its last dimension, wanted 8"
            ),
        ),
    ],
)
def test_what_cannot_be_served_is_named(pool: RankPool, kind: str, message: str) -> None:
    assert pool.run(replicated_work.refusal, kind)[3:] == [message] * 2
