"""torch's async-TP ops served by agmm, on CPU ranks."""

from __future__ import annotations

import cpu_async_tp_work as work
import pytest
import torch

from agmm.testing.ranks import RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("return_A", [True, False])
@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("gather_dim", [0, 1, 2])
def test_any_gather_dim(pool: RankPool, gather_dim: int, world_size: int, return_A: bool) -> None:
    shapes: list[tuple[int, ...]] = [(2, 3, 5, 7), (1, 1, 1, 8), (3, 1, 2, 65)]
    shapes += [(4, 2, 3)] if gather_dim < 2 else []
    shapes += [(1, 9), (13, 1)] if gather_dim == 0 else []
    results = pool.run(
        work.products, world_size, shapes, gather_dim, torch.float32, return_A=return_A
    )
    check(results, world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_dtypes_and_several_weights(pool: RankPool, gather_dim: int, dtype: torch.dtype) -> None:
    check(pool.run(work.products, 3, [(4, 5, 32)], gather_dim, dtype, weights=3), 3)


@pytest.mark.parametrize("gather_dim", [0, 1, 2])
def test_as_torch(pool: RankPool, gather_dim: int) -> None:
    check(pool.run(work.as_torch, 3, gather_dim), 3)


@pytest.mark.parametrize(
    ("shape", "weights", "return_A"), [((6, 32), 1, True), ((2, 3, 32), 3, False)]
)
def test_compiled(pool: RankPool, shape: tuple[int, ...], weights: int, return_A: bool) -> None:
    results = pool.run(work.compiled, 2, shape, weights, return_A)
    assert [fault for result in results for fault in result] == []


def test_parallel_module(pool: RankPool) -> None:
    results = pool.run(work.parallel_module, 2)
    assert [fault for result in results for fault in result] == []


SCATTERS = [
    (shape, dim, reduce_op)
    for shape, dim in (
        ((3, 7), 0),
        ((1, 1), 0),
        ((2, 3, 5, 7), 0),
        ((3, 2, 7), 1),
        ((1, 4, 1, 8), 2),
    )
    for reduce_op in ("sum", "avg")
]


# The last dimension is torch's to scatter: by gloo, which has no avg.
@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("shape", "scatter_dim", "reduce_op"), [*SCATTERS, ((3, 4), 1, "sum")])
def test_scatters(
    pool: RankPool, shape: tuple[int, ...], scatter_dim: int, reduce_op: str, world_size: int
) -> None:
    for dtype, layout in zip(
        (torch.float32, torch.bfloat16, torch.float64), work.LAYOUTS, strict=True
    ):
        results = pool.run(work.scattered, world_size, shape, scatter_dim, reduce_op, dtype, layout)
        check(results, world_size)


@pytest.mark.parametrize("shape", [(6, 32), (4, 3, 32)])
def test_compiled_scatter(pool: RankPool, shape: tuple[int, ...]) -> None:
    results = pool.run(work.compiled_scatter, 2, shape)
    assert [fault for result in results for fault in result] == []


def test_parallel_rows(pool: RankPool) -> None:
    results = pool.run(work.parallel_rows, 2)
    assert [fault for result in results for fault in result] == []
