"""fp8 layers on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import fp8_layers_work
import pytest
from at_hand import needs_nccl, world_sizes

from agmm.nn.fp8_recipe import RECIPES
from agmm.testing.ranks import RankPool

pytestmark = needs_nccl


@pytest.fixture(scope="module", params=world_sizes(2, 3, 4, 8))
def layer_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Its own ranks: torch's reduce-scatter takes part in rendezvous that are not counted."""
    with RankPool(request.param, "cuda") as pool:
        yield pool


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [16, 33, 512])
@pytest.mark.parametrize("recipe", [*RECIPES, "block"])
def test_layers(layer_pool: RankPool, recipe: str, rows: int, bias: bool) -> None:
    results = layer_pool.run(fp8_layers_work.layers, recipe, rows, bias)
    assert results == [[]] * layer_pool.world_size


@pytest.mark.parametrize(("rows", "hidden"), [(33, 256), (512, 144)])
@pytest.mark.parametrize("recipe", [*RECIPES, "block"])
def test_gated_mlp(layer_pool: RankPool, recipe: str, rows: int, hidden: int) -> None:
    results = layer_pool.run(fp8_layers_work.gated, recipe, rows, hidden)
    assert results == [[]] * layer_pool.world_size
