"""The backward of both collective matmuls on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd_work
import pytest
import torch

from agmm.testing.ranks import RankPool

GATHER_CASES: list[dict[str, Any]] = [
    {},
    {"column_major": True, "biases": (True,), "save_gathered": True},
    {"weights": 3, "biases": (False, True, True), "column_major": True},
    {"weights": 2, "biases": (True, False), "return_A": True},
    {"return_A": True, "save_gathered": True},
    {"leading": (2,), "biases": (True,)},
    {"gather_dim": 1, "leading": (2,), "config": "unfused", "biases": (True,)},
    {"gather_dim": -1, "config": "unfused", "return_A": True},
    {"gather_dim": 1, "config": "unfused"},
    {"frozen": ("A_shard",), "biases": (True,)},
    {"frozen": ("B0",), "biases": (True,), "save_gathered": True},
    {"frozen": ("A_shard", "B0"), "biases": (True,)},
    {"weights": 2, "frozen": ("B1", "bias0"), "biases": (True, True)},
]

ACTIVATION_CASES: list[dict[str, Any]] = [
    *[{"activation": name, "biases": (True,)} for name in ("relu", "relu2", "gelu")],
    {"activation": "gelu_tanh", "weights": 2, "save_preactivation": False},
    {"activation": "silu", "save_preactivation": False, "save_gathered": True, "biases": (True,)},
    {"activation": "silu", "gather_dim": 1, "leading": (2,), "config": "unfused"},
    {"activation": "silu_mul", "weights": 2, "biases": (True, False), "return_A": True},
    {"activation": "gelu_mul", "weights": 2, "biases": (True, True), "column_major": True},
    *[
        {"activation": "silu_mul", "weights": 2, "biases": (False, True), **options}
        for options in (
            {"save_preactivation": False},
            {"save_preactivation": False, "save_gathered": True},
            {"save_preactivation": False, "frozen": ("A_shard", "B1")},
            {"save_preactivation": False, "gather_dim": -1, "config": "unfused"},
            {"frozen": ("B0", "B1")},
        )
    ],
    {"activation": "gelu_tanh_mul", "weights": 2, "leading": (2,), "save_gathered": True},
]

SCATTER_CASES: list[dict[str, Any]] = [
    {},
    {"column_major": True, "bias": True},
    {"leading": (2,), "scatter_dim": 1, "bias": True},
    {"scatter_dim": -1},
    {"scatter_dim": -3, "leading": (1,), "reduce_op": "avg", "bias": True},
    {"frozen": ("A0",), "bias": True},
    {"frozen": ("B0",)},
    {"frozen": ("A0", "B0"), "bias": True},
    {"pairs": 3, "bias": True, "column_major": True},
    {"pairs": 2, "reduce_op": "avg", "scatter_dim": 1, "leading": (2,)},
    {"pairs": 2, "scatter_dim": -1},
    {"pairs": 3, "frozen": ("A1", "B0", "B2")},
    {"residual": True, "bias": True},
    {"residual": True, "reduce_op": "avg", "scatter_dim": 1, "leading": (2,)},
    {"residual": True, "scatter_dim": -1, "pairs": 2},
    {"residual": True, "frozen": ("A0", "B0")},
]


@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradcheck_of_all_gather_matmul(
    pool: RankPool, world_size: int, case: dict[str, Any]
) -> None:
    results = pool.run(autograd_work.gradcheck_all_gather_matmul, world_size, **case)
    assert results == [None] * (5 - world_size) + [True] * world_size


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradcheck_of_activations(pool: RankPool, world_size: int, case: dict[str, Any]) -> None:
    results = pool.run(autograd_work.gradcheck_all_gather_matmul, world_size, **case)
    assert results == [None] * (5 - world_size) + [True] * world_size


@pytest.mark.parametrize("case", SCATTER_CASES, ids=str)
@pytest.mark.parametrize(
    "world_size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))]
)
def test_gradcheck_of_matmul_reduce_scatter(
    pool: RankPool, world_size: int, case: dict[str, Any]
) -> None:
    results = pool.run(autograd_work.gradcheck_matmul_reduce_scatter, world_size, **case)
    assert results == [None] * (5 - world_size) + [True] * world_size


@pytest.mark.parametrize(
    ("return_A", "native", "wanted"), [(False, True, 0), (False, False, 1), (True, True, 1)]
)
def test_products_of_several_weights_are_added_up_without_more_full_size_tensors(
    pool: RankPool, return_A: bool, native: bool, wanted: int
) -> None:
    """Three weights took a tensor for each product and each sum: 5. In agmm's own scatter there is
    none; with a gradient of the gathered A, which belongs to autograd, there is one."""
    options = {"return_A": return_A, "native": native}
    for count, error in pool.run(autograd_work.full_size_tensors, 3, **options)[2:]:
        assert error < 1e-12
        assert count == wanted


def test_gradcheck_of_a_scatter_over_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    scatter = autograd_work.gradcheck_matmul_reduce_scatter
    assert rank_pools(8).run(scatter, 8, bias=True, reduce_op="avg") == [True] * 8


@pytest.mark.parametrize(
    ("widths", "asked", "served"),
    [
        ([2, 3, 3], [((12, 8), (8, 8), 0)] * 2, 1),  # joined or not, and then by whom
        ([2, 3, 4], [], 0),
        ([8], [((12, 8), (8, 8), 0)], 1),
    ],
)
def test_narrow_products_are_joined_for_the_fused_op(
    pool: RankPool, widths: list[int], asked: list[Any], served: int
) -> None:
    """8 columns at most, as the gathered A has; and only where the op serves the joined ones."""
    for found in pool.run(autograd_work.joined_products, 3, widths)[2:]:
        assert found[:2] == (asked, served)
        assert found[2] < 1e-12


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_checkpointed_compiled_and_kept_give_the_same(pool: RankPool, world_size: int) -> None:
    results = pool.run(autograd_work.block_variants, world_size)
    assert results == [None] * (5 - world_size) + [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_autocast(pool: RankPool, world_size: int) -> None:
    for result in pool.run(autograd_work.autocast_block, world_size)[5 - world_size :]:
        dtypes, error = result
        assert dtypes == [torch.bfloat16] + [torch.float32] * 3
        assert 0 < error < 0.05


def test_only_the_shard_is_kept_unless_asked(pool: RankPool) -> None:
    shard_bytes = 3 * 4 * 8
    assert pool.run(autograd_work.saved_bytes, 4, False) == [None] + [shard_bytes] * 4
    assert pool.run(autograd_work.saved_bytes, 4, True) == [None] + [4 * shard_bytes] * 4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rows", "A: found 5 in dimension 0, wanted a multiple of the world size 3"),
        ("columns", "B: found 2 columns, wanted a multiple of the world size 3"),
        ("K", "B: found K=5, wanted 4 as the columns of A"),
        ("dtype", "B: found dtype torch.float64, wanted torch.float32 as A"),
        ("A dimensions", "A: found 1 dimensions, wanted at least 2"),
        ("B dimensions", "B: found 1 dimensions, wanted 2"),
        ("scatter_dim", "scatter_dim: found 2, wanted -2 to 1"),
        ("reduce_op", "reduce_op: found 'max', wanted 'sum' or 'avg'"),
        ("bias", "bias: found shape (4,), wanted (3,) as B's columns"),
        (
            "bias columns",
            "bias: found one with scatter_dim=1, wanted None: the result's columns are scattered",
        ),
        ("type", "A: found float, wanted a tensor"),
        (
            "group",
            "group: found 'no such group', wanted the name of a process group of this process",
        ),
    ],
)
def test_bad_reduce_scatter_is_named_in_one_line(pool: RankPool, kind: str, message: str) -> None:
    assert pool.run(autograd_work.bad_reduce_scatter, kind)[2:] == [message] * 3
