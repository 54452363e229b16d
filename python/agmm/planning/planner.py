"""Problem -> plan: how one call is computed. Needs no GPU and no torch.

A plan comes from the first of these that knows the problem: the user's table, the packaged table
(`agmm.planning.tables`), the cost model (`agmm.planning.cost_model`). `Planner.choose` has the rule
for an M between two tuned ones.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf, log
from typing import NamedTuple, Protocol

from agmm.planning import cost_model
from agmm.planning.cost_model import At, Load, Tiling
from agmm.planning.heuristics import (
    MAX_SPLITS,
    PUSH_COLUMNS,
    has_few_rows_of_tiles,
    has_model,
    predict_us,
    usual_order,
    usual_plans,
    usual_sm_push_at,
)
from agmm.planning.legality import (
    built_as,
    copy_transports,
    free_of,
    splits_that_fit,
    why_illegal,
    why_transport_illegal,
    why_unfused,
)
from agmm.planning.plans import (
    CPU,
    MAX_COLUMN_CHUNKS,
    UNFUSED,
    KernelConfig,
    Plan,
    Problem,
    Row,
    SmPush,
)

_NEIGHBOUR_FACTOR = 4
"""A tuned M says something about an M up to this many times larger or smaller."""

_MAX_PLANS = 4096
_MAX_FAMILIES = 512
"""What a planner remembers: plans, and problems that differ in more than M."""

_GATHER_VARIES = 0.2
_STEADY_GATHER_BYTES = 4e6
"""The model takes the unfused plan where the fused ones take longer than it by more than so much of
its all-gather: that of more bytes than these varies from run to run. With fewer it takes its
latency, which is steady."""


class Rows(Protocol):
    """A table as the look-up sees it."""

    @property
    def name(self) -> str:
        """Where the rows come from, for people."""

    def rows(self, problem: Problem) -> Sequence[Row]:
        """Rows that differ from the problem in M alone."""


@dataclass(frozen=True)
class Choice:
    """A plan, where it comes from, and its time in µs, predicted and measured (None: unknown)."""

    plan: Plan
    source: str
    predicted_us: float | None
    row: Row | None = None
    """The row of exactly this problem."""


class _Way:
    """A kernel with its splits of K: what M does not change."""

    __slots__ = ("_orders", "can_push", "config", "copies", "is_pull", "tiling")

    def __init__(self, problem: Problem, config: KernelConfig) -> None:
        copying = copy_transports(problem, config)
        self.config = config
        self.tiling = Tiling(problem, config)
        self.copies = copying[0]
        self.is_pull = self.copies == "pull"
        columns = PUSH_COLUMNS[-1]
        while problem.k > columns * MAX_COLUMN_CHUNKS:
            columns *= 2
        push = SmPush(1, columns).name
        self.can_push = why_transport_illegal(problem, config, push) is None
        self._orders: dict[bool, KernelConfig] = {}

    def in_order(self, problem: Problem) -> KernelConfig:
        """See `usual_order`."""
        few = self.config.schedule == "pingpong" and has_few_rows_of_tiles(
            problem, self.config.tile_m
        )
        found = self._orders.get(few)
        if found is None:
            found = self._orders[few] = usual_order(problem, self.config)
        return found

    def copied_us(self, at: At, load: Load, transport: str) -> float:
        return at.fused_us(self.tiling, load, transport)

    def pushed_us(self, at: At, load: Load, push: SmPush) -> float:
        has_ctas = push.has_ctas(at.problem.k)
        return at.sm_push_us(
            self.tiling, load, push.chunk_columns, push.parts, push.first_peers, has_ctas
        )

    def usual_push(self, at: At, load: Load) -> SmPush:
        return usual_sm_push_at(at, self.tiling, load, self.config.splits)


class _KeptRow:
    """A row of a table, and whether it may serve the problems of a family."""

    __slots__ = ("_built", "_is_legal", "_there_us", "push", "row", "source", "way")

    def __init__(self, problem: Problem, row: Row, source: str, kernels: Sequence[KernelConfig]):
        self.row, self.source = row, source
        plan = row.plan
        self.push = SmPush.parse(plan.transport)
        self.way: _Way | None = None
        if plan.kernel is not None and has_model(problem):
            self.way = _Way(problem, plan.kernel)
        self._there_us: tuple[float | None] | None = None
        # Only splits, and CTAs of their own that push, may be legal for some M.
        plain, self._built = plan, None
        if self.way is not None:
            config = self.way.config
            if self.push is not None and self.push.has_ctas(problem.k):
                plain = replace(plain, transport=self.push._replace(head_chunks=0).name)
            if config.splits > 1:
                plain = replace(plain, kernel=replace(config, splits=1))
            built = built_as(config, kernels)
            if plain is not plan and built is not None:
                self._built = _Way(problem, replace(built, splits=1))
        self._is_legal = why_illegal(problem, plain, kernels) is None

    def is_legal(self, at: At) -> bool:
        """See `why_illegal`."""
        way, built = self.way, self._built
        if not self._is_legal or way is None or built is None:
            return self._is_legal
        k, blocks, workers = at.problem.k, at.blocks(built.tiling), built.tiling.workers
        splits = way.config.splits
        if splits > 1:
            if not built.config.can_split:
                return False
            if splits not in splits_that_fit(k, way.config.tile_k, blocks, workers):
                return False
        has_ctas = self.push is not None and self.push.has_ctas(k)
        return not has_ctas or free_of(way.tiling, at.blocks(way.tiling)) >= 1

    def there_us(self, problem: Problem) -> float | None:
        """What the model says of the row's own problem."""
        if self._there_us is None:
            self._there_us = (predict_us(problem._replace(m=self.row.m), self.row.plan),)
        return self._there_us[0]

    def here(self, at: At) -> tuple[Plan, float]:
        """Its plan for another M, and the predicted time. Its order of tiles says nothing: the best
        one there may be best by less than the noise, and take a third longer here. How SM push best
        cuts whole tiles of a shard says nothing about shards that end inside them."""
        plan, way, push = self.row.plan, self.way, self.push
        if way is None:
            return plan, cost_model.unfused_us(at.problem)
        load, transport = at.load(way.tiling), plan.transport
        if push is None:
            us = way.copied_us(at, load, transport)
        else:
            if at.straddles(way.tiling.tile_m):
                push = way.usual_push(at, load)
                transport = push.name
            us = way.pushed_us(at, load, push)
        return Plan(transport, way.in_order(at.problem), plan.chunks_per_shard), us


_PRUNING = 1.0 + 1e-9
"""Predictions are compared with floors that are computed in another order of operations."""


class _Family:
    """What a planner knows of all problems that differ in M alone."""

    def __init__(self, planner: Planner, problem: Problem) -> None:
        self._kernels = planner.kernels
        self.why_unfused: str | None = None
        self._ways: list[list[_Way]] = []
        if problem.gpu != CPU:
            self.why_unfused = why_unfused(problem.dtype, problem.n, problem.k)
        if problem.gpu != CPU and self.why_unfused is None:
            self._ways = [[_Way(problem, kernel)] for kernel in self._kernels]
        twin = problem._replace(return_A=not problem.return_A)
        self.rows = [self._rows_of(planner, problem, tuned) for tuned in (problem, twin)]
        """By M: what was tuned for the problem, and for the one that differs in return_A."""
        self.tuned_ms = [sorted(rows) for rows in self.rows]

    def _rows_of(
        self, planner: Planner, problem: Problem, tuned: Problem
    ) -> dict[int, list[_KeptRow]]:
        differs = "" if tuned == problem else f", return_A={tuned.return_A}"
        at = At(problem)
        found: dict[int, list[_KeptRow]] = {}
        for table in planner.tables:
            for row in table.rows(tuned):
                others = found.setdefault(row.m, [])
                kept = _KeptRow(problem, row, table.name + differs, self._kernels)
                others.append(kept)
                own = tuned._replace(m=row.m, sm_count=0)
                # Else it is for other calls, as splits of K are for few rows and all SMs.
                if not kept.is_legal(at) and why_illegal(own, row.plan, self._kernels) is not None:
                    reason = why_illegal(problem, row.plan, self._kernels)
                    planner.warn(f"agmm passes over rows of {table.name}: {reason}", reason or "")
        return found

    def usable_row(self, at: At, which: int, m: int, fused: bool) -> _KeptRow | None:
        for kept in self.rows[which].get(m, ()):
            if not (fused and kept.row.plan == UNFUSED) and kept.is_legal(at):
                return kept
        return None

    def near_rows(self, at: At, which: int, fused: bool) -> list[_KeptRow]:
        """The nearest usable rows below and above."""
        ms, m, found = self.tuned_ms[which], at.problem.m, []
        if not ms:
            return []
        here = bisect_left(ms, m)
        for i in range(here - 1, -1, -1):
            if ms[i] < m / _NEIGHBOUR_FACTOR:
                break
            row = self.usable_row(at, which, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        for i in range(here, len(ms)):
            if ms[i] > m * _NEIGHBOUR_FACTOR:
                break
            row = None if ms[i] == m else self.usable_row(at, which, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        return found

    def fastest(self, at: At) -> tuple[Plan, float] | None:
        """The fastest of the kernels' `usual_plans` by the cost model, the first of equals.

        Kernels come by the least time that they can take, and so do the numbers of parts that a
        kernel may split K in; what cannot take less than the best found is not looked at.
        """
        # The least time, the number in the order of plans, the load (None: of all splits), and the
        # least times with copies and with SM push.
        waiting: list[tuple[float, int, _Way, Load | None, float, float]] = []
        for i, ways in enumerate(self._ways):
            way, number = ways[0], MAX_SPLITS * i
            load = at.load(way.tiling)
            least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
            waiting.append((least[0], number, way, load, least[1], least[2]))
            if way.config.can_split and 2 * load.blocks <= way.tiling.workers:
                load = at.least_split_load(way.tiling)
                least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
                waiting.append((least[0], number + 1, way, None, 0.0, 0.0))
        heapify(waiting)
        best_us, best_number = inf, 0
        best: tuple[_Way, SmPush | None] | None = None
        while waiting:
            least_us, number, way, some_load, copied_us, pushed_us = heappop(waiting)
            limit_us = best_us * _PRUNING
            if least_us > limit_us:
                break
            if some_load is None:
                for splits, way in self._splits(at, number // MAX_SPLITS):
                    load = at.load(way.tiling)
                    least = at.least_us(way.tiling, load, way.is_pull, way.can_push)
                    if least[0] <= limit_us:
                        of_splits = number + splits - 2
                        heappush(waiting, (least[0], of_splits, way, load, least[1], least[2]))
                continue
            if way.can_push and pushed_us <= limit_us:
                push = way.usual_push(at, some_load)
                us = way.pushed_us(at, some_load, push)
                is_better = us < best_us or (us == best_us and 2 * number + 1 < best_number)
                if is_better and push.why_illegal(at.problem.k) is None:
                    best_us, best_number, best = us, 2 * number + 1, (way, push)
            if copied_us <= best_us * _PRUNING:
                us = way.copied_us(at, some_load, way.copies)
                if us < best_us or (us == best_us and 2 * number < best_number):
                    best_us, best_number, best = us, 2 * number, (way, None)
        if best is None:
            return None
        way, chosen = best
        transport = way.copies if chosen is None else chosen.name
        return Plan(transport, way.in_order(at.problem)), best_us

    def _splits(self, at: At, i: int) -> Iterator[tuple[int, _Way]]:
        """The legal splits of a kernel's K into two parts and more."""
        ways = self._ways[i]
        config, tiling = ways[0].config, ways[0].tiling
        legal = splits_that_fit(at.problem.k, config.tile_k, at.blocks(tiling), tiling.workers)
        for splits in legal[1:MAX_SPLITS]:
            if len(ways) < splits:
                ways.append(_Way(at.problem, replace(config, splits=splits)))
            yield splits, ways[splits - 1]


class _Here:
    """A problem under a planner's eyes; what the choices for it share is worked out once."""

    def __init__(self, family: _Family, problem: Problem) -> None:
        self.family = family
        self.problem = problem
        self.at = At(problem)
        self._fastest: tuple[tuple[Plan, float] | None] | None = None
        self._unfused_us: float | None = None
        self._of_rows: dict[int, tuple[Plan, float]] = {}
        self.between: tuple[list[_KeptRow], _Found, _Found] | None = None
        """The last choice between rows: these, the model's favourite, and what was found."""

    def fastest(self) -> tuple[Plan, float] | None:
        if self._fastest is None:
            self._fastest = (self.family.fastest(self.at),)
        return self._fastest[0]

    def of_row(self, kept: _KeptRow) -> tuple[Plan, float]:
        found = self._of_rows.get(id(kept))
        if found is None:
            found = self._of_rows[id(kept)] = kept.here(self.at)
        return found

    def unfused_us(self) -> float:
        if self._unfused_us is None:
            self._unfused_us = cost_model.unfused_us(self.problem)
        return self._unfused_us


class _Found(NamedTuple):
    plan: Plan
    source: str
    us: float | None = None
    """Predicted, where it had to be."""
    row: Row | None = None


class Planner:
    """Chooses plans for one build and remembers them.

    Args:
        kernels: the kernels to choose from, in any order and raster.
        tables: the tables to look into; of two rows for one problem the first table's counts.
    """

    def __init__(self, kernels: Sequence[KernelConfig], tables: Sequence[Rows] = ()) -> None:
        self.kernels = tuple(kernels)
        self.tables = tuple(tables)
        self._warned: set[str] = set()
        self._plan = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, False).plan)
        self._fused = lru_cache(_MAX_PLANS)(lambda problem: self._find(problem, True).plan)
        self._family = lru_cache(_MAX_FAMILIES)(lambda key: _Family(self, Problem(1, *key)))
        self._last: _Here | None = None

    def plan(self, problem: Problem) -> Plan:
        """`choose(problem).plan`, remembered."""
        return self._plan(problem)

    def fused_plan(self, problem: Problem) -> Plan:
        """The best fused plan of a GPU problem, remembered.

        Raises:
            ValueError: there is no kernel to choose from.
        """
        return self._fused(problem)

    def choose(self, problem: Problem, *, fused: bool = False) -> Choice:
        """The plan for a problem.

        A row of exactly this problem decides, or else one that differs in ``return_A`` alone. Else
        the nearest rows below and above count, each at most 4 times away in M. Each plan is rated
        by the cost model's time at this M, times what its row measured over what the model says
        there. The model's own favourite, where it is none of these, takes part at the mean of these
        ratios (of the fused rows where it is fused). The order of tiles is the usual one, and so is
        SM push where shards end inside tiles. Where there is no model, the row nearest in M decides
        as it is (of two equally near the one above). Without any such row those of the problem that
        differs in ``return_A`` count in the same way, and without these it is the model's
        favourite. Rows whose plan this build cannot run are passed over, with one warning per
        reason.

        Args:
            fused: leave the unfused plan out.

        Raises:
            ValueError: ``fused``, and there is no kernel to choose from.
        """
        found = self._find(problem, fused)
        return Choice(found.plan, found.source, predict_us(problem, found.plan), found.row)

    def warn(self, message: str, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(message, stacklevel=2)

    def _find(self, problem: Problem, fused: bool) -> _Found:
        here = self._last
        if here is None or here.problem != problem:
            here = self._last = _Here(self._family(problem[1:]), problem)
        family = here.family
        # Unfused A costs nothing: what is the fastest with it need not be so without.
        fused_of_twin = fused or not problem.return_A
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            kept = family.usable_row(here.at, which, problem.m, only_fused)
            if kept is not None:
                own_row = kept.row if which == 0 else None
                return _Found(kept.row.plan, kept.source, None, own_row)
        for which, only_fused in ((0, fused), (1, fused_of_twin)):
            near = family.near_rows(here.at, which, only_fused)
            if near:
                return self._choose_between_rows(here, near, fused)
        return self._favourite(here, fused)

    def _choose_between_rows(self, here: _Here, near: list[_KeptRow], fused: bool) -> _Found:
        """What the rows of other M say."""
        problem = here.problem
        favourite = None
        if has_model(problem):
            favourite = self._favourite(here, fused)
            if here.between is not None:
                before, of, found = here.between
                if before == near and of == favourite:
                    return found
        words = " and ".join(f"M={kept.row.m}" for kept in near)
        source = f"tuned at {words} ({near[-1].source})"
        if favourite is None:
            nearest = min(reversed(near), key=lambda kept: abs(log(kept.row.m / problem.m)))
            return _Found(nearest.row.plan, source)
        rated: list[tuple[float, Plan]] = []
        ratios: list[tuple[bool, float]] = []
        for kept in near:
            plan_here, here_us = here.of_row(kept)
            there_us = kept.there_us(problem)
            assert there_us is not None
            measured = kept.row.us / there_us
            if plan_here.transport != kept.row.plan.transport:
                measured = max(1.0, measured)  # it says little of another plan
            ratios.append((kept.row.plan == UNFUSED, measured))
            rated.append((here_us * measured, plan_here))
        assert favourite.us is not None
        best_us, best = min(rated, key=lambda pair: pair[0])
        is_unfused = favourite.plan == UNFUSED
        alike = [ratio for of_unfused, ratio in ratios if of_unfused == is_unfused]
        alike = alike or [ratio for _, ratio in ratios]
        mean = sum(alike) / len(alike)
        is_theirs = any(favourite.plan == plan for _, plan in rated)
        found = _Found(best, source)
        if not is_theirs and favourite.us * mean < best_us:
            found = favourite._replace(source=f"cost model, against what was {source}")
        here.between = near, favourite, found
        return found

    def alternatives(self, problem: Problem) -> list[tuple[Plan, float | None]]:
        """`usual_plans` of each kernel and the unfused plan, with predicted µs, fastest first."""
        plans = [UNFUSED]
        if problem.gpu == CPU:
            plans.insert(0, Plan("push"))
        elif why_unfused(problem.dtype, problem.n, problem.k) is None:
            plans += [plan for kernel in self.kernels for plan in usual_plans(problem, kernel)]
        timed = [(plan, predict_us(problem, plan)) for plan in plans]
        return sorted(timed, key=lambda pair: (pair[1] is None, pair[1] or 0.0))

    def _favourite(self, here: _Here, fused: bool) -> _Found:
        """What the cost model says; where it says nothing, the plain fused plan."""
        problem, family = here.problem, here.family
        if problem.gpu == CPU:
            return _Found(Plan("push"), "default of the CPU backend")
        if family.why_unfused is not None and not fused:
            return _Found(UNFUSED, family.why_unfused, predict_us(problem, UNFUSED))
        # One rank has nothing to gather: the unfused path would only copy A.
        fused = fused or problem.world_size == 1
        best = here.fastest()
        if best is None and fused:
            raise ValueError("kernels: found none, wanted a build with CUDA kernels")
        if best is not None:
            gathered = problem.m * problem.k * cost_model.ELEMENT_BYTES
            varies = _GATHER_VARIES if gathered > _STEADY_GATHER_BYTES else 0.0
            margin_us = varies * cost_model.all_gather_us(problem)
            if fused or best[1] <= here.unfused_us() + margin_us:
                return _Found(best[0], "cost model", best[1])
        return _Found(UNFUSED, "cost model", here.unfused_us())
