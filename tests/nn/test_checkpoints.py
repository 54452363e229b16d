"""Checkpoints of sharded models on CPU ranks, against the whole model that trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_work
import pytest

from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [
        (4, (1, 4, False), (2, 2, False)),
        pytest.param(4, (2, 2, False), (1, 4, False), marks=pytest.mark.slow),
        pytest.param(4, (2, 2, True), (1, 4, False), marks=pytest.mark.slow),
        pytest.param(4, (1, 4, False), (2, 2, True), marks=pytest.mark.slow),
        pytest.param(8, (2, 4, True), (4, 2, True), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_layout(
    rank_pools: Pools,
    tmp_path: Path,
    ranks: int,
    before: checkpoint_work.Layout,
    after: checkpoint_work.Layout,
) -> None:
    results = rank_pools(ranks).run(checkpoint_work.resharded, str(tmp_path), before, after)
    assert results == [[]] * ranks


@pytest.mark.parametrize("way", ["parts", "assigned", "whole", "files"])
def test_a_checkpoint_of_plain_tensors_still_loads(
    rank_pools: Pools, tmp_path: Path, way: str
) -> None:
    assert rank_pools(4).run(checkpoint_work.old_checkpoints, str(tmp_path), way) == [[]] * 4


def test_copies_of_a_model_train_on(rank_pools: Pools, tmp_path: Path) -> None:
    assert rank_pools(4).run(checkpoint_work.copies, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize("layout", [(1, 4, False), (2, 2, True)])
def test_first_values_without_memory(rank_pools: Pools, layout: checkpoint_work.Layout) -> None:
    assert rank_pools(4).run(checkpoint_work.first_values, layout) == [[]] * 4


@pytest.mark.parametrize("layout", [(1, 4, False), (2, 2, True)])
def test_nothing_is_loaded_of_a_bad_state_dict(
    rank_pools: Pools, layout: checkpoint_work.Layout
) -> None:
    message = "state_dict: found '1.back.2.bias' of shape (7,), wanted (8,)"
    assert rank_pools(4).run(checkpoint_work.bad_load, layout) == [(message, True)] * 4


def test_a_layer_that_fsdp_has_not_gathered(rank_pools: Pools) -> None:
    for message in rank_pools(4).run(checkpoint_work.inner_call, (2, 2, True)):
        assert message.startswith("ColumnParallelLinear: found a parameter over DeviceMesh(")
        assert "call the module that it was given" in message


def test_a_change_before_the_backward_is_refused(rank_pools: Pools) -> None:
    for message in rank_pools(4).run(checkpoint_work.changed_before_the_backward):
        assert message.startswith("weight_0, weight_1, weight_2, bias_0, bias_1, bias_2: found")
