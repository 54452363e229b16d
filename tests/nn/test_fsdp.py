"""FSDP2 with agmm's collectives, on CPU ranks: training is what torch's own collectives give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_work
import pytest
import quick
import torch

from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]
MESHES = ((2, 1), pytest.param((4, 1), marks=pytest.mark.slow), (2, 2))


def check(results: list[list[str]]) -> None:
    assert [fault for result in results for fault in result] == []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "case",
    quick.first(
        3,
        [
            {"dtype": torch.float32},
            {"dtype": torch.float32, "mixed": True},
            {"dtype": torch.float32, "asyn": True},
            {"dtype": torch.float32, "reshard": False},
            {"dtype": torch.float64},
        ],
    ),
    ids=str,
)
def test_trains_as_torch_does(
    rank_pools: Pools, mesh: tuple[int, int], case: dict[str, Any]
) -> None:
    """Bit for bit: CPU ranks use the group's backend, after they have met."""
    check(rank_pools(mesh[0] * mesh[1]).run(fsdp_work.trains, *mesh, **case))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"dtype": torch.float32, "slot_bytes": 1 << 16},
        {"dtype": torch.float32, "mixed": True, "slot_bytes": 256},
        {"dtype": torch.float32, "reshard": False, "slot_bytes": 1024},
    ],
    ids=str,
)
@pytest.mark.slow
def test_trains_through_slots(
    rank_pools: Pools, mesh: tuple[int, int], case: dict[str, Any]
) -> None:
    """It trains like on GPUs, but for streams: in one piece and in many, with two ranks bit for
    bit."""
    check(rank_pools(mesh[0] * mesh[1]).run(fsdp_work.trains, *mesh, **case))


@pytest.mark.parametrize("slot_bytes", [0, 4096], ids=["backend", "slots"])
def test_replicas_and_shards(rank_pools: Pools, slot_bytes: int) -> None:
    """The all-reduce between replicas stays the backend's."""
    case: dict[str, Any] = {"dtype": torch.float32, "replicas": True, "slot_bytes": slot_bytes}
    check(rank_pools(4).run(fsdp_work.trains, 2, 2, **case))


def test_several_meshes(rank_pools: Pools) -> None:
    reason = "1 has parameters over several meshes"
    for said in rank_pools(2).run(fsdp_work.several_meshes):
        assert said == [
            f"fsdp: {reason}",
            "DefaultAllGather DefaultAllGather DefaultAllGather",
            f"agmm leaves FSDP to the group's backend: {reason}",
            "AllGather DefaultAllGather AllGather",
        ]


def test_on_and_off(rank_pools: Pools) -> None:
    torchs, agmms = "DefaultAllGather/DefaultReduceScatter", "AllGather/ReduceScatter"
    for seen in rank_pools(2).run(fsdp_work.turned_off_and_on):
        assert seen == [torchs, agmms, agmms, torchs, torchs, agmms]


def test_refusals(rank_pools: Pools) -> None:
    for said in rank_pools(2).run(fsdp_work.refusals):
        unsharded = "InvalidArgument: model: found Linear without FSDP2, wanted one with modules"
        assert all(each.startswith(unsharded) for each in said[:2])
        assert said[2] == (
            "InvalidArgument: model: found ProcessGroupAllocAllGather set on 2, wanted modules "
            "with torch's default collectives"
        )
        assert said[3] == "DefaultAllGather"  # nothing was changed


def test_fallbacks_are_said_once(rank_pools: Pools) -> None:
    reason = "group: cuda:0 has no peer access to cuda:1"
    left = "agmm leaves FSDP to the group's backend: "
    for said in rank_pools(2).run(fsdp_work.fallbacks):
        assert said == [
            left + reason,  # of a whole model
            left + reason,  # of collectives that know nothing of each other
            left + reason,
            left + "a reduce-scatter that neither sums nor takes the mean",
            left + "a reduce-scatter of torch.int64",
            f"strict: fsdp: {reason}",
            f"strict: fsdp: {reason}",
        ]
