"""Layers and styles on fp8 operands on CPU ranks, against torchao's whole modules."""

from __future__ import annotations

import importlib.util
from typing import Any

import fp8_work as work
import pytest
import torch

from agmm.errors import InvalidArgument
from agmm.nn import Fp8Cast
from agmm.nn.fp8_recipe import RECIPES, resolved
from agmm.testing.ranks import RankPool

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="needs torchao 0.18.0: pip install --no-deps torchao==0.18.0",
)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@needs_torchao
def test_recipes_are_those_of_torchao() -> None:
    assert work.recipes() == []


@needs_torchao
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_column_layer_as_torchao(pool: RankPool, recipe: str, world_size: int) -> None:
    check(pool.run(work.column_against_torchao, world_size, recipe, True, 1, 16), world_size)
    check(pool.run(work.column_against_torchao, world_size, recipe, False, 2, 5), world_size)


@needs_torchao
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_row_layer_as_torchao(pool: RankPool, recipe: str, world_size: int) -> None:
    check(pool.run(work.row_against_torchao, world_size, recipe, True, 16), world_size)
    check(pool.run(work.row_against_torchao, world_size, recipe, False, 3), world_size)


@needs_torchao
@pytest.mark.parametrize(
    ("recipe", "by", "dtype"),
    [
        ("rowwise", "torchao", torch.bfloat16),
        pytest.param("rowwise", "styles", torch.float32, marks=pytest.mark.slow),
        pytest.param("tensorwise", "torchao", torch.float32, marks=pytest.mark.slow),
        pytest.param("rowwise_with_gw_hp", "torchao", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_llama_block_follows_the_unsharded_fp8_block(
    pool: RankPool, recipe: str, by: str, dtype: torch.dtype
) -> None:
    curves = [c for c in pool.run(work.llama_losses, recipe, by, dtype, 20) if c is not None]
    assert len(curves) == 4
    sharded, whole = curves[0]
    assert len(sharded) == len(whole) == 20
    assert whole[-1] < 0.8 * whole[0]
    assert max(abs(a - b) / b for a, b in zip(sharded, whole, strict=True)) < 0.02


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiled_layers(pool: RankPool, dynamic: bool) -> None:
    check(pool.run(work.compiled, 2, dynamic), 2)


def test_autocast_and_checkpoint(pool: RankPool) -> None:
    check(pool.run(work.autocast_and_checkpoint, 2), 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_rows_and_frozen_layers(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.nothing, world_size), world_size)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "name",
            "fp8: found 'row', wanted 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'block', an",
        ),
        ("in", "ColumnParallelLinear: in_features: found 24 with fp8, wanted a multiple of 16"),
        (
            "out",
            "ColumnParallelLinear: out_features: found 48 with fp8, wanted a multiple of 16",
        ),
        ("row in", "RowParallelLinear: in_features: found 48 with fp8, wanted a multiple of 16 on"),
        ("saved", "ColumnParallelLinear: save_gathered: found True with fp8, wanted False: the"),
        ("float64", "x: found dtype torch.float64 in a layer with fp8, wanted bfloat16, float16"),
        ("style size", "out_features: found 48 with fp8, wanted a multiple of 32"),
        ("style saved", "save_gathered: found True with fp8, wanted False: the rows that"),
        pytest.param(
            "other recipe",
            "fp8: found rowwise, wanted None or the module's own tensorwise",
            marks=needs_torchao,
        ),
        pytest.param("mixed", "fp8: found rowwise, wanted no fp8 as", marks=needs_torchao),
        pytest.param(
            "fsdp", "fp8: found enable_fsdp_float8_all_gather=True, wanted", marks=needs_torchao
        ),
        pytest.param(
            "disabled",
            "fp8: found cast_config_input with scaling_type=disabled, wanted dynamic",
            marks=needs_torchao,
        ),
    ],
)
def test_what_is_refused(pool: RankPool, kind: str, message: str) -> None:
    for found in pool.run(work.bad, kind)[3:]:
        assert message in found


def test_blocks_are_for_both_operands_of_a_product() -> None:
    recipe = resolved("block")
    assert recipe is not None and (recipe.name, resolved(recipe)) == ("block", recipe)
    of_rows = Fp8Cast(torch.float8_e4m3fn, True)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"weight": of_rows}, "one of input and weight, wanted them for both or none"),
        ({"grad_output": of_rows}, "one of grad_output and weight_for_grad_input, wanted them for"),
        (
            {"input_for_grad_weight": recipe.input},
            "input_for_grad_weight with scales of blocks, wanted others or None",
        ),
    ]
    for changed, message in bad:
        with pytest.raises(InvalidArgument, match=f"^fp8: found .*{message}"):
            resolved(recipe._replace(**changed))


@needs_torchao
@pytest.mark.parametrize(
    "style", ["GatherColwiseParallel", "RowwiseScatterParallel", "RowwiseAllReduceParallel"]
)
def test_weights_that_torchao_has_quantised_are_refused(pool: RankPool, style: str) -> None:
    message = (
        "found torchao.quantization.Int8Tensor, wanted a plain tensor: no style divides weights "
        "that are quantised already"
    )
    assert pool.run(work.quantised_by_torchao, style) == [message] * 5
