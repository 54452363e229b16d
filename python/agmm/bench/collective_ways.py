"""The ways to carry out a collective that are timed beside each other, and their operands.

The roof is a copy of as many bytes as the result has, on the rank itself. All ways leave what they
are given as it was, which costs the backend's all-reduce a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from agmm import collectives
from agmm.bench.way import ROOF, Result, Way, Workload, as_graph, by_name
from agmm.planning.problems import COLLECTIVES
from agmm.planning.shapes import TensorShape
from agmm.runtime.collectives import by_newer_name
from agmm.testing.cases import Operands

_ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE, _NORM = COLLECTIVES
EPS = 1e-6
"""What is added to the mean of the squares, as `all_reduce_rms_norm` does by default."""
RESIDUAL_SEED, WEIGHT_SEED = 10_000, 10_001
"""Seeds that no rank has."""

GPU_SHAPES = tuple(TensorShape(m, 8192) for m in (16, 64, 256, 512, 1024, 4096))
"""The tensors that are measured on GPUs where none is named: from decoding to prefill."""
CPU_SHAPES = (TensorShape(16, 512), TensorShape(256, 1024))
"""Tensors that take CPU ranks milliseconds."""


@dataclass
class CollectiveWorkload(Workload):
    """The tensor of one collective on one rank: `operands.A_shard` is what the rank gives."""

    seed: int = 0
    residual: Any = None
    """The residual that a norm adds, the same on all ranks."""
    weight: Any = None
    """The weight of a norm."""

    @property
    def given(self) -> torch.Tensor:
        return self.operands.A_shard


def make_problem(
    op: str,
    shape: TensorShape,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> CollectiveWorkload:
    """The operands of this rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = seed + (0 if op == _ALL_GATHER else rank)
    whole = drawn(tuple(shape), own, dtype, device)
    given = whole.chunk(ranks)[rank].clone() if op == _ALL_GATHER else whole
    problem = CollectiveWorkload(shape, group, device, Operands(given, whole, whole), op, seed=seed)
    if op == _NORM:
        problem.residual = drawn(tuple(shape), seed + RESIDUAL_SEED, dtype, device)
        problem.weight = drawn((shape.K,), seed + WEIGHT_SEED, dtype, device)
    return problem


def drawn(
    size: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Random numbers, the same on all ranks that give one seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(size, generator=generator, device=device).to(dtype)


def references(problem: CollectiveWorkload) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The results in float64 of the roof and of the others, and the error of a computation that
    rounds after each step. Every rank makes what the others give."""
    given, op, wide = problem.given, problem.op, torch.float64
    rank, ranks = dist.get_rank(problem.group), dist.get_world_size(problem.group)
    roof = _of_roof(problem).to(wide)
    if op == _ALL_GATHER:
        return roof, roof, 0.0
    exact = torch.zeros(given.shape, dtype=wide, device=problem.device)
    usual = torch.zeros_like(given)
    for source in range(ranks):
        one = (
            given
            if source == rank
            else drawn(tuple(problem.shape), problem.seed + source, given.dtype, problem.device)
        )
        exact += one
        usual += one
    if op == _REDUCE_SCATTER:
        exact, usual = exact.chunk(ranks)[rank], usual.chunk(ranks)[rank]
    if op == _NORM:
        exact = normed(exact + problem.residual, problem.weight.to(wide))
        usual = normed(usual + problem.residual, problem.weight)
    error = (usual.to(wide) - exact).norm() / exact.norm()
    dist.all_reduce(error, dist.ReduceOp.MAX, group=problem.group)
    return roof, exact, error.item()


def normed(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The RMS norm of each row by torch."""
    return functional.rms_norm(total, total.shape[-1:], weight, EPS)


def _of_roof(p: CollectiveWorkload) -> torch.Tensor:
    """The tensor that is copied: of the size of the result."""
    if p.op == _REDUCE_SCATTER:
        return p.operands.A.chunk(dist.get_world_size(p.group))[0]
    return p.operands.A


def _roof(p: Workload) -> Callable[[], Result]:
    assert isinstance(p, CollectiveWorkload)
    source = _of_roof(p)
    out = torch.empty_like(source)
    return lambda: (None, out.copy_(source))


def _by_backend(p: Workload) -> Callable[[], Result]:
    assert isinstance(p, CollectiveWorkload)
    x, group, op = p.given, p.group, p.op
    ranks = dist.get_world_size(group)
    out = x.new_empty(_rows_of_result(p), p.shape.K)
    all_gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
    reduce_scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")
    assert op != _REDUCE_SCATTER or out.shape[0] * ranks == x.shape[0]

    def call() -> Result:
        if op == _ALL_GATHER:
            all_gather(out, x, group=group)
        elif op == _REDUCE_SCATTER:
            reduce_scatter(out, x, group=group)
        else:
            dist.all_reduce(out.copy_(x), group=group)
        if op == _NORM:
            return None, normed(out + p.residual, p.weight)
        return None, out

    return call


def _rows_of_result(p: CollectiveWorkload) -> int:
    ranks = dist.get_world_size(p.group)
    return int(p.shape.M) // ranks if p.op == _REDUCE_SCATTER else int(p.shape.M)


def _by_agmm(p: Workload) -> Callable[[], Result]:
    assert isinstance(p, CollectiveWorkload)
    x, group = p.given, p.group
    if p.op == _NORM:
        norm, residual, weight = collectives.all_reduce_rms_norm, p.residual, p.weight
        return lambda: (None, norm(x, residual, weight, EPS, group)[0])
    op: Callable[..., torch.Tensor] = getattr(collectives, p.op)
    return lambda: (None, op(x, group))


_TITLES = {
    _ALL_GATHER: "all-gather",
    _REDUCE_SCATTER: "reduce-scatter",
    _ALL_REDUCE: "copy, then all-reduce",
    _NORM: "copy, all-reduce, addition, norm",
}
"""What the backend is called for."""


def _ways(op: str) -> dict[str, Way]:
    title = f"backend: {_TITLES[op]}"
    return by_name(
        Way(ROOF, "copy of the result (roof)", _roof, on_cpu=True),
        Way("backend", title, _by_backend, on_cpu=True),
        Way("backend-graph", f"{title}, graph", as_graph(_by_backend)),
        Way("agmm", "agmm", _by_agmm, on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", as_graph(_by_agmm), is_agmm=True),
    )


COLLECTIVE_WAYS = {op: _ways(op) for op in COLLECTIVES}
"""The ways of each collective by name; the backend is NCCL on GPUs and gloo on the CPU."""
