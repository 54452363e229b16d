"""The ways to compute a matmul + all-reduce with residual and RMS norm that are timed beside each
other, and their operands.

The roof is the matmul alone, as for the op without the norm. A way returns the norm; the sum with
the residual, which it makes too, is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import agmm
from agmm.bench.collective_ways import EPS, RESIDUAL_SEED, WEIGHT_SEED, drawn, normed
from agmm.bench.way import ROOF, Result, Way, Workload, as_graph, by_name, matmul_roof
from agmm.planning.shapes import Shape

GPU_SHAPES = tuple(Shape(m, 8192, k) for k in (2048, 7168) for m in (1, 16, 64, 256))
"""The output and the down projection of a layer of Llama 3 70B at 4 ranks, as decoding has them."""


@dataclass
class NormWorkload(Workload):
    """The operands of a product whose sum over the ranks is normed."""

    residual: Any = None
    """[M, N], the same on all ranks."""
    weight: Any = None
    """The norm's weight, [N]."""


def with_norm(problem: Workload, seed: int) -> NormWorkload:
    """The problem of a matmul + all-reduce, with what is added and normed."""
    of_sum = problem.shape, problem.group, problem.device, problem.operands, problem.op
    m, n = problem.shape.M, problem.shape.N
    where = problem.operands.A.dtype, problem.device
    residual = drawn((m, n), seed + RESIDUAL_SEED, *where)
    weight = drawn((n,), seed + WEIGHT_SEED, *where)
    return NormWorkload(*of_sum, residual=residual, weight=weight)


def reference(problem: NormWorkload, total: torch.Tensor) -> torch.Tensor:
    """The norm in float64 of a sum of products in float64."""
    return normed(total + problem.residual.double(), problem.weight.double())


def _unfused(p: Workload) -> Callable[[], Result]:
    assert isinstance(p, NormWorkload)
    A, B, group = p.operands.A, p.operands.B, p.group
    residual, weight = p.residual, p.weight
    total = torch.empty(p.shape.M, p.shape.N, dtype=A.dtype, device=p.device)

    def call() -> Result:
        dist.all_reduce(torch.mm(A, B, out=total), group=group)
        return None, normed(total.add_(residual), weight)

    return call


def _agmm(config: str | None = None) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, NormWorkload)
        given = p.operands.A, p.operands.B, p.residual, p.weight, EPS, p.group

        def call() -> Result:
            return None, agmm.matmul_all_reduce_rms_norm(*given, config=config)[0]

        return call

    return prepare


def _ways() -> dict[str, Way]:
    planned, streamed, title = _agmm(), _agmm("streamed"), "agmm, in one kernel"
    return by_name(
        Way(ROOF, "matmul alone (roof)", matmul_roof, on_cpu=True),
        Way("unfused", "matmul, then all-reduce, addition and norm", _unfused, on_cpu=True),
        Way("unfused-graph", "matmul, all-reduce, addition, norm, graph", as_graph(_unfused)),
        Way("agmm", "agmm", planned, on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", as_graph(planned), is_agmm=True),
        Way("agmm-streamed", title, streamed, is_agmm=True, host_time=True),
        Way("agmm-streamed-graph", f"{title}, graph", as_graph(streamed), is_agmm=True),
    )


NORM_WAYS = _ways()
"""The ways of `NORMED` by name."""
