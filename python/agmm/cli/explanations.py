"""An explanation of `agmm explain`, and the forms in which it is printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table

from agmm.bench.units import duration
from agmm.cli.terminal import plain_table, whole

FEW = 5
"""How many plans are printed beside the chosen one where not all are asked for."""


class Alternative(NamedTuple):
    """A plan that could serve the call, with its predicted time in µs, which may be unknown."""

    plan: str
    us: float | None
    mark: str = ""
    """What is printed behind the plan."""

    @property
    def is_chosen(self) -> bool:
        return bool(self.mark)


@dataclass(frozen=True)
class Explanation:
    """Why a call gets its plan. Times are in µs."""

    asked: dict[str, Any]
    """What the call is: op, sizes, format, ranks and GPU."""
    call: str
    plan: str
    why: str
    on_one_host: str | None = None
    """The plan that the times are of, where the call has another one since its ranks are on several
    hosts."""
    source: str | None = None
    predicted_us: float | None = None
    uncertainty: float | None = None
    """How far off the prediction is for nine in ten shapes, as a share of it."""
    unfused_us: float | None = None
    """The predicted time of the unfused path."""
    alone_us: float | None = None
    """The predicted time of the matmul alone."""
    measured_us: float | None = None
    measured_alone_us: float | None = None
    times: tuple[str, ...] = ()
    """What is said of these times."""
    notes: tuple[str, ...] = ()
    is_unfused: bool = False
    """Whether the planner leaves the call to the library's matmul and a collective."""
    alternatives: tuple[Alternative, ...] = ()
    """The plans that there are, fastest first, the chosen one among them."""

    def text(self, *, everything: bool = False) -> RenderableType:
        """The explanation, ready to print.

        Args:
            everything: print all alternatives.
        """
        lines = [self.call, f"plan: {self.plan}"]
        lines += [] if self.source is None else [f"from: {self.source}"]
        lines += [*self.times, *([f"why: {self.why}"] if self.why else [])]
        lines += [f"note: {note}" for note in self.notes]
        if not self.alternatives:
            return Group(*lines)
        return Group("\n".join(lines), *self._table(everything))

    def _table(self, everything: bool) -> list[RenderableType]:
        others = [one for one in self.alternatives if not one.is_chosen]
        left_out = set() if everything else set(others[FEW:])
        chosen_us = self.predicted_us
        has_ratios = chosen_us is not None
        table = plain_table("alternatives (predicted)")
        table.add_column("plan", overflow="fold")
        table.add_column("time", justify="right", no_wrap=True)
        if has_ratios:
            table.add_column("÷ plan", justify="right", no_wrap=True)
        for one in self.alternatives:
            if one in left_out:
                continue
            cells = [one.plan + one.mark, "-" if one.us is None else duration(one.us)]
            if has_ratios:
                cells.append("-" if not one.us or not chosen_us else f"{one.us / chosen_us:.2f}")
            table.add_row(*cells)
        more = [f"{len(left_out)} more plans: --all"] if left_out else []
        return [whole(table), *more]

    def as_dict(self) -> dict[str, Any]:
        """The explanation as JSON has it."""
        return {
            **self.asked,
            "plan": self.plan,
            "plan_on_one_host": self.on_one_host,
            "source": self.source,
            "predicted_us": self.predicted_us,
            "uncertainty": self.uncertainty,
            "unfused_us": self.unfused_us,
            "matmul_alone_us": self.alone_us,
            "measured_us": self.measured_us,
            "measured_matmul_alone_us": self.measured_alone_us,
            "why": self.why,
            "notes": list(self.notes),
            "alternatives": [
                {"plan": one.plan, "predicted_us": one.us, "chosen": one.is_chosen}
                for one in self.alternatives
            ],
        }


def as_json(found: Sequence[dict[str, Any]]) -> str:
    """The text of ``agmm explain --json``: a list with one entry for each call."""
    return json.dumps(found, indent=1, ensure_ascii=False)


def summary(found: Sequence[Explanation]) -> Table:
    """A table with a line for each of several shapes, of one op."""
    names = [name for name in "mnk" if name in found[0].asked]
    table = plain_table()
    table.add_column(" x ".join(names).upper().replace("X", "x"), no_wrap=True)
    table.add_column("plan", overflow="fold")
    of_matmul = "n" in names
    for heading in ("predicted", "unfused", "÷ alone", "measured")[: None if of_matmul else 1]:
        table.add_column(heading, justify="right", no_wrap=True)
    if of_matmul:
        table.add_column("from", overflow="fold")
    for one in found:
        sizes = " x ".join(str(one.asked[name]) for name in names)
        ratio = "-"
        if one.predicted_us is not None and one.alone_us is not None:
            ratio = f"{max(1.0, one.predicted_us / one.alone_us):.2f}"
        predicted, unfused, measured = (
            "-" if us is None else duration(us)
            for us in (one.predicted_us, one.unfused_us, one.measured_us)
        )
        cells = [predicted, unfused, ratio, measured, one.source or "-"]
        table.add_row(sizes, one.plan, *cells[: None if of_matmul else 1])
    return whole(table)
