"""A model of the ring of stages in `src/gemm/sm90/grouped_kernel.hpp`: its warps and barriers take
steps in random orders, and no product reads another load than its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

Step = Iterator[object]
"""A warp. It yields a condition to wait for it, and None to let others go on."""


class Barrier:
    """An mbarrier, which tells phases apart by their parity alone."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.left, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def change(self, arrivals: int = 0, expected: int = 0) -> None:
        self.left -= arrivals
        self.bytes += expected
        assert self.left >= 0, "an arrival too many"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Kernel:
    """One cluster. Loads of a stage are what landed there last: (tile, k tile, operand).

    Args:
        takes_turns: whether groups do as the kernel's, or begin when they like.
        is_scaled: whether a third warp stores the scales of fp8 rows, and each stage is given back
            before the next is multiplied.
    """

    def __init__(
        self,
        ctas: int,
        groups: int,
        stages: int,
        sizes: tuple[int, int],
        *,
        takes_turns: bool = True,
        is_scaled: bool = False,
    ) -> None:
        self.is_scaled = is_scaled
        self.ctas, self.groups, self.stages = ctas, groups, stages
        self.tiles, self.k_tiles = sizes
        self.takes_turns = takes_turns
        warpgroups = 2 // groups
        self.full = [[Barrier(2 + int(is_scaled)) for _ in range(stages)] for _ in range(ctas)]
        self.empty = [[Barrier(warpgroups * ctas) for _ in range(stages)] for _ in range(ctas)]
        self.turn = [[Barrier(1) for _ in range(2)] for _ in range(ctas)]
        self.held: dict[tuple[int, int, str], tuple[int, int]] = {}
        self.reading: set[tuple[int, int, int]] = set()
        self.landing: list[tuple[int, int, str, tuple[int, int]]] = []
        self.has_ended = [False] * ctas
        self.done = 0

    def uses(self) -> Iterator[tuple[int, int, int, int]]:
        for use, (tile, k) in enumerate(product(range(self.tiles), range(self.k_tiles))):
            yield use % self.stages, use // self.stages % 2, tile, k

    def load_weight(self, cta: int) -> Step:
        for stage, parity, tile, k in self.uses():
            while not self.empty[cta][stage].is_over(parity ^ 1):
                yield False
            self.full[cta][stage].change(arrivals=1, expected=1)
            self.landing.append((cta, stage, "B", (tile, k)))
            yield None

    def load_scales(self, cta: int) -> Step:
        for stage, parity, tile, k in self.uses():
            while not self.empty[cta][stage].is_over(parity ^ 1):
                yield False
            assert not any(key[::2] == (cta, stage) for key in self.reading), "read while written"
            self.held[cta, stage, "scales"] = (tile, k)
            yield None
            self.full[cta][stage].change(arrivals=1)

    def load_a(self, cta: int) -> Step:
        for stage, parity, tile, k in self.uses():
            while not self.empty[cta][stage].is_over(parity ^ 1):
                yield False
            self.full[cta][stage].change(arrivals=1, expected=self.ctas)
            for other in range(self.ctas):
                self.landing.append((other, stage, f"A{cta}", (tile, k)))
            yield None
        uses = self.tiles * self.k_tiles
        for use in range(uses, uses + self.stages):
            while not self.empty[cta][use % self.stages].is_over(use // self.stages % 2 ^ 1):
                yield False
        self.has_ended[cta] = True

    def multiply(self, cta: int, warpgroup: int) -> Step:
        group = 0 if self.groups == 1 else warpgroup
        turn, last = 0, -1
        for stage, parity, tile, k in self.uses():
            if tile % self.groups != group:
                continue
            if k == 0 and self.groups > 1 and self.takes_turns:
                while not self.turn[cta][group].is_over(turn ^ (group == 0)):
                    yield False
                turn ^= 1
            while not self.full[cta][stage].is_over(parity):
                yield False
            operands = ["B", *(f"A{other}" for other in range(self.ctas))]
            operands += ["scales"] * self.is_scaled
            found = {self.held.get((cta, stage, operand)) for operand in operands}
            assert found == {(tile, k)}, f"tile {tile}, k {k} read {found}"
            self.reading.add((cta, warpgroup, stage))
            yield None
            if self.is_scaled:
                self.give_back(cta, warpgroup, stage)
            elif k > 0:
                self.give_back(cta, warpgroup, last)
            last = stage
            if k == self.k_tiles - 1:
                if self.groups > 1:
                    self.turn[cta][1 - group].change(arrivals=1)
                yield None
                if not self.is_scaled:
                    self.give_back(cta, warpgroup, last)
                self.done += 1

    def give_back(self, cta: int, warpgroup: int, stage: int) -> None:
        self.reading.discard((cta, warpgroup, stage))
        for other in range(self.ctas):
            assert not self.has_ended[other], "an arrival at a CTA that has ended"
            self.empty[other][stage].change(arrivals=1)

    def land(self, drawn: random.Random) -> None:
        cta, stage, operand, loaded = self.landing.pop(drawn.randrange(len(self.landing)))
        assert not self.has_ended[cta], "a load for a CTA that has ended"
        assert not any(key[::2] == (cta, stage) for key in self.reading), "read while written"
        self.held[cta, stage, operand] = loaded
        self.full[cta][stage].change(expected=-1)

    def run(self, seed: int) -> None:
        drawn = random.Random(seed)
        warps: list[Step] = []
        for cta in range(self.ctas):
            warps += [self.load_a(cta), self.load_weight(cta)]
            warps += [self.load_scales(cta)] * self.is_scaled
            warps += [self.multiply(cta, warpgroup) for warpgroup in (0, 1)]
        idle = 0
        while warps:
            if self.landing and drawn.random() < 0.3:
                self.land(drawn)
                idle = 0
                continue
            i = drawn.randrange(len(warps))
            try:
                idle = idle + 1 if next(warps[i]) is False else 0
            except StopIteration:
                del warps[i]
            assert idle < 10_000 or self.landing, "all warps wait"
        assert not self.landing
        assert self.done == self.ctas * self.tiles * 2 // self.groups


SHAPES = tuple(product((1, 2), (1, 2), (3, 4, 9), ((0, 1), (1, 1), (3, 2), (4, 7), (5, 12))))


@pytest.mark.parametrize(("ctas", "groups", "stages", "sizes"), SHAPES)
def test_each_product_reads_its_loads(
    ctas: int, groups: int, stages: int, sizes: tuple[int, int]
) -> None:
    for seed in range(6):
        Kernel(ctas, groups, stages, sizes).run(seed)


@pytest.mark.parametrize(("ctas", "groups", "stages", "sizes"), SHAPES[::3])
def test_each_product_of_fp8_reads_its_loads_and_scales(
    ctas: int, groups: int, stages: int, sizes: tuple[int, int]
) -> None:
    for seed in range(4):
        Kernel(ctas, groups, stages, sizes, is_scaled=True).run(seed)


def test_the_model_finds_groups_that_take_no_turns() -> None:
    """A group that does not wait for the other one takes an earlier phase for its own."""
    with pytest.raises(AssertionError, match="read"):
        Kernel(1, 2, 3, (4, 6), takes_turns=False).run(seed=0)
