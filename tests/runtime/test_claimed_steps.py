"""CTAs of matmul + reduce-scatter and + all-reduce of which only some find room on their GPU: they
claim the steps of the core's order by the rule of `src/gemm/sm90/claimed_steps.hpp`, and come to an
end in a model, where CTAs to which the steps are dealt out alone stand still."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from agmm import _core

Step = tuple[int, int]
"""The owner of a tile, and its number."""
GRID = 20


def orders(world_size: int, rows: int, n: int, *, is_all_reduce: bool) -> list[list[Step]]:
    """What each rank computes, in its order."""
    swizzle = 2 if is_all_reduce else 4
    config = _core.KernelConfig(
        *(128, 128, 64, 1, 1, "pingpong"), max_swizzle=swizzle, raster="along_n"
    )
    found = []
    for rank in range(world_size):
        (steps,) = _core.scatter_steps(
            rank, world_size, rows, n, config, GRID if is_all_reduce else 0
        )
        found.append([(owner, tile) for owner, *_, tile in steps])
    return found


class Claims:
    """What the CTAs of a rank share. A CTA's list is every GRID-th step; until all have started, it
    begins a step only when all before it are claimed, and takes over those that are not."""

    def __init__(self, order: Sequence[Step]) -> None:
        self.order = order
        self.claimed = [0] * GRID
        self.started = 0

    def of_cta(self, cta: int) -> Iterator[int]:
        self.started += 1
        while (own := self._claim(cta)) < len(self.order):
            while own != cta and self.started < GRID:
                least = min(c + n * GRID for c, n in enumerate(self.claimed))
                if least > own:
                    break
                yield self._claim(least % GRID)
            yield own

    def _claim(self, of: int) -> int:
        self.claimed[of] += 1
        return of + (self.claimed[of] - 1) * GRID


class Dealt:
    """Every CTA has each GRID-th step, whoever has started."""

    def __init__(self, order: Sequence[Step]) -> None:
        self.order = order

    def of_cta(self, cta: int) -> Iterator[int]:
        return iter(range(cta, len(self.order), GRID))


@dataclass
class Cta:
    steps: Iterator[int]
    held: list[int] = field(default_factory=list)

    def claim(self) -> None:
        """Ahead of what is computed: two groups of consumers and the loads have a step each."""
        while len(self.held) < 4 and (step := next(self.steps, None)) is not None:
            self.held.append(step)


def steps_left(
    of_ranks: Sequence[Sequence[Step]],
    residents: Sequence[int],
    share: Callable[[Sequence[Step]], Claims | Dealt],
    draw: random.Random,
) -> int:
    """How many steps are not over when nothing can go on any more. A rank's CTAs start in their
    order, as many as find room, and who goes on first is drawn."""
    shares = [share(order) for order in of_ranks]
    started = [0] * len(of_ranks)
    running: list[list[Cta]] = [[] for _ in of_ranks]
    sent: set[tuple[int, int, int]] = set()
    left = sum(len(order) for order in of_ranks)

    def start(rank: int) -> None:
        while len(running[rank]) < residents[rank] and started[rank] < GRID:
            cta = Cta(shares[rank].of_cta(started[rank]))
            if (first := next(cta.steps, None)) is not None:  # before it does anything else
                cta.held.append(first)
            running[rank].append(cta)
            started[rank] += 1

    def goes_on(rank: int, cta: Cta) -> bool:
        owner, tile = of_ranks[rank][cta.held[0]]
        if owner != rank:
            sent.add((rank, owner, tile))
            return True
        return all((r, rank, tile) in sent for r in range(len(of_ranks)) if r != rank)

    while True:
        moved = False
        for rank in draw.sample(range(len(of_ranks)), len(of_ranks)):
            start(rank)
            for cta in draw.sample(running[rank], len(running[rank])):
                cta.claim()
                while cta.held and goes_on(rank, cta):
                    cta.held.pop(0)
                    left -= 1
                    moved = True
                    cta.claim()
                    if draw.random() < 0.5:
                        break
                if not cta.held:
                    running[rank].remove(cta)
                    moved = True
        if not moved:
            return left


SHAPES = [(512, 1408), (1024, 2048), (4096, 1024), (3072, 1408)]


@pytest.mark.parametrize("is_all_reduce", [False, True], ids=["scatter", "all-reduce"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ctas_comes_to_an_end(world_size: int, is_all_reduce: bool) -> None:
    draw = random.Random(f"{world_size} {is_all_reduce}")
    for rows, n in SHAPES:
        of_ranks = orders(world_size, rows, n, is_all_reduce=is_all_reduce)
        for residents in (1, 7, 10, 14, 19, GRID):
            assert steps_left(of_ranks, [residents] * world_size, Claims, draw) == 0
        # Ranks that have different parts of their GPUs.
        drawn = [draw.randint(1, GRID) for _ in range(world_size)]
        assert steps_left(of_ranks, drawn, Claims, draw) == 0, (rows, n, drawn)


@pytest.mark.parametrize("is_all_reduce", [False, True], ids=["scatter", "all-reduce"])
def test_the_model_shows_that_dealt_steps_need_all_ctas(is_all_reduce: bool) -> None:
    stuck = set()
    for rows, n in SHAPES:
        of_ranks = orders(4, rows, n, is_all_reduce=is_all_reduce)
        assert steps_left(of_ranks, [GRID] * 4, Dealt, random.Random(0)) == 0
        if steps_left(of_ranks, [GRID // 2] * 4, Dealt, random.Random(0)):
            stuck.add((rows, n))
    assert stuck
