"""The ways to compute each op on fp8 operands with scales. They have the names of the ways without
scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import agmm
from agmm.bench import ways
from agmm.bench.exchange import of_all_ranks
from agmm.bench.moe_scaled_ways import SCALED_MOE_WAYS
from agmm.bench.way import ROOF, Result, Way, Workload, as_graph
from agmm.errors import InvalidArgument
from agmm.ops.fp8_gather import Fp8Gather
from agmm.ops.fp8_operands import Fp8Weights
from agmm.ops.fp8_scatter import Fp8Scatter
from agmm.ops.gather import GatherSettings
from agmm.ops.pipeline import serve
from agmm.ops.scaled_products import scaled_matmul
from agmm.ops.scatter import ScatterSettings
from agmm.planning.plans import Plan
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MOE
from agmm.planning.shapes import Shape
from agmm.runtime.collectives import by_newer_name
from agmm.runtime.scaled import FP8, Scaled, ScaledProducts
from agmm.runtime.scaling import ALL, BY_NAME, K_MULTIPLE, Tile, scale_shape
from agmm.testing.cases import make_scatter_operands
from agmm.testing.reference import gathered_product, relative_error

OUT_DTYPE = torch.bfloat16
"""The dtype of all results: what GPUs write."""


class Scales(NamedTuple):
    """The scales of a rank's operands, by `scaling.scale_shape`; a tensor-wise one is the same on
    all ranks, as torch's fused op wants it."""

    A_shard: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor


def check_scaling(dtype: torch.dtype, scaling: str | None, shapes: list[Shape]) -> str | None:
    """The kind of scales for a dtype: for fp8 row-wise where none is given, else none.

    Raises InvalidArgument for an unknown kind, one without fp8, or a K that fp8 cannot have.
    """
    if dtype not in FP8:
        if scaling is not None:
            raise InvalidArgument(
                f"scaling: found {scaling!r} with {dtype}, wanted none, or float8_e4m3fn"
            )
        return None
    scaling = scaling or "rowwise"
    if scaling not in BY_NAME:
        raise InvalidArgument(
            f"scaling: found {scaling!r}, wanted one of {', '.join(map(repr, BY_NAME))}"
        )
    for shape in shapes:
        if shape.K % K_MULTIPLE:
            raise InvalidArgument(
                f"shape: found {shape} with {dtype}, wanted a K that is a multiple of {K_MULTIPLE}"
            )
    return scaling


def make_scaled_problem(problem: Workload, scaling: str, seed: int) -> Workload:
    """The problem, whose operands are fp8, with scales."""
    rank, kind = dist.get_rank(problem.group), BY_NAME[scaling]
    operands, scatters = problem.operands, problem.op == MATMUL_REDUCE_SCATTER
    a = _scales(operands.A, kind.a, 3 * (seed + rank * scatters))
    b = _scales(operands.B, kind.b, 3 * (seed + rank * (kind.b[1] != ALL)) + 1)
    shard = a
    if not scatters and kind.a[0] != ALL:
        shard = a.chunk(dist.get_world_size(problem.group))[rank].contiguous()
    problem.scales = Scales(shard, a, b)
    problem.scaling = scaling
    return problem


def _scales(values: torch.Tensor, tile: Tile, seed: int) -> torch.Tensor:
    """Makes scales around 1, so that no product is lost beside others."""
    generator = torch.Generator(values.device).manual_seed(seed)
    shape = scale_shape(values.shape, tile)
    return torch.rand(shape, generator=generator, device=values.device) + 0.5


def dequantised(problem: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in float64."""
    kind, scales = _of(problem)
    A = Scaled(problem.operands.A, scales.A, kind.a)
    B = Scaled(problem.operands.B, scales.B, kind.b)
    return A.dequantised().double(), B.dequantised().double()


class ScaledReferences(NamedTuple):
    """What `references.References` holds, for fp8 operands."""

    roof: torch.Tensor
    others: torch.Tensor
    error: float | None


def references(problem: Workload, seed: int) -> ScaledReferences:
    """The references in float64, of the dequantised operands. Collective."""
    product = gathered_product(*dequantised(problem))
    if problem.op != MATMUL_REDUCE_SCATTER:
        return ScaledReferences(product, product, None)
    rank, world_size = dist.get_rank(problem.group), dist.get_world_size(problem.group)
    exact = torch.zeros_like(product.chunk(world_size)[rank])
    rounded = exact.to(OUT_DTYPE)
    for source in range(world_size):
        A, B = dequantised(_problem_of(problem, source, seed))
        partial = gathered_product(A.chunk(world_size)[rank], B)
        exact += partial
        rounded += partial.to(OUT_DTYPE)
    errors = of_all_ranks(
        "the error that is allowed", relative_error(rounded, exact), problem.group
    )
    return ScaledReferences(product, exact, max(errors))


def _problem_of(problem: Workload, rank: int, seed: int) -> Workload:
    """What another rank has of a scatter."""
    kind, world_size = BY_NAME[str(problem.scaling)], dist.get_world_size(problem.group)
    operands = make_scatter_operands(
        problem.shape,
        rank,
        world_size,
        dtype=problem.operands.A.dtype,
        device=problem.device,
        seed=seed,
    )
    made = Workload(problem.shape, problem.group, problem.device, operands, problem.op)
    a = _scales(operands.A, kind.a, 3 * (seed + rank))
    b = _scales(operands.B, kind.b, 3 * (seed + rank * (kind.b[1] != ALL)) + 1)
    made.scales, made.scaling = Scales(a, a, b), problem.scaling
    return made


def _of(problem: Workload) -> tuple[Any, Scales]:
    assert problem.scales is not None and problem.scaling is not None
    return BY_NAME[problem.scaling], problem.scales


# --- the ways ---


def _product(p: Workload) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``torch._scaled_mm`` of A and its scales, on the CPU a product of dequantised operands."""
    _, scales = _of(p)
    B, scale_b = p.operands.B, scales.B
    return lambda A, scale_a: scaled_matmul(A, scale_a, B, scale_b, OUT_DTYPE, True)


def _roof(p: Workload) -> Callable[[], Result]:
    product, A, scale = _product(p), p.operands.A, _of(p)[1].A
    return lambda: (None, product(A, scale))


def _unfused(p: Workload) -> Callable[[], Result]:
    kind, scales = _of(p)
    product, shard, group = _product(p), p.operands.A_shard, p.group
    A = torch.empty_like(p.operands.A)
    is_one = kind.a[0] == ALL
    scale_A = scales.A if is_one else torch.empty_like(scales.A)
    gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
    as_bytes = A.view(torch.uint8), shard.view(torch.uint8)

    def call() -> Result:
        gather(*as_bytes, group=group)
        if not is_one:
            gather(scale_A, scales.A_shard, group=group)
        return A, product(A, scale_A)

    return call


def _torch_fused(p: Workload) -> Callable[[], Result]:
    import torch.distributed._symmetric_memory

    _, scales = _of(p)
    shard, B, name = p.operands.A_shard, p.operands.B, p.group_name
    op = torch.ops.symm_mem.fused_all_gather_scaled_matmul

    def call() -> Result:
        A, outs = op(
            shard, [B], scales.A_shard, [scales.B], 0, name, [None], [None], [OUT_DTYPE], [True]
        )
        return A, outs[0]

    return call


def _agmm(return_A: bool) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        _, scales = _of(p)
        given = p.operands.A_shard, p.operands.B, scales.A_shard, scales.B, p.group
        # This accumulates fast, which all other ways do too.
        op: Any = partial(agmm.all_gather_scaled_matmul, use_fast_accum=True)

        def with_A() -> Result:
            A, _, out = op(*given, return_A=True)
            return A, out

        return with_A if return_A else lambda: (None, op(*given))

    return prepare


def _scatter_unfused(p: Workload) -> Callable[[], Result]:
    _, scales = _of(p)
    product, A, group = _product(p), p.operands.A, p.group
    rows = p.shape.M // dist.get_world_size(group)
    out = torch.empty(rows, p.shape.N, dtype=OUT_DTYPE, device=p.device)
    scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")

    def call() -> Result:
        scatter(out, product(A, scales.A), group=group)
        return None, out

    return call


def _torch_fused_scatter(p: Workload) -> Callable[[], Result]:
    import torch.distributed._symmetric_memory

    _, scales = _of(p)
    A, B, name, shape = p.operands.A, p.operands.B, p.group_name, [p.shape.M, p.shape.N]
    op = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter

    def call() -> Result:
        given = A, B, scales.A, scales.B, "sum", 0, 0, name, shape
        return None, op(*given, out_dtype=OUT_DTYPE, use_fast_accum=True)

    return call


def _scatter_agmm(strict: bool) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        _, scales = _of(p)
        given = p.operands.A, p.operands.B, scales.A, scales.B, p.group
        op = agmm.scaled_matmul_reduce_scatter
        return lambda: (None, op(*given, use_fast_accum=True, strict=strict))

    return prepare


def by_plan(p: Workload, plan: Plan, *, return_A: bool) -> Callable[[], Result]:
    """A call that is carried out as a plan says, with fast accumulation where the scales leave the
    choice; ready to be made."""
    _, scales = _of(p)
    B, group = p.operands.B, p.group

    of_weight: tuple[Any, ...] = [B], [scales.B], [None], [None], [OUT_DTYPE], [True]
    weight = Fp8Weights(*of_weight)

    def gathered() -> Result:
        settings = GatherSettings(return_A=return_A, strict=True, plan=plan)
        shard = p.operands.A_shard
        A, _, outs = serve(Fp8Gather(shard, scales.A_shard, weight, group, settings))
        return A, outs[0]

    def scattered() -> Result:
        settings = ScatterSettings(strict=True, plan=plan)
        of_a = [p.operands.A], [B], [scales.A], [scales.B]
        products = ScaledProducts(*of_a, None, None, OUT_DTYPE, fast_accum=True)
        return None, serve(Fp8Scatter(products, group, settings))

    return scattered if p.op == MATMUL_REDUCE_SCATTER else gathered


_PREPARED: dict[str, dict[str, Callable[[Workload], Callable[[], Result]]]] = {
    ALL_GATHER_MATMUL: {
        ROOF: _roof,
        "unfused": _unfused,
        "torch-decomposed-A": _torch_fused,
        "agmm": _agmm(False),
        "agmm-A": _agmm(True),
    },
    MATMUL_REDUCE_SCATTER: {
        ROOF: _roof,
        "unfused": _scatter_unfused,
        "torch-fused": _torch_fused_scatter,
        "agmm": _scatter_agmm(False),
        "agmm-fused": _scatter_agmm(True),
    },
}


def _of_op(op: str) -> dict[str, Way]:
    """The ways without scales of the op that exist with scales too, in graphs as well."""
    found = {}
    for name, way in ways.ways_of(op).items():
        plain = name.removesuffix("-graph")
        prepare = _PREPARED[op].get(plain)
        if prepare is not None:
            made = prepare if plain == name else as_graph(prepare)
            found[name] = Way(name, way.title, made, way.on_cpu, way.is_agmm, way.host_time)
    return found


_WAYS = {op: _of_op(op) for op in _PREPARED} | {MOE: SCALED_MOE_WAYS}


def ways_of(op: str, scaling: str | None) -> dict[str, Way]:
    """Every way of an op by name, with scales of a kind or without."""
    return ways.ways_of(op) if scaling is None else _WAYS[op]
