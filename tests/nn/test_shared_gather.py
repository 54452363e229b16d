"""Linears that share a gather give what each would give by itself, on CPU ranks."""

from __future__ import annotations

import pytest
import shared_work

from agmm.testing.ranks import RankPool

GATHERS = {
    "in turn": 1,
    "twice": 3,
}
"""Others gather once, and once more behind the change or in the recomputation."""


@pytest.mark.parametrize("kind", ["plain", "leaf", "no grad", "dtensor"])
@pytest.mark.parametrize("way", shared_work.WAYS)
def test_what_changes_between_the_linears_is_seen(pool: RankPool, way: str, kind: str) -> None:
    results = pool.run(shared_work.as_each_by_itself, way, kind)[3:]
    assert [faults for faults, _ in results] == [[], []]


@pytest.mark.parametrize("way", shared_work.WITHOUT_GRAPH)
def test_what_changes_without_a_graph_is_seen(pool: RankPool, way: str) -> None:
    assert pool.run(shared_work.as_each_by_itself, way, "no grad")[3:] == [([], 2)] * 2


@pytest.mark.parametrize("way", shared_work.WAYS)
def test_they_share_where_nothing_changes(pool: RankPool, way: str) -> None:
    results = pool.run(shared_work.as_each_by_itself, way, "plain")[3:]
    assert [gathers for _, gathers in results] == [GATHERS.get(way, 2)] * 2


@pytest.mark.parametrize("way", ["in turn", "x in place", "weight in place", "no grad, then grad"])
def test_inference_tensors(pool: RankPool, way: str) -> None:
    """torch does not count their changes."""
    for faults, gathers in pool.run(shared_work.as_each_by_itself, way, "inference")[3:]:
        assert (faults, gathers) == ([], 3)
    for messages in pool.run(shared_work.warned_of_inference)[3:]:
        assert len(messages) == 1 and "torch.no_grad lets them share" in messages[0]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("in turn", "leaf"),
        pytest.param("in turn", "no grad", marks=pytest.mark.slow),
        pytest.param("x in place", "no grad", marks=pytest.mark.slow),
        pytest.param("x in place by a view", "no grad", marks=pytest.mark.slow),
        ("weight in place", "no grad"),
        pytest.param("no grad, then grad", "leaf", marks=pytest.mark.slow),
    ],
)
def test_compiled(pool: RankPool, way: str, kind: str) -> None:
    results = pool.run(shared_work.as_each_by_itself, way, kind, compiled=True)[3:]
    assert [faults for faults, _ in results] == [[], []]


@pytest.mark.slow
def test_compiled_in_parts(pool: RankPool) -> None:
    assert pool.run(shared_work.across_a_graph_break)[3:] == [True, True]


def test_nothing_is_kept_for_long(pool: RankPool) -> None:
    for found in pool.run(shared_work.what_is_kept)[3:]:
        assert found == dict.fromkeys(("ended", "raised", "all called", "backward between"), True)


def test_a_copy_has_its_own_weights(pool: RankPool) -> None:
    assert pool.run(shared_work.of_a_copy)[3:] == [True, True]
