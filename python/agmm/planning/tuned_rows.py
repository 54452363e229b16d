"""The rows of the tables of tuned plans, and how they serve a problem of another M."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agmm.planning.cost_model import At, behind_gather
from agmm.planning.heuristics import scatter_order, usual_all_reduce_order, usual_order
from agmm.planning.legality import (
    built_as,
    splits_that_fit,
    why_illegal,
)
from agmm.planning.plans import BEHIND_GATHER, Plan, Row
from agmm.planning.predictions import has_model, predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, MAX_CLUSTER_SPLITS, KernelConfig, Problem
from agmm.planning.search import SplitKernel
from agmm.planning.transports import GATHER, LAGGED, FusedGather, SmPush

_NEIGHBOUR_FACTOR = 4
"""A tuned M says something about an M up to this many times larger or smaller."""


class Rows(Protocol):
    """A table as the look-up sees it."""

    @property
    def name(self) -> str:
        """Where the rows come from, for people."""

    def rows(self, problem: Problem) -> Sequence[Row]:
        """Rows that differ from the problem in M alone."""


def _is_buildable(config: KernelConfig, kernels: Sequence[KernelConfig]) -> bool:
    """Whether the model can be asked about a row's kernel, which may name any tile, cluster and
    number of splits: it knows those of the build."""
    built = built_as(config, kernels)
    return built is not None and not (
        built.splits_in_cluster and config.splits > MAX_CLUSTER_SPLITS
    )


class TunedRow:
    """A row of a table, and whether it may serve the problems of a family.

    Args:
        problem: any of the family.
        row: the row.
        source: where it comes from, for people.
        kernels: those of the build that its plan may have.
    """

    __slots__ = ("_kernels", "_there_us", "row", "source")

    def __init__(self, problem: Problem, row: Row, source: str, kernels: Sequence[KernelConfig]):
        self.row, self.source, self._kernels = row, source, kernels
        self._there_us: tuple[float | None] | None = None

    def is_legal(self, at: At) -> bool:
        """Whether the build can run the row's plan, by `legality.why_illegal`."""
        return why_illegal(at.problem, self.row.plan, self._kernels) is None

    def there_us(self, problem: Problem) -> float | None:
        """The predicted time of the row's own problem."""
        if self._there_us is None:
            self._there_us = (predict_us(replace(problem, m=self.row.m), self.row.plan),)
        return self._there_us[0]

    def here(self, at: At) -> tuple[Plan, float]:
        """The row's plan for another M, and the predicted time. The row's order of tiles says
        nothing: the best one there may be best by less than the noise, and take a third longer
        here."""
        plan, problem = self.row.plan, at.problem
        if plan.kernel is not None:
            order = usual_all_reduce_order if plan.transport == LAGGED else scatter_order
            plan = replace(plan, kernel=order(problem, plan.kernel))
        us = predict_us(problem, plan)
        assert us is not None  # rows are rated where there is a model
        return plan, us


class GatherRow(TunedRow):
    """A row of an all-gather -> matmul. It is asked for many M, so what only M decides is worked
    out once."""

    __slots__ = ("_built", "_is_legal", "kernel", "push")

    def __init__(self, problem: Problem, row: Row, source: str, kernels: Sequence[KernelConfig]):
        super().__init__(problem, row, source, kernels)
        plan = row.plan
        self.push = plan.transport if isinstance(plan.transport, SmPush) else None
        self.kernel: SplitKernel | None = None
        """The kernel of a fused plan."""
        is_fused = isinstance(plan.transport, FusedGather) and has_model(problem)
        if is_fused and plan.kernel is not None and _is_buildable(plan.kernel, kernels):
            self.kernel = SplitKernel(problem, plan.kernel)
        # Only splits, and CTAs of their own that push, may be legal for some M.
        plain, self._built = plan, None
        if self.kernel is not None:
            config = self.kernel.config
            if self.push is not None and self.push.has_ctas(problem.k):
                plain = replace(plain, transport=replace(self.push, head_chunks=0))
            if config.splits > 1 and not config.is_streaming:
                plain = replace(plain, kernel=replace(config, splits=1))
            built = built_as(config, kernels)
            if plain is not plan and built is not None:
                self._built = SplitKernel(problem, replace(built, splits=1))
        # No call has fewer rows than ranks, and the model is not made for them.
        self._is_legal = (
            row.m >= problem.world_size and why_illegal(problem, plain, kernels) is None
        )

    def is_legal(self, at: At) -> bool:
        kernel, built = self.kernel, self._built
        if self.row.plan.transport in BEHIND_GATHER:  # which few rows have
            return super().is_legal(at)
        if not self._is_legal or kernel is None or built is None:
            return self._is_legal
        k, blocks, workers = at.problem.k, at.blocks(built.tiling), built.tiling.workers
        splits = kernel.config.splits
        if splits > 1:
            if not built.can_split:
                return False
            if splits not in splits_that_fit(at.problem, built.config, blocks, workers):
                return False
        has_ctas = self.push is not None and self.push.has_ctas(k)
        return not has_ctas or kernel.tiling.free_sms(at.blocks(kernel.tiling)) >= 1

    def here(self, at: At) -> tuple[Plan, float]:
        """How SM push best cuts whole tiles of a shard says nothing about shards that end inside
        them: these are cut anew."""
        plan, kernel = self.row.plan, self.kernel
        if kernel is None:
            if plan.transport == GATHER and plan.kernel is not None:
                order = usual_order(behind_gather(at.problem), plan.kernel)
                plan = replace(plan, kernel=order)
            us = predict_us(at.problem, plan)
            assert us is not None  # rows are rated where there is a model
            return plan, us
        load, transport = at.load(kernel.tiling), plan.transport
        assert isinstance(transport, FusedGather)  # else no kernel serves the plan
        if self.push is not None and at.straddles(kernel.tiling.tile_m):
            transport = kernel.usual_push(at, load)
        us = kernel.us(at, load, transport)
        return Plan(transport, kernel.in_order(at.problem), plan.chunks_per_shard), us


class TunedRows:
    """The rows that were tuned for problems that differ in M alone, and may serve others of the
    same kind.

    Args:
        problem: any of the problems that are to be served.
        tuned: any of the problems that the rows were measured for.
        tables: the tables; where two have a row for one problem the first one's counts.
        kernels_for: the kernels of the build that a plan may have.
        warn: takes a message and the reason why rows are passed over.
    """

    def __init__(
        self,
        problem: Problem,
        tuned: Problem,
        tables: Sequence[Rows],
        kernels_for: Callable[[Plan], Sequence[KernelConfig]],
        warn: Callable[[str, str], None],
    ) -> None:
        differs = "" if tuned == problem else f", return_A={tuned.return_A}"
        at = At(problem)
        kind = GatherRow if problem.op == ALL_GATHER_MATMUL else TunedRow
        self._rows: dict[int, list[TunedRow]] = {}
        for table in tables:
            for row in table.rows(tuned):
                kernels = kernels_for(row.plan)
                found = kind(problem, row, table.name + differs, kernels)
                self._rows.setdefault(row.m, []).append(found)
                own = replace(tuned, m=row.m, sm_count=0)
                # Else it is for other calls, as splits of K are for few rows and all SMs.
                if not found.is_legal(at) and why_illegal(own, row.plan, kernels) is not None:
                    reason = why_illegal(problem, row.plan, kernels)
                    warn(f"agmm passes over rows of {table.name}: {reason}", reason or "")
        self._ms = sorted(self._rows)

    def usable(self, at: At, m: int, fused: bool) -> TunedRow | None:
        """The row of that M which may serve, without the unfused plan where ``fused``."""
        for row in self._rows.get(m, ()):
            if not (fused and row.row.plan.gathers_first) and row.is_legal(at):
                return row
        return None

    def near(self, at: At, fused: bool) -> list[TunedRow]:
        """The nearest usable rows below and above."""
        ms, m, found = self._ms, at.problem.m, []
        if not ms:
            return []
        here = bisect_left(ms, m)
        for i in range(here - 1, -1, -1):
            if ms[i] < m / _NEIGHBOUR_FACTOR:
                break
            row = self.usable(at, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        for i in range(here, len(ms)):
            if ms[i] > m * _NEIGHBOUR_FACTOR:
                break
            row = None if ms[i] == m else self.usable(at, ms[i], fused)
            if row is not None:
                found.append(row)
                break
        return found
