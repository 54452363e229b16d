"""Parameters of layers and styles on CPU ranks: what those of torch.nn.Linear under torch's own
styles survive, they survive."""

from __future__ import annotations

from collections.abc import Callable

import parameter_work
import pytest

from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]


@pytest.mark.parametrize("which", [slice(i, None, 12) for i in range(12)], ids=range(12))
@pytest.mark.parametrize(
    ("kind", "reference", "is_compiled"),
    [
        ("column", "torch's gather", False),
        pytest.param("outputs", "torch's gather", False, marks=pytest.mark.slow),
        ("row", "torch's scatter", False),
        ("fp8", "torch's gather", False),
        ("experts", "torch's gather", False),
        pytest.param("sliced experts", "torch's gather", False, marks=pytest.mark.slow),
        pytest.param("experts", "torch's gather", True, marks=pytest.mark.slow),
        ("tied outputs", "tied torch's gather", False),
        pytest.param("tied outputs", "tied torch's gather", True, marks=pytest.mark.slow),
        pytest.param("tied row", "tied torch's scatter", False, marks=pytest.mark.slow),
        ("gather style", "torch's gather", False),
        pytest.param("scatter style", "torch's scatter", False, marks=pytest.mark.slow),
        pytest.param("column", "torch's gather", True, marks=pytest.mark.slow),
        pytest.param("outputs", "torch's gather", True, marks=pytest.mark.slow),
        pytest.param("row", "torch's scatter", True, marks=pytest.mark.slow),
        pytest.param("fp8", "torch's gather", True, marks=pytest.mark.slow),
        pytest.param("tied row", "tied torch's scatter", True, marks=pytest.mark.slow),
        pytest.param("gather style", "torch's gather", True, marks=pytest.mark.slow),
        pytest.param("scatter style", "torch's scatter", True, marks=pytest.mark.slow),
    ],
)
def test_they_survive_what_torchs_survive(
    rank_pools: Pools, kind: str, reference: str, is_compiled: bool, which: slice
) -> None:
    results = rank_pools(2).run(parameter_work.lost, kind, reference, is_compiled, which)
    assert results == [[]] * 2


@pytest.mark.parametrize("kind", ["outputs", "row", "tied outputs"])
def test_a_layer_made_under_inference_mode_trains(rank_pools: Pools, kind: str) -> None:
    assert rank_pools(2).run(parameter_work.made_under_inference_mode, kind) == [[]] * 2


@pytest.mark.parametrize("bad", [None, "norm.weight", "up.weight_1", "down.weight"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("norm", ["plain", "replicated", "sharded"])
def test_a_scaler_steps_on_all_ranks_or_on_none(
    rank_pools: Pools, norm: str, grouped: bool, bad: str | None
) -> None:
    assert rank_pools(4).run(parameter_work.scaled_steps, norm, grouped, bad) == [[]] * 4
