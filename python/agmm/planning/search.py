"""Finds the fastest plan of the build's kernels by the cost model, without a look at all of
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from agmm.planning.cost_model import At, Load, Tiling
from agmm.planning.heuristics import (
    MAX_SPLITS,
    PUSH_COLUMNS,
    chooses_sm_push,
    chooses_swapped,
    has_few_rows_of_tiles,
    usual_order,
    usual_sm_push_at,
)
from agmm.planning.legality import can_split, legal_splits, splits_that_fit
from agmm.planning.plans import Plan
from agmm.planning.problems import MAX_COLUMN_CHUNKS, KernelConfig, Problem
from agmm.planning.transports import PULL, PUSH, FusedGather, SmPush, copy_transports

_WAITS = tuple(product((False, True), repeat=2))
"""Whether a kernel's copies are pulled, and whether it can push."""
_Known = tuple[Load, float, float]
_FLOOR, _SPLITS, _LEAST = range(3)
"""What is known of an entry of a search: a time that no call takes less than, of a kernel or of all
its splits of K, or the least times."""


class SplitKernel:
    """A kernel with its splits of K, for problems that differ in M alone."""

    __slots__ = (
        "_orders",
        "can_push",
        "can_split",
        "config",
        "copies",
        "is_pull",
        "is_swapped",
        "tiling",
        "waits",
    )

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        copying = copy_transports(problem, config)
        self.config = config
        self.can_split = not config.is_streaming and can_split(problem, config)
        """Whether it has other numbers of splits than this one."""
        self.is_swapped = config.swapped
        self.tiling = Tiling(problem, config)
        self.copies = copying[0] if copying else PUSH
        self.is_pull = self.copies == PULL
        columns = PUSH_COLUMNS[-1]
        while problem.k > columns * MAX_COLUMN_CHUNKS:
            columns *= 2
        self.can_push = (
            chooses_sm_push(problem) and SmPush(1, columns).why_illegal(problem, config) is None
        )
        self.waits = _WAITS.index((self.is_pull, self.can_push))
        self._orders: dict[bool, KernelConfig] = {}

    def in_order(self, problem: Problem) -> KernelConfig:
        """The kernel in its usual order of tiles (`heuristics.usual_order`)."""
        few = self.config.schedule == "pingpong" and has_few_rows_of_tiles(
            problem, self.config.tile_m
        )
        found = self._orders.get(few)
        if found is None:
            found = self._orders[few] = usual_order(problem, self.config)
        return found

    def us(self, at: At, load: Load, transport: FusedGather) -> float:
        return transport.us_at(at, self.tiling, load)

    def usual_push(self, at: At, load: Load) -> SmPush:
        return usual_sm_push_at(at, self.tiling, load, self.config.splits)


def _with_fewest_splits(problem: Problem, kernel: KernelConfig) -> Iterator[KernelConfig]:
    """The kernel as plans have it; nothing where it is a streaming one that cannot serve."""
    if not kernel.is_streaming:
        yield kernel
    else:
        yield from (replace(kernel, splits=splits) for splits in legal_splits(problem, kernel))


_PRUNING = 1.0 + 1e-9
"""The tolerance in comparisons of predictions with floors, which are computed in another order of
operations."""


class Search:
    """The search for the fastest plan of an all-gather -> matmul, for problems that differ in M
    alone.

    Args:
        problem: any of them.
        kernels: the kernels to choose from.
    """

    def __init__(self, problem: Problem, kernels: Sequence[KernelConfig]) -> None:
        # Each kernel's list is indexed by its splits of K, from 1 on.
        self._of_kernels = [
            [SplitKernel(problem, config)]
            for kernel in kernels
            if copy_transports(problem, kernel)
            for config in _with_fewest_splits(problem, kernel)
        ]
        every = [
            (MAX_SPLITS * i, of_kernel[0], of_kernel[0].tiling)
            for i, of_kernel in enumerate(self._of_kernels)
        ]
        self._looked_at = {
            True: every,
            False: [one for one in every if not one[1].is_swapped],
        }
        """The kernels with their numbers in the order of plans, by whether swapped ones count."""

    def fastest(self, at: At) -> tuple[Plan, float] | None:
        """Return the fastest of the kernels' `usual_plans` by the cost model, the first of equals.

        Kernels are looked at in the order of the least time that they can take, and so are the
        splits of a kernel's K; what cannot take less than the best found is not looked at. Of each
        a time that is found soon comes first, and a closer one where that rules nothing out.
        """
        # Each entry has the least time, the number in the order of plans, what is known, the
        # kernel, and, where they are known, the load and the least times by copies and by SM push.
        waiting: list[tuple[float, int, int, SplitKernel, _Known | None]] = []
        floor_us, m = at.floor_us, at.problem.m
        waits_us = [at.least_wait_us(*which) for which in _WAITS]
        for number, kernel, tiling in self._looked_at[chooses_swapped(at.problem)]:
            wait_us = waits_us[kernel.waits]
            least_us = floor_us(tiling, wait_us)
            waiting.append((least_us, number, _FLOOR, kernel, None))
            if kernel.can_split and m <= tiling.most_rows_of_splits:
                least_us = at.split_floor_us(tiling, wait_us)
                waiting.append((least_us, number + 1, _SPLITS, kernel, None))
        heapify(waiting)
        best_us, best_number = inf, 0
        best: tuple[SplitKernel, SmPush | None] | None = None
        while waiting:
            least_us, number, stage, kernel, known = heappop(waiting)
            limit_us = best_us * _PRUNING
            if least_us > limit_us:
                break
            if stage == _SPLITS:
                for splits, kernel in self._splits(at, number // MAX_SPLITS):
                    least_us = floor_us(kernel.tiling, waits_us[kernel.waits])
                    if least_us <= limit_us:
                        of_splits = number + splits - 2
                        heappush(waiting, (least_us, of_splits, _FLOOR, kernel, None))
                continue
            if known is None:
                load = at.load(kernel.tiling)
                least = at.least_us(kernel.tiling, load, kernel.is_pull, kernel.can_push)
                if least[0] <= limit_us:
                    heappush(waiting, (least[0], number, _LEAST, kernel, (load, *least[1:])))
                continue
            load, copied_us, pushed_us = known
            if kernel.can_push and pushed_us <= limit_us:
                push = kernel.usual_push(at, load)
                us = kernel.us(at, load, push)
                is_better = us < best_us or (us == best_us and 2 * number + 1 < best_number)
                if is_better and push.why_wrongly_cut(at.problem.k) is None:
                    best_us, best_number, best = us, 2 * number + 1, (kernel, push)
            if copied_us <= best_us * _PRUNING:
                us = kernel.us(at, load, kernel.copies)
                if us < best_us or (us == best_us and 2 * number < best_number):
                    best_us, best_number, best = us, 2 * number, (kernel, None)
        if best is None:
            return None
        kernel, chosen = best
        return Plan(chosen or kernel.copies, kernel.in_order(at.problem)), best_us

    def _splits(self, at: At, i: int) -> Iterator[tuple[int, SplitKernel]]:
        """Yield the legal splits of a kernel's K, from two on."""
        of_kernel = self._of_kernels[i]
        config, tiling = of_kernel[0].config, of_kernel[0].tiling
        legal = splits_that_fit(at.problem, config, at.blocks(tiling), tiling.workers)
        for splits in legal[1:MAX_SPLITS]:
            if len(of_kernel) < splits:
                of_kernel.append(SplitKernel(at.problem, replace(config, splits=splits)))
            yield splits, of_kernel[splits - 1]
