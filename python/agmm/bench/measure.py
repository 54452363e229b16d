"""The work of each rank for one shape: prepare the ways, check them, time those that are right."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agmm._installation import one_line
from agmm.bench import steps
from agmm.bench.exchange import of_all_ranks
from agmm.bench.options import Options
from agmm.bench.references import make_problem, references
from agmm.bench.scaled_ways import ways_of
from agmm.bench.timer import HostTime, host_time, time_ways
from agmm.bench.way import ROOF, Result, Workload
from agmm.planning.shapes import AnyShape
from agmm.runtime import devices, links
from agmm.testing.reference import poison, relative_error


@dataclass
class WayResult:
    """The outcome of one way on one shape. `reason` says why it has no time; times in µs."""

    median_us: float | None = None
    tflops: float | None = None
    ratio_to_roof: float | None = None
    relative_error: float | None = None
    wrong: bool = False
    reason: str | None = None
    host_time_us: float | None = None
    host_time_after_drain_us: float | None = None
    host_times_us_by_rank: list[float] = field(default_factory=list)
    samples_us: list[float] = field(default_factory=list)


_writer: steps.Writer | None = None
"""The writer of this rank's steps, where somebody watches them."""


def _begin_step(what: int) -> None:
    if _writer is not None:
        _writer.at(what)


def measure_watched(
    folder: str, shape: AnyShape, options: Options, *, watched_as: int | None = None
) -> dict[str, Any]:
    """Does what `measure` does, and writes its steps. These are the ways, by their places in
    `options.ways`; `folder` is that of the `steps.Watch`, who knows this rank by that number, by
    default its rank."""
    global _writer
    _writer = steps.Writer(Path(folder), dist.get_rank() if watched_as is None else watched_as)
    try:
        return measure(shape, options)
    finally:
        _writer = None


def measure(shape: AnyShape, options: Options) -> dict[str, Any]:
    """Checks and times the ways on one shape. Every rank of the default group calls this.

    `options` are resolved ones. Returns the same on every rank: the shape, the ways' `WayResult`s
    as dicts, and the SM clock after the samples in MHz where it can be read.
    """
    group = dist.group.WORLD
    assert group is not None
    assert options.ways is not None
    assert options.dtype is not None
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    problem = make_problem(
        options.op,
        shape,
        group,
        device,
        dtype=options.dtype,
        seed=options.seed,
        scaling=options.scaling,
    )
    results, calls = _prepare_and_check(problem, options.ways, options.seed)
    timed = time_ways(
        {name: _as_step(options.ways.index(name), call) for name, call in calls.items()},
        group=group,
        samples=options.samples,
        warmup=options.warmup,
        spin_us=options.spin_us,
        device=device,
    )
    clock = devices.sm_clock_mhz(links.uuid(device.index)) if device.type == "cuda" else None
    for name, samples in timed.items():
        result = results[name]
        result.samples_us = [round(s, 3) for s in samples]
        result.median_us = statistics.median(samples)
        flops = shape.flops(group.size())
        result.tflops = flops / result.median_us / 1e6 if flops else None
    if device.type == "cuda":
        for name in calls:
            if ways_of(options.op, options.scaling)[name].host_time:
                _begin_step(options.ways.index(name))
                mine = host_time(calls[name], device=device)
                by_rank = [HostTime(*each) for each in of_all_ranks("host times", mine, group)]
                result = results[name]
                result.host_times_us_by_rank = [each.us for each in by_rank]
                result.host_time_us = statistics.median(result.host_times_us_by_rank)
                result.host_time_after_drain_us = statistics.median(
                    each.after_drain_us for each in by_rank
                )
    roof = results[ROOF].median_us
    if roof is not None:
        for result in results.values():
            if result.median_us is not None:
                result.ratio_to_roof = result.median_us / roof
    del calls, problem
    release_memory(device)
    return {
        **shape._asdict(),
        "sm_clock_mhz": clock,
        "ways": {name: asdict(result) for name, result in results.items()},
    }


def _as_step(what: int, call: Callable[[], Result]) -> Callable[[], Result]:
    def step() -> Result:
        _begin_step(what)
        return call()

    return step


def _prepare_and_check(
    problem: Workload, names: Sequence[str], seed: int
) -> tuple[dict[str, WayResult], dict[str, Callable[[], Result]]]:
    """Prepares each way, checks it, and keeps those that are right on every rank."""
    wanted = references(problem, seed)
    results: dict[str, WayResult] = {}
    calls: dict[str, Callable[[], Result]] = {}
    allowed = 0.0
    for what, name in enumerate(names):
        _begin_step(what)
        result, call = check_way(
            ways_of(problem.op, problem.scaling)[name].prepare, problem, wanted.of(name)
        )
        if name == ROOF and result.relative_error is not None:
            allowed = wanted.allowed(result.relative_error)
        judge(result, allowed)
        results[name] = result
        if result.reason is None and call is not None:
            calls[name] = call
        del call
    del wanted
    release_memory(problem.device)
    return results, calls


def try_way(
    prepare: Callable[[Workload], Callable[[], Result]], problem: Workload
) -> tuple[WayResult, Callable[[], Result] | None]:
    """Prepares a way and makes one call, whose result nobody looks at. Collective.

    Returns the ranks' common result, without a time, and the call where every rank has one.
    """
    call: Callable[[], Result] | None = None
    reason = None
    try:
        call = prepare(problem)
        _call_and_poison(call, problem)
    except Exception as e:
        reason = one_line(e)
    # The ranks agree before the next call, in which the others would wait for a rank that has
    # failed.
    result = _agree(problem.group, 0.0, None, reason)
    return result, call if result.reason is None else None


def check_way(
    prepare: Callable[[Workload], Callable[[], Result]], problem: Workload, reference: torch.Tensor
) -> tuple[WayResult, Callable[[], Result] | None]:
    """Prepares a way and compares it with the reference on every rank. Collective.

    Returns the ranks' common result, without a time, and the call where this rank has one.
    """
    result, call = try_way(prepare, problem)
    if call is None:
        return result, None
    error, wrong, reason = None, None, None
    try:
        error, wrong = _check(call, problem, reference)
    except Exception as e:
        reason = one_line(e)
    return _agree(problem.group, error, wrong, reason), call


def judge(result: WayResult, allowed: float) -> None:
    """Marks a result as wrong where its relative error is above `allowed` or is not a number."""
    error = result.relative_error
    if error is None or result.wrong:
        return
    if not math.isfinite(error):
        result.wrong, result.relative_error = True, None
        result.reason = "a NaN or an infinity in the result"
    elif error > allowed:
        result.wrong = True
        result.reason = f"relative error {error:.3g}, allowed {allowed:.3g}"


def _call_and_poison(call: Callable[[], Result], problem: Workload) -> None:
    """Makes one call, then writes NaN to the memory that the next one is about to write."""
    A, out = call()
    _synchronize(problem.device)
    for tensor in (A, out):
        if tensor is not None and tensor.data_ptr() != problem.operands.A_shard.data_ptr():
            poison(tensor)


def _check(
    call: Callable[[], Result], problem: Workload, reference: torch.Tensor
) -> tuple[float, str | None]:
    """Makes one call and returns its relative error."""
    A, out = call()
    _synchronize(problem.device)
    wrong = None
    if A is not None and not _is_same(A, problem.operands.A):
        wrong = "the returned A is not the gathered A"
    return relative_error(out, reference), wrong


def _is_same(A: torch.Tensor, wanted: torch.Tensor) -> bool:
    if wanted.element_size() == 1:  # fp8, which torch does not compare
        A, wanted = A.view(torch.uint8), wanted.view(torch.uint8)
    return torch.equal(A, wanted)


def _agree(
    group: dist.ProcessGroup, error: float | None, wrong: str | None, reason: str | None
) -> WayResult:
    """Makes one result of the ranks' own: the worst error, or the first rank's reason."""
    everyone = of_all_ranks("what came of a way", (error, wrong, reason), group)
    for rank, (_, _, failed) in enumerate(everyone):
        if failed is not None:
            return WayResult(reason=f"rank {rank}: {failed}")
    worst = max(e for e, _, _ in everyone if e is not None)
    for rank, (_, differs, _) in enumerate(everyone):
        if differs is not None:
            return WayResult(relative_error=worst, wrong=True, reason=f"rank {rank}: {differs}")
    return WayResult(relative_error=worst)


def release_memory(device: torch.device) -> None:
    """Gives back what nothing refers to any more, CUDA graphs' pools included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
