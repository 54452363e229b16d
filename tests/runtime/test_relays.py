"""Collectives in two steps over the direct links of a machine, on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import relay_work
import torch

from agmm.testing import machines
from agmm.testing.ranks import RankPool


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        (machines.DGX_1V, range(8)),
        (machines.DGX_1P, (6, 1, 4, 0, 3, 7, 2, 5)),
        (machines.DGX_1V, (0, 1, 4, 5)),
        (machines.DGX_1V, (0, 1, 2, 3, 4)),
    ],
    ids=["whole", "shuffled", "ring", "corner"],
)
def test_collectives(rank_pools: Callable[..., RankPool], text: str, gpus: Sequence[int]) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        results = rank_pools(8).run(relay_work.collectives, text, gpus, seed, dtype)
        assert sum(result is not None for result in results) == len(gpus)
        assert [fault for result in results for fault in result or []] == []


def test_a_message_over_pcie_would_be_found(rank_pools: Callable[..., RankPool]) -> None:
    found = rank_pools(8).run(relay_work.first_message_without_a_link, machines.DGX_1V)
    assert found == [True] * 8
