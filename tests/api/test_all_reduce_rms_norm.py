"""`agmm.collectives.all_reduce_rms_norm` on CPU ranks, and what it says to wrong arguments."""

from __future__ import annotations

from typing import Any

import norm_work
import pytest
import torch
from collectives_work import group_of

import agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool


def _wrong(world_size: int, dtype: torch.dtype) -> list[str] | None:
    group = group_of(world_size)
    if group is None:
        return None
    return [
        fault for shape in norm_work.SHAPES for fault in norm_work.wrong(group, shape, dtype, "cpu")
    ]


def _in_group(work: Any, world_size: int) -> Any:
    group = group_of(world_size)
    return None if group is None else work(group)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert [found for found in results if found is not None] == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_values(pool: RankPool, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(pool.run(_wrong, world_size, dtype), world_size)


def test_gradients_are_those_of_the_parts(pool: RankPool) -> None:
    check(pool.run(_in_group, norm_work.gradients, 3), 3)


def test_is_traced_as_one_op(pool: RankPool) -> None:
    check(pool.run(_in_group, norm_work.compiled, 2), 2)


def test_shapes_without_data(group: str) -> None:
    x, weight = torch.empty(3, 8, device="meta"), torch.empty(8, device="meta")
    for found in agmm.collectives.all_reduce_rms_norm(x, x, weight):
        assert found.shape == (3, 8) and found.is_meta


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"x": torch.zeros(())}, "x: found 0 dimensions"),
        ({"x": torch.zeros(2, 8, dtype=torch.int64)}, "x: found 2 dimensions of torch.int64"),
        ({"residual": torch.zeros(8)}, r"residual: found shape \(8,\)"),
        ({"residual": torch.zeros(2, 8).half()}, "residual: found dtype torch.float16"),
        ({"weight": torch.zeros(2, 8)}, r"weight: found shape \(2, 8\)"),
        ({"eps": -1.0}, "eps: found -1.0"),
        ({"eps": float("nan")}, "eps: found nan"),
        ({"strict": 1}, "strict: found 1"),
        ({"out": torch.zeros(8)}, r"out: found \(8,\)"),
        ({"residual_out": torch.zeros(2, 8).half()}, r"residual_out: found \(2, 8\)"),
        ({"out": torch.zeros(2, 8, requires_grad=True)}, "x: found requires_grad=True"),
    ],
)
def test_refuses(group: str, change: dict[str, Any], wanted: str) -> None:
    given = {"x": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8)}
    with pytest.raises(InvalidArgument, match=wanted):
        agmm.collectives.all_reduce_rms_norm(**{**given, **change})
