"""The cost model's constants of gathers and scatters, for a GPU and a number of ranks: fitted to
what `benchmarks/plans.py` measured of shapes to fit to, judged on the shapes that it held back.

    python -m benchmarks.fit_plans plans.jsonl more.jsonl
    python -m benchmarks.fit_plans plans.jsonl --write
    python -m benchmarks.fit_plans plans.jsonl --only-margins --write

Of each plan a shape counts the usual order of tiles and the usual SM push, which plans without a
table have. `--write` puts the constants where plans are made with them: under "of_ranks" in
`tables/<gpu>.json` of the agmm that is imported, with how far off they were on the shapes that were
held back. The matmul alone is fitted by `benchmarks/fit_alone.py`, the library's by
`benchmarks/fit_library.py`, and both stay. `--only-margins` is for what follows another fit of the
library's: it keeps the constants of ranks that are there but for `choice_margins`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agmm.planning import cost_model, tables
from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.cost_model.collectives import margin_name
from agmm.planning.plans import GATHERED_TO_KERNEL, KernelConfig
from agmm.planning.predictions import predict_us
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from agmm.planning.transports import SmPush
from benchmarks.descent import (
    FITTED,
    Call,
    Descent,
    Parameter,
    changed,
    entry_of,
    number,
    rounded,
)
from benchmarks.measured_plans import (
    Cell,
    Product,
    by_cell,
    is_usual,
    judge,
    never_best,
    uncertainty,
)
from benchmarks.plans import read

SCALARS = {
    ALL_GATHER_MATMUL: (
        "call_us",
        "gathered_latency_us",
        "gathered_overlap",
        "copy_overhead_us",
        "push_gb_per_s",
        "sm_push_us",
        "sm_push_cta_us",
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
        "streaming_us",
    ),
    MATMUL_REDUCE_SCATTER: (
        "scatter_us",
        "scatter_latency_us",
        "scatter_add_us",
        "scatter_gb_per_s",
        "reduce_scatter_us",
        "reduce_scatter_gb_per_s",
        "small_reduce_scatter_us",
        "small_reduce_scatter_gb_per_s",
    ),
}
"""The constants of one number that are fitted, by op."""
TO_KERNEL = (GATHERED_TO_KERNEL, f"large {GATHERED_TO_KERNEL}")
LIBRARY = ("gather", "large gather", "unfused", "large unfused", *TO_KERNEL)
"""The plans that gather first or scatter last, by their names in `choice_margins`; those of
`TO_KERNEL` multiply by agmm's kernels."""
_KNOWS_NOTHING = {one.name: one.default for one in fields(Constants)}
"""The values of constants that a GPU's file does not have."""
DROPPED = 1.5
"""The margin of such plans where they are never the best: a choice."""
BEGIN: dict[str, float | bool] = {
    "scatter_reads_anew": True,
    "call_us": 3.0,
    "gathered_latency_us": 4.0,
    "gathered_overlap": 0.2,
    "scatter_latency_us": 4.0,
    "scatter_add_us": 1.5,
    "sm_push_cta_us": 5.0,
    "small_reduce_scatter_us": 7.5,
    "small_reduce_scatter_gb_per_s": 95.0,
}
"""The values from which a fit begins where a GPU has none of its own; those of NCCL's
reduce-scatter are a line through 30 calls between two H200."""
LEAST_OVERHEAD_US = 0.5
"""The overhead of a tile from which a fit begins where a constant says none: a choice."""
KERNEL_STAYS = 0.02
"""`descent.STAYS` for what a kernel has of its own: many kernels share few shapes."""


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
                key: Key = margin_name(problem, plan.family)
                if plan.kernel is not None and not plan.gathers_first:
                    key = KernelConfig.parse(plan.kernel.kernel)
                calls.setdefault(key, []).append(Call.of(problem, place, us, least_us, plan))
        margins = dict(start.choice_margins.get(self.op, {}))
        for family in LIBRARY:
            if family in calls and all(call.lost > 0 for call in calls[family]):
                margins[family] = DROPPED
        super().__init__(
            replace(start, choice_margins={**start.choice_margins, self.op: margins}),
            calls,
            len(products),
            lambda _, of: [predict_us(c.problem, c.how) or 1.0 for c in of],
            lambda c, key: c.choice_margins[self.op].get(str(key), 1.0),
        )

    def margins(self) -> list[Parameter[Key]]:
        """The margins that are fitted."""
        margins = self.now.choice_margins[self.op]
        return [
            self._margin_of(family)
            for family in LIBRARY
            if family in self.calls and margins.get(family) != DROPPED
        ]

    def parameters(self) -> list[Parameter[Key]]:
        """All constants that are fitted."""
        everything = list(self.calls)
        found = [number(name, everything) for name in SCALARS[self.op]] + self.margins()
        for kernel in self.calls:
            if not isinstance(kernel, KernelConfig):
                continue
            name, one = kernel.kernel, [kernel]
            if kernel.is_streaming:  # which has no tiles' times, and is fitted as one
                continue
            if self.op == MATMUL_REDUCE_SCATTER:
                found += [self._of_scatter_tile(kernel, place) for place in (0, 1)]
                found.append(entry_of("scatter_rate_factor", name, one, 1.0, KERNEL_STAYS))
                found.append(entry_of("unaligned_scatter_factor", name, one, 1.0))
            else:
                usual = self.start.other_gathered_factor
                found.append(entry_of("gathered_factor", name, one, usual, KERNEL_STAYS))
                usual_us = self.start.overhead_us(kernel)
                found.append(entry_of("tile_overhead_us", name, one, usual_us, KERNEL_STAYS))
        return found

    def _of_scatter_tile(self, kernel: KernelConfig, place: int) -> Parameter[Key]:
        per_k = 2e-6 * kernel.tile_m * kernel.tile_n / self.start.other_tflops_per_sm
        other = per_k, self.start.other_scatter_overhead_us

        def both(constants: Constants) -> tuple[float, float]:
            us_per_k, overhead_us = constants.of_kernel(constants.scatter_tile_us, kernel, other)
            return us_per_k, max(overhead_us, LEAST_OVERHEAD_US)

        def put(constants: Constants, value: float) -> Constants:
            us_per_k, overhead_us = both(constants)
            new = (us_per_k, value) if place else (value, overhead_us)
            return changed(
                constants,
                "scatter_tile_us",
                {**constants.scatter_tile_us, kernel.kernel: new},
            )

        return Parameter(lambda c: both(c)[place], put, [kernel], KERNEL_STAYS)

    def _margin_of(self, family: str) -> Parameter[Key]:
        def put(constants: Constants, value: float) -> Constants:
            of_op = {**constants.choice_margins[self.op], family: value}
            margins = {**constants.choice_margins, self.op: of_op}
            return changed(constants, "choice_margins", margins)

        return Parameter(lambda c: c.choice_margins[self.op].get(family, 1.0), put, [])


def fit(
    products: Sequence[Product], start: Constants, steps: int, *, only_margins: bool = False
) -> Constants:
    """Constants that are fitted to the products of both ops."""
    if only_margins:
        return _each_op(products, start, lambda one: one.slide(one.margins(), steps))
    begin = {
        name: value
        for name, value in BEGIN.items()
        if getattr(start, name) in (0.0, False, gpu_constants.NEVER_US)
        or name == "small_reduce_scatter_gb_per_s"
    }
    plans = {plan for product in products for plan in product.times}
    begin["sends_scales"] = any(isinstance(plan.transport, SmPush) for plan in plans)
    constants = gpu_constants.with_changes(start, begin)
    return _each_op(products, constants, lambda one: one.slide(one.parameters(), steps))


def _each_op(
    products: Sequence[Product], constants: Constants, improve: Callable[[Fit], None]
) -> Constants:
    """The constants, improved for one op after the other."""
    for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER):
        of_op = [product for product in products if product.problem.op == op]
        if of_op:
            one = Fit(of_op, constants)
            improve(one)
            constants = one.now
    return constants


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


def starts(cell: Cell) -> tuple[Constants, dict[str, Any]]:
    """The constants that the cell's GPU has for any number of ranks, as FITTED's, and what differs
    for the cell's so far."""
    base = cost_model.constants(cell.gpu)
    gpu_constants.give(cell.gpu, replace(base, of_ranks={}))
    plain = gpu_constants.constants_of_kind(cell.gpu, cell.kind, cell.world_size)
    gpu_constants.give(cell.gpu, base)
    so_far = base.of_ranks.get(str(cell.world_size), {}).get(cell.kind, {})
    return replace(plain, gpu=FITTED, formats={}, of_ranks={}), so_far


def _unmeasured(so_far: dict[str, Any]) -> dict[str, Any]:
    """The constants that are not fitted here, with the margins of plans that no file may have
    measured: a fit begins with them."""
    found = {name: value for name, value in so_far.items() if name.startswith("library")}
    margins = so_far.get("choice_margins", {}).get(ALL_GATHER_MATMUL, {})
    kept = {name: value for name, value in margins.items() if name in TO_KERNEL}
    return {**found, "choice_margins": {ALL_GATHER_MATMUL: kept}} if kept else found


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of gathers and scatters.")
    parser.add_argument("paths", type=Path, nargs="+", help="files of benchmarks/plans.py")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only-margins", action="store_true", help="fit choice_margins alone")
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
        only = arguments.only_margins
        plain, so_far = starts(cell)
        start = gpu_constants.with_changes(plain, so_far if only else _unmeasured(so_far))
        found = changes(plain, fit(fitted_to, start, arguments.steps, only_margins=only))
        if only:
            found = {**so_far, "choice_margins": found["choice_margins"]}
        give(cell, found)
        _show("now", fitted_to, held)
        found["uncertainty"] = uncertainty(held)
        source = arguments.from_measured or _source(fitted_to, held)
        found["sources"] = f"choice_margins: {source}. {so_far['sources']}" if only else source
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
