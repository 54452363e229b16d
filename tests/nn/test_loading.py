"""State dicts that fit a layer and that do not, and ranks that do not ascend, on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import loading_work
import pytest

from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]
KINDS = list(loading_work.SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_loaded(rank_pools: Pools, kind: str) -> None:
    assert rank_pools(4).run(loading_work.fitting, kind) == [[]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(rank_pools: Pools, kind: str) -> None:
    assert rank_pools(4).run(loading_work.others, kind) == [[]] * 4


@pytest.mark.parametrize(
    ("kind", "state", "wanted"),
    [
        ("column", "narrower", "weight: found (8, 16) beside a module's metadata, wanted"),
        (
            "row",
            "narrower, plain dict",
            "weight: found (16, 8) with the same values on all ranks, wanted",
        ),
        (
            "outputs",
            "half as wide",
            "the shape in current model is torch.Size([32, 16]), in weight_0, weight_1",
        ),
    ],
)
def test_a_refusal_says_why(rank_pools: Pools, kind: str, state: str, wanted: str) -> None:
    for message in rank_pools(4).run(loading_work.message, kind, state):
        assert wanted in message


@pytest.mark.parametrize("mesh", list(loading_work.MESHES))
@pytest.mark.parametrize(
    "kind",
    [
        "column",
        "outputs",
        "row",
        "gather style",
        "scatter style",
        "torch's column style",
        "torch's row style",
    ],
)
def test_ranks_that_do_not_ascend(rank_pools: Pools, tmp_path: Path, kind: str, mesh: str) -> None:
    results = rank_pools(4).run(loading_work.over_mesh, kind, mesh, str(tmp_path))
    assert results == [[]] * 4
