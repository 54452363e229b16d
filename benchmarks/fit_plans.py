"""The cost model's constants of gathers and scatters, for a GPU and a number of ranks: fitted to
what `benchmarks/plans.py` measured of shapes to fit to, judged on the shapes that it held back.

    python -m benchmarks.fit_plans plans.jsonl more.jsonl
    python -m benchmarks.fit_plans plans.jsonl --write

Of each plan a shape counts the usual order of tiles and the usual SM push, which plans without a
table have. `--write` puts the constants where plans are made with them: under "of_ranks" in
`tables/<gpu>.json` of the agmm that is imported, with how far off they were on the shapes that were
held back. The matmul alone is fitted by `benchmarks/fit_alone.py`, and stays.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from agmm.planning import cost_model, formats, tables
from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.heuristics import scatter_order, usual_order, usual_sm_push
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_TORCH, KernelConfig, Plan
from agmm.planning.predictions import predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, Problem
from agmm.planning.transports import SmPush
from benchmarks.descent import FITTED, Call, Descent, changed, rounded
from benchmarks.plans import FORMATS, Entry, read

NAMES = dict(zip(FORMATS, ("bfloat16", "float8_e4m3fn_float8_e4m3fn fast"), strict=True))
"""The names of formats, as plans have them."""
SCALARS = {
    ALL_GATHER_MATMUL: (
        "copy_overhead_us",
        "push_gb_per_s",
        "sm_push_us",
        "sm_push_straddling_us",
        "sm_push_disturbance",
        "sm_push_cta_disturbance",
        "sm_push_gb_per_s",
        "sm_push_gb_per_s_and_cta",
        "sm_push_fence_us",
        "sm_push_gb_per_s_and_own_cta",
        "sm_push_one_peer_factor",
        "split_us",
        "all_gather_us",
        "all_gather_gb_per_s",
        "small_gather_us",
        "small_gather_gb_per_s",
    ),
    MATMUL_REDUCE_SCATTER: (
        "scatter_us",
        "scatter_gb_per_s",
        "reduce_scatter_us",
        "reduce_scatter_gb_per_s",
    ),
}
"""The constants of one number that are fitted, by op."""
LIBRARY = ("gather", "unfused")
"""The families of transports whose matmul is the library's, which have a `choice_margins` entry."""
LEAST_OVERHEAD_US = 0.5
"""The overhead of a tile from which a fit begins where a constant says none: a choice."""
KERNEL_STAYS = 0.02
"""`descent.STAYS` for what a kernel has of its own: many kernels share few shapes."""
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
    if problem.op == MATMUL_REDUCE_SCATTER:
        order = scatter_order(problem, kernel)
    else:
        order = usual_order(problem, kernel)
    if kernel.across or replace(order, splits=kernel.splits) != kernel:
        return False
    return not isinstance(plan.transport, SmPush) or plan.transport == usual_sm_push(
        problem, kernel
    )


Key = KernelConfig | str


class Fit(Descent[Key]):
    """The constants of one op's plans between some ranks. Calls are made by plans, and keys are
    their kernels, or the families of transports without one."""

    def __init__(self, products: Sequence[Product], start: Constants) -> None:
        self.op = products[0].problem.op
        calls: dict[Key, list[Call]] = {}
        for place, product in enumerate(products):
            of_product = {p: us for p, us in product.times.items() if is_usual(product.problem, p)}
            problem = replace(product.problem, gpu=FITTED)
            least_us = min(of_product.values())
            for plan, us in of_product.items():
                key: Key = plan.transport.family
                if plan.kernel is not None:
                    key = KernelConfig.parse(plan.kernel.kernel)
                calls.setdefault(key, []).append(Call.of(problem, place, us, least_us, plan))
        margins = {**start.choice_margins, self.op: start.choice_margins.get(self.op, {})}
        super().__init__(
            replace(start, choice_margins=margins),
            calls,
            len(products),
            lambda _, of: [predict_us(c.problem, c.how) or 1.0 for c in of],
            lambda c, key: c.choice_margins[self.op].get(str(key), 1.0),
        )

    def round(self) -> None:
        """Each constant once, those of many calls first."""
        everything = list(self.calls)
        for name in SCALARS[self.op]:
            self.scalar(name, everything)
        for family in LIBRARY:
            if family in self.calls:
                self._margin_of(family)
        kernels = [key for key in self.calls if isinstance(key, KernelConfig)]
        for kernel in kernels:
            if self.op == MATMUL_REDUCE_SCATTER:
                for place in (0, 1):
                    self._of_scatter_tile(kernel, place)
            else:
                usual = self.start.other_gathered_factor
                self.in_dict("gathered_factor", kernel.kernel, [kernel], usual, KERNEL_STAYS)
                usual_us = self.start.overhead_us(kernel)
                self.in_dict("tile_overhead_us", kernel.kernel, [kernel], usual_us, KERNEL_STAYS)

    def _of_scatter_tile(self, kernel: KernelConfig, place: int) -> None:
        base = self.now
        per_k = 2e-6 * kernel.tile_m * kernel.tile_n / base.other_tflops_per_sm
        other = per_k, base.other_scatter_overhead_us

        def get(constants: Constants) -> float:
            found = constants.of_kernel(constants.scatter_tile_us, kernel, other)[place]
            return found if place == 0 else max(found, LEAST_OVERHEAD_US)

        def put(value: float) -> Constants:
            both = list(base.of_kernel(base.scatter_tile_us, kernel, other))
            both[place] = value
            times = {**base.scatter_tile_us, kernel.kernel: (both[0], both[1])}
            return changed(base, "scatter_tile_us", times)

        self.descend(get, put, [kernel], KERNEL_STAYS)

    def _margin_of(self, family: str) -> None:
        base = self.now

        def put(value: float) -> Constants:
            of_op = {**base.choice_margins[self.op], family: value}
            return changed(base, "choice_margins", {**base.choice_margins, self.op: of_op})

        self.descend(lambda c: c.choice_margins[self.op].get(family, 1.0), put, [])


def fit(products: Sequence[Product], start: Constants, rounds: int) -> Constants:
    """Constants that are fitted to the products of both ops."""
    constants = start
    for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER):
        of_op = [product for product in products if product.problem.op == op]
        if of_op:
            one = Fit(of_op, constants)
            for _ in range(rounds):
                one.round()
            constants = one.now
    return constants


# --- judging ---


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
        return one.kernel.kernel, one.kernel.splits, one.kernel.across, one.transport.family

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
                of_op.setdefault(plan.transport.family, []).append(abs(us / predicted - 1))
    return {
        op: {family: _quantile(found) for family, found in of_op.items()}
        for op, of_op in errors.items()
    }


def _quantile(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return round(ordered[math.ceil(CERTAIN * len(ordered)) - 1], 3)


def never_best(products: Sequence[Product]) -> Iterator[str]:
    """Say how often plans of each family are the best, or within 1% of it."""
    counts: Counter[tuple[str, str]] = Counter()
    for product in products:
        families = {
            plan.transport.family
            for plan, us in product.times.items()
            if us <= 1.01 * min(product.times.values())
        }
        counts.update((product.problem.op, family) for family in families)
    for op in sorted({product.problem.op for product in products}):
        of_op = sum(product.problem.op == op for product in products)
        told = [f"{family} {n}" for (o, family), n in sorted(counts.items()) if o == op]
        yield f"{op}: the best of {of_op} or within 1% of it: {', '.join(told)}"


def changes(before: Constants, after: Constants) -> dict[str, Any]:
    """What differs, as "of_ranks" has it."""
    found: dict[str, Any] = {}
    for name, value in vars(after).items():
        old = getattr(before, name)
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if old.get(key) != each}
            if value:
                found[name] = rounded(value)
        elif value != old:
            found[name] = rounded(value)
    return found


def give(cell: Cell, changed_constants: dict[str, Any]) -> None:
    """Plan with these from now on, in this process."""
    base = cost_model.constants(cell.gpu)
    ranks = str(cell.world_size)
    of_ranks = {**base.of_ranks.get(ranks, {}), cell.kind: changed_constants}
    constants = replace(base, of_ranks={**base.of_ranks, ranks: of_ranks})
    gpu_constants.give(cell.gpu, constants)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of gathers and scatters.")
    parser.add_argument("paths", type=Path, nargs="+", help="files of benchmarks/plans.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the constants")
    parser.add_argument("--from-measured", default="", help="what to note as their source")
    arguments = parser.parse_args()
    entries = [entry for path in arguments.paths for entry in read(path)]
    for cell, products in by_cell(entries).items():
        fitted_to = [product for product in products if not product.is_held]
        seen = {product.problem for product in fitted_to}
        held = [p for p in products if p.is_held and p.problem not in seen]
        print(f"{cell.gpu}, {cell.world_size} ranks, {cell.kind}")
        print(*never_best(products), sep="\n")
        _show("before", fitted_to, held)
        base = replace(cost_model.constants(cell.gpu), of_ranks={})
        gpu_constants.give(cell.gpu, base)
        start = gpu_constants.constants_of_kind(cell.gpu, cell.kind, cell.world_size)
        start = replace(start, gpu=FITTED, formats={})
        found = changes(start, fit(fitted_to, start, arguments.rounds))
        give(cell, found)
        _show("now", fitted_to, held)
        found["uncertainty"] = uncertainty(held)
        found["sources"] = arguments.from_measured or _source(fitted_to, held)
        print(json.dumps(found))
        if arguments.write:
            write(cell, found)


def _source(fitted_to: Sequence[Product], held: Sequence[Product]) -> str:
    return (
        f"fitted to {len(fitted_to)} drawn shapes by benchmarks/fit_plans.py; uncertainty of "
        f"{len(held)} others"
    )


def _show(label: str, fitted_to: Sequence[Product], held: Sequence[Product]) -> None:
    print(f"{label}: mean, 97th percentile and largest of plan ÷ best")
    for which, products in (("fit", fitted_to), ("held", held)):
        for op in sorted({product.problem.op for product in products}):
            of_op = [product for product in products if product.problem.op == op]
            for with_tables in (False, True):
                source = "tables and model" if with_tables else "model"
                print(f"  {op}, {which}, {source}: {judge(of_op, with_tables=with_tables)}")


def write(cell: Cell, found: dict[str, Any]) -> None:
    """Put them into the GPU's file."""
    path = Path(tables.__file__).parent / f"{cell.gpu}.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    of_ranks = written.setdefault("of_ranks", {}).setdefault(str(cell.world_size), {})
    of_ranks[cell.kind] = found
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
