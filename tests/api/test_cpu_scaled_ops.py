"""The ops on fp8 operands on CPU ranks, against float64 products of the dequantised operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import quick
import scaled_work as work
import torch

from agmm import _core
from agmm.runtime.scaling import BLOCK, K_MULTIPLE
from agmm.testing.ranks import RankPool

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("kind", work.KINDS)
def test_gather(pool: RankPool, kind: str, world_size: int) -> None:
    check(pool.run(work.gathered, world_size, kind, return_A=True), world_size)
    check(pool.run(work.gathered, world_size, kind, bias=True, weights=3), world_size)


GATHERS: list[dict[str, Any]] = [
    {"out_dtype": torch.float16, "bias": True},
    {"out_dtype": torch.float32, "bias": True, "row_major": True},
    {"out_dtype": E4M3, "result_scale": True},
    {"out_dtype": E5M2, "result_scale": True, "weights": 2},
    {"dtypes": (E5M2, E4M3), "return_A": True},
    {"dtypes": (E4M3, E5M2)},
    {"leading": (2, 3), "return_A": True},
    {"leading": (4,), "gather_dim": 1, "return_A": True},
    {"leading": (2, 3), "gather_dim": -2, "weights": 2, "return_A": True},
]


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gathers(pool: RankPool, case: dict[str, Any]) -> None:
    for kind in work.KINDS:
        check(pool.run(work.gathered, 3, kind, **case), 3)


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("kind", work.KINDS)
def test_scatter(pool: RankPool, kind: str, world_size: int) -> None:
    check(pool.run(work.scattered, world_size, kind), world_size)
    results = pool.run(work.scattered, world_size, kind, bias=True, reduce_op="avg")
    check(results, world_size)


SCATTERS: list[dict[str, Any]] = [
    {"out_dtype": torch.float16, "bias": True},
    {"out_dtype": torch.float32, "bias": True, "reduce_op": "avg"},
    {"out_dtype": E4M3, "result_scale": True},
    {"dtypes": (E5M2, E4M3)},
    {"dtypes": (E4M3, E5M2), "bias": True},
    {"leading": (2, 3)},
    {"leading": (2,), "scatter_dim": 1, "bias": True},
    {"products": 2, "bias": True},
    {"products": 4, "leading": (2,), "reduce_op": "avg", "out_dtype": torch.float32},
]


@pytest.mark.parametrize("case", SCATTERS, ids=str)
def test_scatters(pool: RankPool, case: dict[str, Any]) -> None:
    for kind in work.KINDS:
        check(pool.run(work.scattered, 3, kind, **case), 3)


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("kind", work.KINDS)
def test_all_ranks_get_the_bits_of_one_sum(pool: RankPool, kind: str, world_size: int) -> None:
    check(pool.run(work.summed, world_size, kind), world_size)


SUMS: list[dict[str, Any]] = [
    {"out_dtype": torch.float16, "bias": True},
    {"out_dtype": torch.float32, "bias": True, "leading": (2,)},
    {"out_dtype": E4M3, "result_scale": True, "bias": True},
    {"dtypes": (E5M2, E4M3)},
    {"rows": (8200,)},  # in two bands
]


@pytest.mark.parametrize("case", SUMS, ids=str)
def test_all_reduces(pool: RankPool, case: dict[str, Any]) -> None:
    for kind in work.KINDS:
        check(pool.run(work.summed, 3, kind, **case), 3)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_an_all_reduce_by_a_scatter_and_a_gather(
    pool: RankPool, kind: str, world_size: int
) -> None:
    """The way of a GPU, with the CPU's scatter in place of the kernel."""
    for bias in (False, True):
        check(pool.run(work.summed_as_on_cuda, world_size, kind, bias), world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_kernel_sums_several_products(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.several_as_on_cuda, world_size), world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", work.KINDS)
def test_a_gather_that_is_planned(pool: RankPool, kind: str, world_size: int) -> None:
    check(pool.run(work.gathered_as_planned, world_size, kind), world_size)


@pytest.mark.slow
def test_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    pool = rank_pools(8)
    for kind in work.KINDS:
        check(pool.run(work.gathered, 8, kind, return_A=True), 8)
        check(pool.run(work.scattered, 8, kind, bias=True), 8)
        check(pool.run(work.summed, 8, kind, bias=True), 8)


@pytest.mark.parametrize("kind", work.KINDS)
def test_scales_come_with_their_chunk(pool: RankPool, kind: str) -> None:
    check(pool.run(work.delayed, 4, kind), 4)


def test_same_bits(pool: RankPool) -> None:
    check(pool.run(work.repeated, 4), 4)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "block"])
def test_compiled(pool: RankPool, kind: str) -> None:
    check(pool.run(work.compiled, 2, kind), 2)


@pytest.mark.parametrize("kind", work.KINDS)
def test_unfused(pool: RankPool, kind: str) -> None:
    check(pool.run(work.unfused, 3, kind), 3)


@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "block"])
def test_quantised_before_the_gather(pool: RankPool, kind: str, world_size: int) -> None:
    check(pool.run(work.quantised, world_size, kind), world_size)


@pytest.mark.parametrize("world_size", quick.first(2, [1, 3, 5]))
def test_quantised_by_one_scale(pool: RankPool, world_size: int) -> None:
    check(pool.run(work.quantised_by_one_scale, world_size), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("scales", ["tensorwise", "rowwise", "replicated"])
def test_torchs_gather(pool: RankPool, scales: str, gather_dim: int, world_size: int) -> None:
    check(pool.run(work.served_gather, world_size, scales, gather_dim), world_size)


def test_torchs_gather_scales_fp8_results_only(pool: RankPool) -> None:
    for out_dtype in (None, torch.bfloat16):
        results = pool.run(work.served_gather, 3, "rowwise", 0, out_dtype, True)
        check(results, 3)


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("kind", ["tensorwise", pytest.param("rowwise", marks=work.needs_rowwise)])
def test_as_torch(pool: RankPool, kind: str, gather_dim: int) -> None:
    check(pool.run(work.as_torch, 3, kind, gather_dim), 3)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("scatter_dim", [0, 1])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_torchs_scatter(pool: RankPool, kind: str, scatter_dim: int, world_size: int) -> None:
    for reduce_op in ("sum", "avg"):
        results = pool.run(work.served_scatter, world_size, kind, scatter_dim, reduce_op)
        check(results, world_size)


def test_the_core_has_the_same_blocks() -> None:
    assert _core.QUANTIZE_BLOCK == BLOCK
    assert _core.QUANTIZE_MULTIPLE == K_MULTIPLE
