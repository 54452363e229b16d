"""Layers without sequence parallelism on CPU ranks, against the whole module."""

from __future__ import annotations

import decode_work
import pytest

from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_are_the_whole_module(pool: RankPool, world_size: int, bias: bool) -> None:
    results = pool.run(decode_work.against_whole, world_size, bias)
    assert results == [None] * (5 - world_size) + [[]] * world_size


def test_what_cannot_be_served_is_named(pool: RankPool) -> None:
    wanted = [
        "RowParallelLinear: fp8: found rowwise with sequence_parallel=False, wanted None",
        "ColumnParallelLinear: fp8: found rowwise with sequence_parallel=False, wanted None",
        "ColumnParallelLinear: save_gathered: found True with sequence_parallel=False, wanted",
        "RowParallelLinear: sequence_parallel: found 1, wanted True or False",
        "RowParallelLinear: sequence_parallel: found True, wanted False for normed()",
        "weight: found shape (3,), wanted (32,) as B's columns",
        "B: found requires_grad=True, wanted a call under torch.no_grad()",
    ]
    for said in pool.run(decode_work.refusals)[3:]:
        assert [one[: len(start)] for one, start in zip(said, wanted, strict=True)] == wanted
