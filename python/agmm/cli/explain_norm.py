"""`agmm explain --op matmul_all_reduce_rms_norm`: the plan of the sum, and who adds the residual
and norms."""

from __future__ import annotations

from dataclasses import replace

from agmm import _core
from agmm.bench.units import duration
from agmm.cli import explain
from agmm.cli.explanations import Explanation
from agmm.errors import InvalidArgument
from agmm.planning import cost_model, formats
from agmm.planning.cost_model import collectives as collective_costs
from agmm.planning.op_plans import Choice
from agmm.planning.problems import ALL_GATHER_MATMUL, CPU, NORMED, Problem


def explain_normed(problem: Problem) -> Explanation:
    """The explanation of a matmul + all-reduce with residual and RMS norm.

    Args:
        problem: that of the sum, whose op is `MATMUL_ALL_REDUCE`.

    Raises InvalidArgument for fp8 operands, which the op does not take.
    """
    if problem.format.startswith("float8"):
        raise InvalidArgument(
            f"dtype: found {problem.format} with {NORMED}, wanted one without scales"
        )
    found = explain.explain_any(problem, None)
    asked = {**found.asked, "op": NORMED}
    call = found.call.replace("all_reduce(A", "rms_norm(residual + all_reduce(A", 1)
    call = call.replace("@ B)", "@ B))", 1)
    found = replace(found, asked=asked, call=call)
    then = "an addition and torch's rms_norm"
    method = None if problem.gpu == CPU else _method(problem)
    if method is None:
        return replace(found, plan=f"{found.plan}, then {then}", notes=(*found.notes, _TIMES))
    kernel = _streaming(problem)
    if kernel is None and not found.is_unfused:
        return replace(found, plan=f"{found.plan}, then {then}", notes=(*found.notes, _TIMES))
    product = "torch.mm" if kernel is None else f"a kernel that streams the weight ({kernel})"
    us = _predicted_us(problem)
    return replace(
        found,
        plan=f"{product}, then agmm's {method}, with residual and norm in the same kernel",
        why=f"the kernels of {' and '.join(explain.NORMED_METHODS)} add the residual and norm",
        source=None,
        predicted_us=us,
        uncertainty=None,
        measured_us=None,
        measured_alone_us=None,
        times=(f"predicted: {duration(us)}, the product and the kernel of the sum", _NOT_KNOWN),
        notes=(*found.notes, _OF_SUM),
        alternatives=tuple(one._replace(mark="") for one in found.alternatives),
    )


_TIMES = "times are those of the sum, without residual and norm"
_NOT_KNOWN = "uncertainty: not known: the model has no time of residual and norm in that kernel"
_OF_SUM = "the alternatives are those of the sum, without residual and norm"


def _predicted_us(problem: Problem) -> float:
    """The predicted time of the product on one rank, and of the kernel that sums it."""
    choice = _alone(problem)
    product_us = choice.predicted_us
    if product_us is None:
        product_us = cost_model.matmul_us(problem)
    nbytes = problem.m * problem.n * formats.of(problem.format).element_bytes
    return product_us + collective_costs.by_kernel_us("all_reduce", nbytes, problem.world_size)


def _method(problem: Problem) -> str | None:
    """The method by which one kernel sums, adds and norms the product; None where there is none."""
    row_bytes = problem.n * formats.of(problem.format).element_bytes
    nbytes, ranks = problem.m * row_bytes, problem.world_size
    if ranks == 1 or not collective_costs.is_by_kernel(nbytes, ranks):
        return None
    method = collective_costs.collective_method("all_reduce", nbytes, ranks)
    fits = row_bytes <= _core.MAX_NORM_ROW_BYTES
    return method if method in explain.NORMED_METHODS and fits else None


def _streaming(problem: Problem) -> str | None:
    """The streaming kernel that the plan of one rank has faster than the library, or None."""
    kernel = _alone(problem).plan.kernel
    return kernel.name if kernel is not None and kernel.is_streaming else None


def _alone(problem: Problem) -> Choice:
    """The choice of a plan for the product on one rank."""
    alone = replace(problem, op=ALL_GATHER_MATMUL, world_size=1)
    return explain.planner_for(problem.gpu, 1).choose(alone)
