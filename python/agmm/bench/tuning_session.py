"""The work of each rank for `agmm tune`: one shape's operands, plans checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import agmm
from agmm import _core
from agmm.bench import options as bench_options
from agmm.bench import scaled_ways
from agmm.bench.measure import check_way, judge, release_memory, try_way
from agmm.bench.references import make_problem, references
from agmm.bench.timer import SPIN_US, WARMUP, time_ways
from agmm.bench.way import ROOF, Result, Workload
from agmm.errors import InvalidArgument
from agmm.ops.pipeline import serve
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.plain_scatter import PlainScatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning import built_kernels, call_plans
from agmm.planning.legality import why_unfused
from agmm.planning.plans import UNFUSED, Plan
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
)
from agmm.planning.shapes import Shape
from agmm.runtime import cuda_scaled
from agmm.runtime import scaling as scalings
from agmm.runtime.workspaces import cpu_workspace

COARSE_SAMPLES = 5
ROUND_SAMPLES = 10
MAX_ROUNDS = 5
"""Choices: the samples and rounds that tell plans apart that differ by 1 to 2% in under a minute a
shape."""


class Pace(NamedTuple):
    """How thoroughly the plans of a shape are measured."""

    coarse_samples: int = COARSE_SAMPLES
    round_samples: int = ROUND_SAMPLES
    max_rounds: int = MAX_ROUNDS
    warmup: int = WARMUP
    spin_us: float = SPIN_US
    checks: bool = True
    """Whether each plan is compared with a reference before it is timed."""
    limit_s: float = math.inf
    """The time after which a shape gets no further plans and no further rounds."""


THOROUGH = Pace()


@dataclass(frozen=True)
class TuningOptions:
    """What to tune, on "cuda" or "cpu"; ``shapes`` are gathered and divisible by the ranks."""

    device: str
    world_size: int
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    return_A: bool = False
    row_major: bool = False
    again: bool = False
    """Whether to measure shapes anew that this version of agmm has tuned before."""
    op: str = ALL_GATHER_MATMUL
    scaling: str | None = None
    """The kind of scales of fp8 operands."""
    pace: Pace = THOROUGH

    @classmethod
    def of(
        cls,
        device: str,
        world_size: int,
        shapes: Sequence[Shape],
        dtype: torch.dtype | None = None,
        op: str = ALL_GATHER_MATMUL,
        scaling: str | None = None,
        pace: Pace = THOROUGH,
        **others: bool,
    ) -> TuningOptions:
        """Return these options with the defaults of dtype and scaling filled in. Raises
        InvalidArgument for what cannot be tuned."""
        if op != ALL_GATHER_MATMUL and others.get("return_A"):
            raise InvalidArgument(f"return_A: found True with {op}, wanted False")
        if op == MATMUL_ALL_REDUCE:
            shapes = _of_sums(shapes, device, world_size, dtype)
        given = bench_options.Options(
            device, world_size, tuple(shapes), dtype=dtype, scaling=scaling
        ).resolved()
        assert given.dtype is not None
        options = cls(
            device,
            world_size,
            tuple(shapes),
            given.dtype,
            op=op,
            scaling=given.scaling,
            pace=pace,
            **others,
        )
        if given.scaling is not None and options.row_major:
            raise InvalidArgument(
                f"b_layout: found row with {given.dtype}, wanted column, which fp8 kernels read"
            )
        if given.scaling is not None and device == "cpu" and op == MATMUL_REDUCE_SCATTER:
            raise InvalidArgument(
                f"dtype: found {given.dtype} with {op} on CPU ranks, which has one plan only"
            )
        for shape in shapes:
            if given.scaling is None:
                reason = why_unfused(options.dtype_name, shape.N, shape.K)
            else:
                reason = f"N={shape.N} is no multiple of 8" if shape.N % _core.ALIGNMENT else None
            if device == "cuda" and reason is not None:
                raise InvalidArgument(f"shape: found {shape}, which cannot be fused: {reason}")
        return options

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def problem(self, shape: Shape, device: torch.device) -> Problem:
        name = self.dtype_name
        if self.scaling is not None and device.type == "cuda":
            dtype = cuda_scaled.dtype_name(self.dtype, self.dtype)
            kind = scalings.BY_NAME[self.scaling]
            accumulation = cuda_scaled.accumulation_of_tiles(kind.a, kind.b, fast=True)
            assert accumulation is not None  # all kinds have one
            name = built_kernels.format_served(self.op, dtype, accumulation.name)
        problem = call_plans.problem_of(
            (shape.M, shape.N, shape.K),
            name,
            device,
            op=self.op,
            return_A=self.return_A,
            column_major=not self.row_major,
        )
        return replace(problem, world_size=self.world_size)


def _of_sums(
    shapes: Sequence[Shape], device: str, world_size: int, dtype: torch.dtype | None
) -> list[Shape]:
    """The shapes of a matmul + all-reduce as its calls are planned: with as many rows as the ranks
    can share. Raises InvalidArgument for what has one plan only, or none that is measured."""
    if device == "cpu":
        raise InvalidArgument(
            f"device: found cpu with {MATMUL_ALL_REDUCE}, which has one plan on CPU ranks, wanted "
            "cuda"
        )
    if dtype is not None and dtype.itemsize == 1:
        raise InvalidArgument(
            f"dtype: found {dtype} with {MATMUL_ALL_REDUCE}, wanted bf16 or fp16: its plans of fp8 "
            "are not measured"
        )
    filled = [shape._replace(M=shape.M + -shape.M % world_size) for shape in shapes]
    return list(dict.fromkeys(filled))


# --- inside the ranks ---


class _Session:
    """The operands of one shape and its checked calls, in one rank."""

    def __init__(self, shape: Shape, options: TuningOptions) -> None:
        group = dist.group.WORLD
        assert group is not None
        device = _device(options.device)
        self.problem = make_problem(
            options.op, shape, group, device, dtype=options.dtype, scaling=options.scaling
        )
        if options.row_major:
            self.problem.operands.B = self.problem.operands.B.contiguous()
        self.return_A = options.return_A
        self.pace = options.pace
        self.reference: torch.Tensor | None = None
        """The result that plans are compared with; None where they are not."""
        self.allowed = math.inf
        roof = scaled_ways.ways_of(options.op, options.scaling)[ROOF]
        if not self.pace.checks:
            self.calls: dict[str, Callable[[], Any]] = {ROOF: roof.prepare(self.problem)}
            return
        wanted = references(self.problem)
        self.reference = wanted.others
        result, call = check_way(roof.prepare, self.problem, wanted.roof)
        if call is None or result.relative_error is None:
            raise RuntimeError(f"the matmul alone failed: {result.reason}")
        self.allowed = wanted.allowed(result.relative_error)
        self.calls = {ROOF: call}

    def prepare(self, plan: Plan) -> Callable[[Workload], Callable[[], Any]]:
        return_A = self.return_A
        if self.problem.scaling is not None:
            return lambda p: scaled_ways.by_plan(p, plan, return_A=return_A)
        if self.problem.op == MATMUL_REDUCE_SCATTER:
            return lambda p: _scatter(p, plan)
        if self.problem.op == MATMUL_ALL_REDUCE:
            return lambda p: _all_reduce(p, plan)

        def prepare(p: Workload) -> Callable[[], Result]:
            A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
            if p.device.type == "cpu" and plan != UNFUSED:
                workspace = cpu_workspace(group)
                chunks = plan.chunks_per_shard

                def on_cpu() -> Result:
                    A, outs = workspace.all_gather_matmul(
                        A_shard, [B], [None], return_A=return_A, chunks_per_shard=chunks
                    )
                    return A, outs[0]

                return on_cpu
            kernel = plan.kernel
            transport = plan.transport.name
            config = transport if kernel is None else f"{kernel.name}/{transport}"

            def by_op() -> Result:
                op: Any = agmm.all_gather_matmul
                strict = plan != UNFUSED
                found = op(A_shard, B, group, return_A=return_A, config=config, strict=strict)
                return found if return_A else (None, found)

            return by_op

        return prepare


def _scatter(p: Workload, plan: Plan) -> Callable[[], Result]:
    A, B, group = p.operands.A, p.operands.B, p.group

    def call() -> Result:
        settings = ScatterSettings(plan=plan)
        return None, serve(PlainScatter([A], [B], None, group, settings))

    return call


def _all_reduce(p: Workload, plan: Plan) -> Callable[[], Result]:
    A, B, group = p.operands.A, p.operands.B, p.group

    def call() -> Result:
        return None, serve(PlainAllReduce(A, B, None, group, False, plan=plan))

    return call


_session: _Session | None = None


def _device(kind: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(CPU)
    )


def _current() -> _Session:
    assert _session is not None
    return _session


def first_problem(options: TuningOptions) -> Problem:
    """The problem of the first shape, on the GPU that the ranks' plans are made for. It is called
    in every rank."""
    device = _device(options.device)
    problem = options.problem(options.shapes[0], device)
    return replace(problem, gpu=call_plans.gpu_of(dist.group.WORLD, device))


def begin(shape: Shape, options: TuningOptions) -> None:
    """Makes the operands and the reference. It is called in every rank, like all functions that
    follow."""
    global _session
    _session = None
    if options.pace.checks:  # whose references take much of it
        release_memory(_device(options.device))
    _session = _Session(shape, options)


class Verdict(NamedTuple):
    """The reason why a plan may not be timed, or None; ``broken``: a rank raised, so that what it
    left behind may spoil other plans."""

    reason: str | None
    broken: bool = False


def check(plan: Plan) -> Verdict:
    """Compares a plan with the reference; `measure` can time it afterwards if it is right."""
    session = _current()
    prepare = session.prepare(plan)
    if session.reference is None:
        result, call = try_way(prepare, session.problem)
    else:
        result, call = check_way(prepare, session.problem, session.reference)
        judge(result, session.allowed)
    if result.reason is None:
        assert call is not None
        session.calls[plan.name] = call
    return Verdict(result.reason, broken=result.reason is not None and not result.wrong)


def measure(names: Sequence[str], samples: int) -> dict[str, list[float]]:
    """Return interleaved samples in µs of the plans that `check` found right, by name, and of the
    roof."""
    session = _current()
    calls = {name: session.calls[name] for name in (*names, ROOF)}
    group, device = session.problem.group, session.problem.device
    pace = session.pace
    return time_ways(
        calls,
        group=group,
        samples=samples,
        warmup=pace.warmup,
        spin_us=pace.spin_us,
        device=device,
    )
