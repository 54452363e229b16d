"""Modules that take sizes from their input give what the whole module gives, on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sizes_work

from agmm.testing.ranks import RankPool

_LEADING = ("leading", "joined rows", "same view", "residual", "recomputed", "recomputed anew")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("way", sizes_work.WAYS)
def test_sizes_are_those_of_all_rows(pool: RankPool, way: str, batch: int) -> None:
    assert pool.run(sizes_work.against_whole, way, 1, batch, "eager")[3:] == [[], []]


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_the_sequence_in_front(pool: RankPool, batch: int | None) -> None:
    for way in _LEADING[:4] if batch == 2 else _LEADING[:3]:
        assert pool.run(sizes_work.against_whole, way, 0, batch, "eager")[3:] == [[], []], way


@pytest.mark.parametrize("mode", ["keyword", "no_grad", "inference_mode", "copied"])
def test_modes(pool: RankPool, mode: str) -> None:
    assert pool.run(sizes_work.against_whole, "shape", 1, 2, mode)[3:] == [[], []]


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        ("shape", "dynamic"),
        *(
            pytest.param(way, "compiled", marks=pytest.mark.slow)
            for way in ("shape", "joined rows", "same view", "residual")
        ),
    ],
)
def test_compiled(pool: RankPool, way: str, mode: str) -> None:
    assert pool.run(sizes_work.against_whole, way, 1, 2, mode)[3:] == [[], []]


def test_under_fsdp(rank_pools: Callable[..., RankPool]) -> None:
    assert rank_pools(4).run(sizes_work.under_fsdp) == [[]] * 4


def test_ops_on_the_input_take_the_shard_or_are_refused(pool: RankPool) -> None:
    assert pool.run(sizes_work.ops)[3:] == [[], []]
