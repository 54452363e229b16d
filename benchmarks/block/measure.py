"""What each rank does at one token count: prepare the ways, check them, time the right ones."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from agmm._installation import one_line
from agmm.bench.exchange import of_all_ranks
from agmm.bench.measure import release_memory
from agmm.bench.timer import time_ways
from agmm.nn._held import local_values
from agmm.testing.reference import poison, relative_error
from benchmarks.block.problem import Call, Prepared, Problem, Settings, Tensors, make_problem
from benchmarks.block.ways import WAYS, Way, peak_memory

WARMUP = 2
SPIN_US = 2000.0
"""Longer than the timer's: a block is some hundred launches."""
_MIB = 2**20


@dataclass
class Result:
    """What came of one pass of one way. `reason` says why it has no time."""

    median_us: float | None = None
    relative_error: float | None = None
    worst_tensor: str | None = None
    wrong: bool = False
    reason: str | None = None
    note: str = ""
    peak_mib: float | None = None
    prepare_s: float = 0.0
    samples_us: list[float] = field(default_factory=list)


def _agree(p: Problem, mine: Any) -> list[Any]:
    """The ranks' values, by rank."""
    return of_all_ranks("what came of a pass", mine, p.group)


def _first_failure(p: Problem, reason: str | None) -> str | None:
    """The first failure, which is the same on every rank, so that all of them go on without the
    way."""
    for rank, failed in enumerate(_agree(p, reason)):
        if failed is not None:
            return f"rank {rank}: {failed}"
    return None


def _errors(p: Problem, results: Tensors) -> dict[str, float]:
    """Relative errors by name. Collective: the norms' gradients are those of this rank's rows."""
    found = dict(zip(p.wanted, results, strict=False))
    errors = {}
    for name, tensor in found.items():
        tensor = local_values(tensor)
        if "norm" in name:
            tensor = tensor.to(p.wanted[name].dtype, copy=True)
            dist.all_reduce(tensor, group=p.group)
        errors[name] = relative_error(tensor, p.wanted[name])
    return errors


def prepare_and_check(p: Problem, way: Way, which: str) -> tuple[Result, Call | None]:
    """Builds one pass of a way and compares it with the reference on every rank. Collective.

    Returns the ranks' common result, without a time, and the call where all ranks have a right one.
    """
    began = time.perf_counter()
    prepared: Prepared | None = None
    reason, peak, errors = None, None, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared = way.prepare(p, which)
        except Exception as error:
            reason = one_line(error)
        # Before the next call, in which the others would wait for a rank that has failed.
        reason = _first_failure(p, reason)
        if prepared is not None and reason is None:
            try:
                for tensor in prepared.call():
                    poison(tensor)
            except Exception as error:
                reason = one_line(error)
            reason = _first_failure(p, reason)
        if prepared is None or reason is not None:
            return Result(reason=reason, prepare_s=time.perf_counter() - began), None
        try:
            with peak_memory(p.device) as measured:
                results = prepared.call()
            peak = measured[0] if prepared.peak_bytes is None else prepared.peak_bytes
        except Exception as error:
            reason = one_line(error)
        reason = _first_failure(p, reason)
        if reason is None:
            errors = _errors(p, results)
            del results
    prepare_s, peak_mib = time.perf_counter() - began, None if peak is None else peak / _MIB
    notes = {prepared.note, *(str(w.message) for w in caught if "agmm" in str(w.message))}
    result = Result(reason=reason, note="; ".join(sorted(notes - {""})))
    if reason is not None:
        return replace(result, prepare_s=prepare_s), None
    for rank, (their_errors, their_peak, their_s) in enumerate(
        _agree(p, (errors, peak_mib, prepare_s))
    ):
        result.prepare_s = max(result.prepare_s, their_s)
        if their_peak is not None:
            result.peak_mib = max(result.peak_mib or 0.0, their_peak)
        for name, found in their_errors.items():
            if result.relative_error is None or found > result.relative_error:
                result.relative_error, result.worst_tensor = found, name
            if found > p.allowed[name] and not result.wrong:
                result.wrong = True
                result.reason = (
                    f"{name} on rank {rank}: relative error {found:.3g}, "
                    f"allowed {p.allowed[name]:.3g}"
                )
        if result.relative_error is not None and not math.isfinite(result.relative_error):
            result.relative_error = None  # JSON has no infinity; the reason says it
    return result, None if result.wrong else prepared.call


def measure(tokens: int, settings: Settings) -> dict[str, Any]:
    """Checks and times the ways at one token count. Every rank of the default group calls this and
    gets the same: `entries` of the report, one for each pass, and the seconds of compiling."""
    p = make_problem(tokens, settings)
    # Rank 0's, so that every rank judges by the same limits.
    p.allowed = _agree(p, p.allowed)[0]
    results: dict[str, dict[str, Result]] = {name: {} for name in settings.ways}
    calls: dict[str, dict[str, Call]] = {which: {} for which in settings.passes}
    compile_s = 0.0
    # The graphs last: the others may replace the shared workspace of torch's fused ops, of which a
    # graph would keep the old address.
    for name in sorted(settings.ways, key=lambda name: WAYS[name].is_graph):
        way = WAYS[name]
        for which in settings.passes:
            if way.is_compiled and settings.compile_left_s <= 0:
                results[name][which] = Result(reason="left out: the time to compile is used up")
                continue
            with torch._dynamo.config.patch(recompile_limit=64):
                result, call = prepare_and_check(p, way, which)
            if way.is_compiled:
                compile_s += max(_agree(p, result.prepare_s))
            results[name][which] = result
            if call is not None:
                calls[which][name] = call
            del call
            release_memory(p.device)
    for which in settings.passes:
        ordered = {name: calls[which][name] for name in settings.ways if name in calls[which]}
        timed = time_ways(
            ordered,
            group=p.group,
            samples=settings.samples,
            warmup=WARMUP,
            spin_us=SPIN_US,
            device=p.device,
        )
        for name, samples in timed.items():
            results[name][which].samples_us = [round(s, 3) for s in samples]
            results[name][which].median_us = statistics.median(samples)
        del ordered
        calls[which].clear()
    p.async_tp_calls.clear()
    torch.compiler.reset()
    device = p.device
    del p
    release_memory(device)
    entries = [
        {
            "tokens": tokens,
            "pass": which,
            "ways": {name: asdict(by_pass[which]) for name, by_pass in results.items()},
        }
        for which in settings.passes
    ]
    return {"compile_s": compile_s, "entries": entries}
