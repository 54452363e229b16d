"""Mixtures of experts on CPU ranks: results, routings and gradients against an unfused model in
float64, refusals, and what torch makes of the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moe_work as work
import pytest
import torch
from moe_work import Case

from agmm.runtime import cpu_collectives
from agmm.testing.ranks import RankPool

SKEWS = ("even", "zipf", "one", "none", "drops")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(results: list[list[str] | None], world_size: int) -> None:
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


def uneven(world_size: int) -> tuple[int, ...]:
    """Numbers of tokens of which one is 0 where there are several ranks."""
    return tuple((3 * rank + 5) % 7 for rank in range(world_size))


def table(world_size: int, dtype: torch.dtype) -> list[Case]:
    """Cases of every skew, with few and with many experts and choices."""
    even = (4,) * world_size
    found = [Case(even, k, 2, skew, dtype) for skew in SKEWS for k in (1, 2, 5)]
    found += [
        Case(uneven(world_size), 2, experts, skew, dtype, seed=experts, column_major=True)
        for skew in SKEWS
        for experts in (1, 8)
    ]
    found += [Case(even, 2, 4, "zipf", dtype, activation=name) for name in (None, "gelu", "relu2")]
    found += [Case(uneven(world_size), 3, 4, "drops", dtype, sliced=True, bias=False, seed=2)]
    return [*found, Case(even, 16, 64, "zipf", dtype), Case((0,) * world_size, 2, 2, "even", dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "world_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5)), 3]
)
def test_results_are_those_of_the_model(
    pool: RankPool, world_size: int, dtype: torch.dtype
) -> None:
    check(pool.run(work.forward_faults, world_size, table(world_size, dtype)), world_size)


def test_many_experts_and_choices(pool: RankPool) -> None:
    cases = [Case((3, 0, 5), 16, 171, skew, torch.float64) for skew in ("even", "one")]
    check(pool.run(work.forward_faults, 3, cases), 3)


@pytest.mark.slow
def test_results_of_eight_ranks(rank_pools: Callable[..., RankPool]) -> None:
    cases = [case for dtype in DTYPES[::3] for case in table(8, dtype)[::2]]
    check(rank_pools(8).run(work.forward_faults, 8, cases), 8)


@pytest.mark.parametrize("tokens", [(0, 3000, 1), (2500, 2500, 2500)], ids=str)
def test_tensors_that_go_through_the_slots_in_bands(
    pool: RankPool, tokens: tuple[int, ...]
) -> None:
    """More than `BAND_BYTES` are sent, of which a rank without tokens sends nothing."""
    case = Case(tokens, 1, 2, "zipf", torch.float64, hidden=120, inner=3)
    assert max(tokens) * case.hidden * 8 > cpu_collectives.BAND_BYTES
    check(pool.run(work.forward_faults, 3, [case]), 3)


def test_ranks_with_different_numbers_ask_for_slots_of_one_size() -> None:
    """Else some would take part in growing them, and others not."""
    sizes, whole = [0, 100_000, 7], torch.zeros(100_007)
    found = set()
    for rank, size in enumerate(sizes):
        own = torch.zeros(size)
        jobs = (
            cpu_collectives.AllGather(rank, 3, own, whole, sizes),
            cpu_collectives.ReduceScatter(rank, 3, whole, own, False, sizes),
        )
        found |= {job.slot_bytes() for job in jobs}
    assert len(found) == 1 and found.pop() >= 2 * 4 * 100_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_random_cases(pool: RankPool, world_size: int, seed: int) -> None:
    check(pool.run(work.random_faults, world_size, seed, 25), world_size)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_gathered": True},
    {"save_gathered": True},
    {"save_preactivation": False, "return_gathered": True, "save_gathered": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda given: " ".join(given) or "as usual")
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_gradients_are_those_of_the_model(
    pool: RankPool, world_size: int, options: dict[str, Any]
) -> None:
    even, odd = (3,) * world_size, uneven(world_size)
    cases = [
        Case(even, 2, 2),
        Case(odd, 3, 2, "drops", column_major=True),
        Case(odd, 2, 3, "zipf", activation=None, seed=5),
        Case(even, 2, 3, "one", activation="gelu", sliced=True, bias=False),
        Case(odd, 1, 2, "none"),
        Case((0,) * world_size, 2, 2),
    ]
    check(pool.run(work.gradient_faults, world_size, cases, options), world_size)
