"""Weights of 4 bits on CPU ranks, against float64 products of what they stand for."""

from __future__ import annotations

from typing import Any

import packed_work as work
import pytest
import torch

import agmm
from agmm.testing.ranks import RankPool


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("group_size", [32, 64])
def test_products(pool: RankPool, group_size: int, world_size: int) -> None:
    check(pool.run(work.gathered, world_size, group_size, bias=True), world_size)
    check(pool.run(work.gathered, world_size, group_size, weights=2, return_A=True), world_size)


@pytest.mark.parametrize(
    "case",
    [
        {"leading": (3,), "return_A": True},
        {"leading": (3, 2), "gather_dim": 1, "weights": 3},
        {"rows": 37},
        {"compiled": True},
        {"rows": 0, "leading": (2,)},
    ],
    ids=str,
)
def test_cases(pool: RankPool, case: dict[str, Any]) -> None:
    check(pool.run(work.gathered, 3, 32, **case), 3)


def test_chunks_change_no_bit(pool: RankPool) -> None:
    check(pool.run(work.same_as_unfused, 3), 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dtype", "A_shard: found dtype torch.bfloat16 with a Packed4BitWeight, wanted torch.f"),
        ("device", "A_shard: found device meta with a Packed4BitWeight, wanted cpu"),
        ("k", "B: found K=64, wanted 32 as the columns of A_shard"),
        ("mixed", "B: found Tensor beside a Packed4BitWeight, wanted weights of one kind"),
        ("config", "config: found 'unfused' with a Packed4BitWeight, wanted none"),
        ("gradient", "A_shard: found requires_grad=True, wanted a call under torch.no_grad(): pr"),
        ("dim", "gather_dim: found 1 with a Packed4BitWeight, wanted 0 to 0"),
    ],
)
def test_what_is_refused(pool: RankPool, kind: str, message: str) -> None:
    for found in pool.run(work.refused, kind)[3:]:
        assert message in found


def test_sizes_that_do_not_go_together() -> None:
    weight, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 2)
    packed = agmm.Packed4BitWeight.pack(weight, scales, 32)
    assert packed.shape == (64, 8)
    for arguments, message in (
        ((weight.int(), scales, 32), "weight: found torch.int32"),
        ((weight, scales, 48), "group_size: found 48, wanted K=64, or a multiple of 32"),
        ((weight, scales, 64), r"scales: found shape \(8, 2\), wanted \(8, 1\)"),
        ((weight, scales, 32, torch.ones(3)), "bias: found torch.float32"),
    ):
        with pytest.raises(agmm.InvalidArgument, match=message):
            agmm.Packed4BitWeight.pack(*arguments)
    with pytest.raises(agmm.InvalidArgument, match=r"packed: found .* bytes, wanted at least"):
        agmm.Packed4BitWeight(packed.packed[:1], 64, 8, 32)
    with pytest.raises(agmm.InvalidArgument, match="packed: found str, wanted a tensor"):
        agmm.Packed4BitWeight("", 64, 8, 32)  # type: ignore[arg-type]
