"""Rows that ranks cannot share evenly, and words that they share, against the whole model."""

from __future__ import annotations

import pytest
import uneven_work

from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("world_size", "length"), [(2, 8), (2, 7), (4, 8), (4, 6), (4, 1)])
def test_a_model_from_ids_to_its_loss(
    pool: RankPool, world_size: int, length: int, shared: bool
) -> None:
    found = pool.run(uneven_work.model, world_size, 64, length, shared, False)
    assert found == [None] * (5 - world_size) + [[]] * world_size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("words", [64, 61])
def test_words_that_ranks_share(pool: RankPool, words: int, tied: bool) -> None:
    """The output keeps torch's style where the ranks cannot share the words evenly."""
    assert pool.run(uneven_work.model, 4, words, 6, False, tied)[1:] == [[]] * 4


_SAID = "agmm fills up rows: RowwiseScatterParallel: the {} ranks cannot share all lengths of "


def _said(world_size: int, length: int, dim: int) -> list[str]:
    said = _SAID.format(world_size) + f"dimension {dim} evenly"
    return [said] if length % world_size else []


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("world_size", "length"), [(2, 7), (2, 1), (4, 8), (4, 7), (4, 5), (4, 1), (4, 0)]
)
def test_scattered_rows_are_those_of_a_dtensor(
    pool: RankPool, world_size: int, length: int, dim: int, local: bool
) -> None:
    """Plain tensors of several sizes would not say how many rows there are in all."""
    found = pool.run(uneven_work.scattered, world_size, length, dim, local)
    if local and length % world_size:
        why = f"x: found {length} in dimension {dim}, wanted a multiple of the {world_size} ranks"
        assert all(why in one[0] for one in found[5 - world_size :])
    else:
        said = _said(world_size, length, dim)
        assert found == [None] * (5 - world_size) + [said] * world_size


@pytest.mark.slow
def test_scattered_rows_compiled(pool: RankPool) -> None:
    assert pool.run(uneven_work.scattered, 2, 5, 1, False, True)[3:] == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 8])
def test_gathered_rows_compiled(pool: RankPool, length: int) -> None:
    assert pool.run(uneven_work.gathered_compiled, length)[3:] == [[]] * 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scatter", "RowwiseScatterParallel on Linear(in_features=8, out_features=8, bias=True): "),
        ("gather", "GatherColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "),
    ],
)
def test_strict_styles_refuse_them(pool: RankPool, kind: str, message: str) -> None:
    why = "x: found 7 in dimension 1, wanted a multiple of 2 ranks"
    said = f"{message}{why}; strict=True refuses rows that are filled up"
    assert pool.run(uneven_work.refused, kind)[3:] == [said] * 2


@pytest.mark.parametrize("length", [5, 6])
def test_rows_in_fp8(pool: RankPool, length: int) -> None:
    assert pool.run(uneven_work.in_fp8, length)[3:] == [[]] * 2
