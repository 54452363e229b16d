"""The times that `agmm explain` gives: predicted, how far that may be off, and measured."""

from __future__ import annotations

from collections.abc import Iterator

from agmm.bench.units import duration
from agmm.planning import cost_model
from agmm.planning.heuristics import is_fp8
from agmm.planning.legality import why_unfused
from agmm.planning.op_plans import Choice
from agmm.planning.plans import Plan
from agmm.planning.predictions import uncertainty
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    PLAIN,
    Problem,
)


def times(problem: Problem, choice: Choice) -> Iterator[str]:
    """Yield what is said of the times of a choice, a line each."""
    if choice.predicted_us is not None:
        used = cost_model.constants(problem.gpu).gpu
        of = "" if used == problem.gpu else f" for {used}"
        us = duration(choice.predicted_us)
        yield f"predicted{of}: {us}, {_beside_roof(problem, choice)}"
    row = choice.row
    if row is None and choice.predicted_us is not None:
        yield f"uncertainty: {_how_uncertain(problem, choice.plan)}"
    if row is None:
        if problem.op == MATMUL_ALL_REDUCE and (problem.gpu == CPU or is_fp8(problem)):
            return  # nothing measures it
        if problem.gpu == CPU or why_unfused(problem.format, problem.n, problem.k) is None:
            of = "" if problem.op == ALL_GATHER_MATMUL else f" --op {problem.op}"
            by = f"agmm tune{of}" if problem.epilogue == PLAIN else "AGMM_LEARN=on"
            yield f"measured: not yet ({by} does it)"
        elif problem.op == MATMUL_REDUCE_SCATTER:
            yield "measured: not yet"
    elif row.roof_us is None:
        yield f"measured: {duration(row.us)}"
    else:
        yield (
            f"measured: {duration(row.us)}, {row.us / row.roof_us:.2f} × the matmul alone "
            f"({duration(row.roof_us)}), by agmm {row.agmm}"
        )


def _how_uncertain(problem: Problem, plan: Plan) -> str:
    found = uncertainty(problem, plan)
    if found is None:
        return (
            f"not known on {problem.world_size} ranks: the model has not been compared there with "
            "shapes that it was not fitted to"
        )
    return f"{found:.0%}: of shapes that the model was not fitted to, nine in ten were as close"


def _beside_roof(problem: Problem, choice: Choice) -> str:
    """The prediction over that of the matmul alone, in words.

    The ratio is given where it means something. A matmul that is mostly launch and latency is
    predicted by other constants than the call, and below 1 the two models' errors are all that
    is left: the call holds that matmul.
    """
    assert choice.predicted_us is not None
    roof = cost_model.matmul_us(problem)
    c = cost_model.constants(problem.gpu)
    if c.launch_us + c.matmul_latency_us > roof / 2:
        return f"the matmul alone {duration(roof)}, mostly latency: their ratio says nothing"
    if choice.predicted_us < roof:
        return f"as long as the matmul alone ({duration(roof)}), as far as the model can tell"
    return f"{choice.predicted_us / roof:.2f} × the matmul alone ({duration(roof)})"
