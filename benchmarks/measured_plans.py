"""What `benchmarks/plans.py` measured, and how good the plans are that constants choose by it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agmm.planning import cost_model, formats, tables
from agmm.planning.cost_model import behind_gather
from agmm.planning.heuristics import scatter_order, usual_order, usual_sm_push
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_TORCH, KernelConfig, Plan
from agmm.planning.predictions import predict_us
from agmm.planning.problems import MATMUL_REDUCE_SCATTER, Problem
from agmm.planning.transports import SmPush
from benchmarks.plans import FORMATS, Entry

NAMES = dict(zip(FORMATS, ("bfloat16", "float8_e4m3fn_float8_e4m3fn fast"), strict=True))
"""The names of formats, as plans have them."""
NEAR_BEST = 1.3
"""Plans that take so many times as long as a shape's best say nothing of the uncertainty of chosen
ones."""
CERTAIN = 0.9
"""The share of calls that `Constants.uncertainty` holds for."""


class Cell(NamedTuple):
    """Entries that constants are shared by."""

    gpu: str
    world_size: int
    kind: str


@dataclass(frozen=True)
class Product:
    """What was measured of a shape."""

    problem: Problem
    times: dict[Plan, float]
    best_us: float
    chosen: Plan
    """The plan that the packaged tables and constants of that time said."""
    is_held: bool


def plan_of(name: str) -> Plan:
    """The inverse of `Plan.name` on a GPU."""
    transport, _, kernel = name.partition(", ")
    return Plan(transport, KernelConfig.parse(kernel) if kernel else None)


def product_of(entry: Entry) -> Product:
    problem = Problem(
        entry["M"],
        entry["N"],
        entry["K"],
        op=entry["op"],
        format=NAMES[entry["format"]],
        world_size=entry["world_size"],
        gpu=entry["gpu"],
    )
    times = {plan_of(name): us for name, us in entry["us"].items()}
    return Product(problem, times, entry["best_us"], plan_of(entry["plan"]), entry["set"] == "held")


def by_cell(entries: Iterable[Entry]) -> dict[Cell, list[Product]]:
    found: dict[Cell, list[Product]] = {}
    for product in map(product_of, entries):
        p = product.problem
        cell = Cell(p.gpu, p.world_size, formats.of(p.format).kind)
        found.setdefault(cell, []).append(product)
    return found


def is_usual(problem: Problem, plan: Plan) -> bool:
    """Whether a plan is one that the cost model chooses among."""
    kernel = plan.kernel
    if kernel is None:
        return plan != BY_TORCH
    if plan.gathers_first:
        order = usual_order(behind_gather(problem), kernel)
    elif problem.op == MATMUL_REDUCE_SCATTER:
        order = scatter_order(problem, kernel)
    else:
        order = usual_order(problem, kernel)
    if kernel.across or replace(order, splits=kernel.splits) != kernel:
        return False
    return not isinstance(plan.transport, SmPush) or plan.transport == usual_sm_push(
        problem, kernel
    )


class Judgement(NamedTuple):
    """The ratios of the times of chosen plans to those of the best that were measured."""

    ratios: list[float]
    unmeasured: int
    """How many chosen plans were not measured; they are left out."""

    def __str__(self) -> str:
        if not self.ratios:
            return f"none of {self.unmeasured} plans was measured"
        ordered = sorted(self.ratios)
        place = math.ceil(0.97 * len(ordered)) - 1
        mean = statistics.geometric_mean(ordered)
        worst = f"{ordered[place]:.3f} {ordered[-1]:.3f}"
        return f"{len(ordered):4} shapes: {mean:.3f} {worst}, {self.unmeasured} not measured"


def judge(products: Iterable[Product], *, with_tables: bool) -> Judgement:
    """The plans that the constants of the products' GPU say, beside the best."""
    ratios, unmeasured = [], 0
    planners: dict[tuple[str, int], Planner] = {}
    for product in products:
        p = product.problem
        found = tables.packaged(p.gpu, p.world_size) if with_tables else None
        planner = planners.setdefault(
            (p.gpu, p.world_size),
            Planner(cost_model.default_kernels, [] if found is None else [found]),
        )
        us = time_of(product, planner.choose(p).plan)
        if us is None:
            unmeasured += 1
        else:
            ratios.append(max(1.0, us / product.best_us))
    return Judgement(ratios, unmeasured)


def time_of(product: Product, plan: Plan) -> float | None:
    """What was measured of a plan, or else of one that differs in the order of tiles, or in how a
    shard is cut, alone: the slowest of these."""
    if plan in product.times:
        return product.times[plan]
    if plan.kernel is None:
        return None

    def likeness(one: Plan) -> tuple[object, ...]:
        assert one.kernel is not None
        has_head = isinstance(one.transport, SmPush) and one.transport.head_chunks > 0
        kernel = replace(one.kernel, max_swizzle=1, raster="along_m")
        return kernel, one.family, has_head

    alike = [
        us for one, us in product.times.items() if one.kernel and likeness(one) == likeness(plan)
    ]
    return max(alike, default=None)


def uncertainty(products: Iterable[Product]) -> dict[str, dict[str, float]]:
    """What `Constants.uncertainty` is, from plans that are as fast as those which are chosen."""
    errors: dict[str, dict[str, list[float]]] = {}
    for product in products:
        for plan, us in product.times.items():
            if us > NEAR_BEST * product.best_us or not is_usual(product.problem, plan):
                continue
            predicted = predict_us(product.problem, plan)
            if predicted is not None:
                of_op = errors.setdefault(product.problem.op, {})
                of_op.setdefault(plan.family, []).append(abs(us / predicted - 1))
    return {
        op: {family: _quantile(found) for family, found in of_op.items()}
        for op, of_op in errors.items()
    }


def _quantile(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return round(ordered[math.ceil(CERTAIN * len(ordered)) - 1], 3)


NEAR = 1.01
"""A plan that takes at most this many times as long as the best one counts as the best, too."""


def never_best(products: Sequence[Product]) -> Iterator[str]:
    """Say how often plans of each family are the best or near it, and which kernels never are."""
    families: Counter[tuple[str, str]] = Counter()
    tried: Counter[tuple[str, str]] = Counter()
    near: set[tuple[str, str]] = set()
    for product in products:
        op, least = product.problem.op, min(product.times.values())
        best = [plan for plan, us in product.times.items() if us <= NEAR * least]
        families.update((op, one) for one in {plan.family for plan in best})
        tried.update((op, one) for one in _kernels(product.times))
        near |= {(op, one) for one in _kernels(best)}
    for op in sorted({product.problem.op for product in products}):
        of_op = sum(product.problem.op == op for product in products)
        told = [f"{family} {n}" for (o, family), n in sorted(families.items()) if o == op]
        yield f"{op}: the best of {of_op} or within 1% of it: {', '.join(told)}"
        never = [
            f"{k} ({n})" for (o, k), n in sorted(tried.items()) if o == op and (o, k) not in near
        ]
        if never:
            yield f"{op}: never, with how often they were tried: {', '.join(never)}"


def _kernels(plans: Iterable[Plan]) -> set[str]:
    return {plan.kernel.kernel for plan in plans if plan.kernel is not None}
