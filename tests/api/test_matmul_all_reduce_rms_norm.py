"""`agmm.matmul_all_reduce_rms_norm` on CPU ranks, and what it says to wrong arguments."""

from __future__ import annotations

from typing import Any

import normed_sum_work
import pytest
import torch
from collectives_work import group_of
from short_ids import short

import agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _in_group(work: Any, world_size: int, *given: Any) -> Any:
    group = group_of(world_size)
    return None if group is None else work(group, *given)


def _wrong(world_size: int, dtype: torch.dtype) -> list[str] | None:
    group = group_of(world_size)
    if group is None:
        return None
    shapes = normed_sum_work.SHAPES
    return [fault for shape in shapes for fault in normed_sum_work.wrong(group, shape, dtype)]


def check(results: list[list[str] | None], world_size: int) -> None:
    assert [found for found in results if found is not None] == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values(pool: RankPool, world_size: int) -> None:
    for dtype in DTYPES:
        check(pool.run(_wrong, world_size, dtype), world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_row_has_its_bits_among_any_others(pool: RankPool, world_size: int) -> None:
    for dtype in DTYPES:
        work = normed_sum_work.rows_alone
        check(pool.run(_in_group, work, world_size, dtype), world_size)
    # Torch divides the sum of a long row among threads where it is given one row.
    check(pool.run(_in_group, work, world_size, torch.float32, "cpu", 70_000), world_size)


def test_gradients_are_those_of_the_parts(pool: RankPool) -> None:
    check(pool.run(_in_group, normed_sum_work.gradients, 2), 2)


def test_is_traced_as_one_op(pool: RankPool) -> None:
    check(pool.run(_in_group, normed_sum_work.compiled, 2), 2)


def test_shapes_without_data(group: str) -> None:
    A, B = torch.empty(3, 8, device="meta"), torch.empty(8, 4, device="meta")
    residual, weight = torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")
    for found in agmm.matmul_all_reduce_rms_norm(A, B, residual, weight):
        assert found.shape == (3, 4) and found.is_meta


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"A": torch.zeros(2, 8, dtype=torch.int64)}, "A: found dtype torch.int64, wanted one of"),
        ({"residual": None}, "residual: found None, wanted a tensor"),
        ({"residual": torch.zeros(4)}, r"residual: found shape \(4,\), wanted \(2, 4\)"),
        ({"weight": torch.zeros(2, 4)}, r"weight: found shape \(2, 4\), wanted \(4,\) as B's col"),
        ({"weight": torch.zeros(4).half()}, "weight: found dtype torch.float16"),
        ({"eps": -1.0}, "eps: found -1.0"),
        ({"eps": "1"}, "eps: found '1'"),
        ({"bias": torch.zeros(3)}, r"bias: found shape \(3,\)"),
        ({"config": "portable"}, "config: found 'portable', wanted 'streamed' or None"),
        ({"strict": 1}, "strict: found 1"),
        ({"batch_invariant": 1}, "batch_invariant: found 1"),
        ({"quantize_out": "int8"}, "quantize_out: found 'int8'"),
        ({"scale_out": torch.ones(1)}, "quantize_out: found None"),
    ],
    ids=short,
)
def test_refuses(group: str, change: dict[str, Any], wanted: str) -> None:
    given = {"A": torch.zeros(2, 8), "B": torch.zeros(8, 4), "residual": torch.zeros(2, 4)}
    with pytest.raises(InvalidArgument, match=wanted):
        agmm.matmul_all_reduce_rms_norm(**{**given, "weight": torch.zeros(4), **change})
