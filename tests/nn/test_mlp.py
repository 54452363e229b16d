"""The gated feed-forward module on CPU ranks: against the whole module, the separate layers, under
FSDP2 and in fp8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp_work
import pytest
import torch

from agmm.errors import InvalidArgument
from agmm.nn import GatedMLP
from agmm.testing.ranks import RankPool


def check(results: list[Any], world_size: int) -> None:
    assert results == [None] * (5 - world_size) + [[]] * world_size


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("bias", "activation", "options"),
    [
        (False, "silu_mul", {}),
        (True, "silu_mul", {"save_preactivation": False}),
        (True, "gelu_mul", {"save_gathered": True}),
        (False, "gelu_tanh_mul", {"save_gathered": True, "save_preactivation": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_it_is_the_whole_module(
    pool: RankPool,
    world_size: int,
    bias: bool,
    activation: str,
    options: dict[str, Any],
    compiled: bool,
) -> None:
    given = world_size, bias, activation, compiled
    check(pool.run(mlp_work.against_whole, *given, **options), world_size)


def test_it_has_one_gather_and_one_scatter(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(mlp_work.calls, 2, str(tmp_path / "calls-{rank}.json"))[-1] == [
        ("all_gather_matmul", 2, "silu_mul", 1),
        ("matmul_reduce_scatter", 1, None, 1),
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_are_those_of_the_separate_layers(
    pool: RankPool, world_size: int, bias: bool
) -> None:
    check(pool.run(mlp_work.checkpoints, world_size, bias), world_size)


def test_fsdp_shards_its_parameters(rank_pools: Callable[..., RankPool]) -> None:
    assert rank_pools(4).run(mlp_work.with_fsdp) == [[]] * 4


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_is_that_of_the_separate_layers(pool: RankPool, recipe: str, compiled: bool) -> None:
    check(pool.run(mlp_work.fp8, 2, recipe, compiled), 2)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hidden", [256, 144])
def test_scales_of_blocks_are_those_of_the_separate_layers(
    pool: RankPool, hidden: int, compiled: bool
) -> None:
    """Blocks that end with a weight, and such as would cross from gate to up."""
    check(pool.run(mlp_work.fp8, 2, "block", compiled, 192, hidden), 2)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation": "silu"},
            "GatedMLP: activation: found 'silu', wanted one of silu_mul, gelu_mul, gelu_tanh_mul",
        ),
        (
            {"fp8": "rowwise", "save_preactivation": False},
            "GatedMLP: save_preactivation: found False with fp8, wanted True",
        ),
        ({"fp8": "rowwise", "save_gathered": True}, "ColumnParallelLinear: save_gathered: found"),
        ({"save_preactivation": 1}, "save_preactivation: found 1, wanted True or False"),
    ],
    ids=str,
)
def test_refusals_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        GatedMLP(16, 32, **options)(torch.ones(2, 16))


@pytest.mark.usefixtures("group")
def test_an_input_is_refused_in_the_words_of_the_layers() -> None:
    mlp = GatedMLP(16, 32)
    with pytest.raises(InvalidArgument, match=r"^ColumnParallelLinear: x: found 8 features"):
        mlp(torch.ones(2, 8))
    assert "activation=silu_mul" in repr(mlp)
