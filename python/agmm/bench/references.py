"""The operands of a rank for a shape, and what each way has to make of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm.bench import collective_ways, moe_scaled_ways, moe_ways, norm_ways, scaled_ways
from agmm.bench.exchange import of_all_ranks
from agmm.bench.way import ROOF, Workload
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, NORMED
from agmm.planning.shapes import AnyShape, MoEShape, TensorShape
from agmm.testing.cases import make_operands, make_scatter_operands
from agmm.testing.reference import allowed_error, gathered_product, scattered_sum


class References(NamedTuple):
    """The results in float64, and the error of the op's usual computation in its own dtype, the
    largest of all ranks; where it is None, that of the roof."""

    roof: torch.Tensor
    others: torch.Tensor
    error: float | None = None

    def of(self, way: str) -> torch.Tensor:
        return self.roof if way == ROOF else self.others

    def allowed(self, roof_error: float) -> float:
        """The largest relative error of a way that is right."""
        return allowed_error(roof_error if self.error is None else self.error)


def make_problem(
    op: str,
    shape: AnyShape,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    scaling: str | None = None,
) -> Workload:
    """This rank's; with scales of a kind where one is given.

    Raises InvalidArgument where the ranks cannot have equally many rows.
    """
    if isinstance(shape, MoEShape):
        if scaling is not None:
            return moe_scaled_ways.make_scaled_problem(shape, group, device, scaling, seed)
        return moe_ways.make_problem(shape, group, device, dtype, seed)
    if isinstance(shape, TensorShape):
        return collective_ways.make_problem(op, shape, group, device, dtype, seed)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if op == ALL_GATHER_MATMUL:
        operands = make_operands(shape, rank, world_size, dtype=dtype, device=device, seed=seed)
    else:
        operands = make_scatter_operands(
            shape,
            rank,
            world_size,
            dtype=dtype,
            device=device,
            seed=seed,
            divided=op == MATMUL_REDUCE_SCATTER,
        )
    problem = Workload(shape, group, device, operands, op)
    if op == NORMED:
        return norm_ways.with_norm(problem, seed)
    if scaling is None:
        return problem
    return scaled_ways.make_scaled_problem(problem, scaling, seed)


def references(problem: Workload, seed: int = 0) -> References:
    """The references of a problem made with the given seed. Collective."""
    if isinstance(problem, moe_ways.MoEWorkload):
        kind = moe_ways.PLAIN if problem.scaling is None else moe_scaled_ways.SCALED
        return References(*moe_ways.references(problem, kind))
    if isinstance(problem, collective_ways.CollectiveWorkload):
        return References(*collective_ways.references(problem))
    if problem.scaling is not None:
        return References(*scaled_ways.references(problem, seed))
    operands, group = problem.operands, problem.group
    product = gathered_product(operands.A, operands.B)
    if problem.op == ALL_GATHER_MATMUL:
        return References(product, product)
    is_divided = problem.op == MATMUL_REDUCE_SCATTER
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def operands_of(source: int) -> tuple[torch.Tensor, torch.Tensor]:
        if source == rank:
            return operands.A, operands.B
        made = make_scatter_operands(
            problem.shape,
            source,
            world_size,
            dtype=operands.A.dtype,
            device=problem.device,
            seed=seed,
            divided=is_divided,
        )
        return made.A, made.B

    part, parts = (rank, world_size) if is_divided else (0, 1)
    found = scattered_sum(operands_of, part, world_size, parts=parts)
    errors = of_all_ranks("the error that is allowed", found.error, group)
    total = found.rows
    if isinstance(problem, norm_ways.NormWorkload):
        total = norm_ways.reference(problem, total)
    return References(product, total, max(errors))
