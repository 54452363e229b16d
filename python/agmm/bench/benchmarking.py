"""The benchmark harness: times agmm beside the ways it replaces, in one run, by one timing rule.

`run` starts the ranks (or uses those of torchrun), checks every way against the reference, times
those that are right, and returns a report that `render` prints and `write_json` stores. A way that
fails or is wrong on any rank is left out on all of them, and the report says why.

Traps, and what is done about each (the timing itself is in `agmm.testing.timer`):

- Clocks: seconds of load take an H200 to its power limit and from 1980 to about 1600 MHz, and a
  warm card ranks kernels differently. Warm-up samples are dropped, the ways are interleaved in an
  order drawn anew for each sample, and times are compared within one run only.
- Launches: a spin of 400 µs on the GPU hides them. A way that takes the host longer, or waits for
  the GPU on the host, shows it in its time; what the host pays has a column ("host µs"): the
  median over the ranks, since a rank that shares its core with another process says nothing of the
  op; the report has every rank's.
- L2: a buffer larger than L2 is written before each sample, so no way finds its operands there.
- Ranks: a tiny all-reduce aligns them after the spin, whose length in time depends on the clock of
  each GPU (before it, they were found 25 µs apart), and a sample is the maximum over them; the
  mean would hide that one waits for another.
- First calls load kernels, allocate and exchange handles. The check and the warm-up come before.
- Speed of wrong results: each way is checked against a float64 reference before it is timed. Its
  output is filled with NaN before that, so that what an earlier call left cannot pass.
- Single slow samples: the median is reported, all samples are stored.
- Data: normal random numbers, since the power drawn, and so the clock, depends on the values. B is
  a transposed weight, as in a layer.
- Ways that hang: each call is a step that the process outside sees (`agmm.bench.steps`). A way in
  which no step ends within a limit, or in which a rank dies, is left out and named; its ranks are
  ended, and the other ways of the shape are measured in new ones. Ranks of torchrun cannot be
  started anew: what is measured is kept, and the job ends.
- Other processes on the machine: nothing here sees them. Where `agmm bench --compare` finds that
  the roof changed too, suspect them, or the clocks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agmm
from agmm.bench import steps
from agmm.cli.doctor import machine_facts
from agmm.cli.terminal import plain_table, print_table, size
from agmm.errors import InvalidArgument
from agmm.testing.cases import BENCH_SHAPES, CPU_BENCH_SHAPES, Operands, Shape, make_operands
from agmm.testing.reference import allowed_error, gathered_product, poison, relative_error
from agmm.testing.timer import (
    FLUSH_BYTES,
    SAMPLES,
    SPIN_US,
    WARMUP,
    host_time,
    of_all_ranks,
    time_ways,
)

if TYPE_CHECKING:
    from agmm.testing.ranks import RankError, RankPool

DEFAULT_WORLD_SIZE = 4
RECORDED_VARIABLES = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Beside all AGMM_* variables, those that change what is measured."""

LIMIT_S = 120.0
"""So long may one call of a way take."""
STUCK_EXIT_CODE = 124
"""Of ranks that torchrun has started, after a way that hangs."""

_SHAPE_TIMEOUT_S = 300.0
_LATER_S = 10.0
"""So much later than rank 0, which writes the report, torchrun's other ranks end."""
_MIB = 2**20

Result = tuple[torch.Tensor | None, torch.Tensor]
"""The gathered A, where the way returns it, and the product."""


@dataclass
class Problem:
    """One rank's view of one shape."""

    shape: Shape
    group: dist.ProcessGroup
    device: torch.device
    operands: Operands

    @property
    def group_name(self) -> Any:
        return self.group.group_name


@dataclass(frozen=True)
class Way:
    """One way to compute the gathered product.

    `prepare` builds whatever the way may keep between calls and returns the call that is timed.
    """

    name: str
    title: str
    prepare: Callable[[Problem], Callable[[], Result]]
    on_cpu: bool = False
    is_agmm: bool = False
    host_time: bool = False


def _roof(p: Problem) -> Callable[[], Result]:
    out = torch.empty(p.shape.M, p.shape.N, dtype=p.operands.A.dtype, device=p.device)
    A, B = p.operands.A, p.operands.B

    def call() -> Result:
        return None, torch.mm(A, B, out=out)

    return call


def _unfused(p: Problem) -> Callable[[], Result]:
    A = torch.empty_like(p.operands.A)
    out = torch.empty(p.shape.M, p.shape.N, dtype=A.dtype, device=p.device)
    A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
    # The same function: torch 2.13 renamed it.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def call() -> Result:
        all_gather(A, A_shard, group=group)
        return A, torch.mm(A, B, out=out)

    return call


def _torch_decomposed(return_A: bool) -> Callable[[Problem], Callable[[], Result]]:
    def prepare(p: Problem) -> Callable[[], Result]:
        import torch.distributed._symmetric_memory

        # The same op takes torch's native path where this variable is set.
        os.environ.pop("TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP", None)
        A_shard, Bs, name = p.operands.A_shard, [p.operands.B], p.group_name

        def call() -> Result:
            A, outs = torch.ops.symm_mem.fused_all_gather_matmul(
                A_shard, Bs, gather_dim=0, group_name=name, return_A=return_A
            )
            return A, outs[0]

        return call

    return prepare


# With torch 2.11 the process aborted when such a tensor was freed after a run; why is not known.
_native_shards: list[torch.Tensor] = []


def _torch_native(p: Problem) -> Callable[[], Result]:
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory

    M_local, K = p.operands.A_shard.shape
    if M_local % 128 or p.shape.M % 256:
        raise InvalidArgument(
            f"M_local: found {M_local}, wanted a multiple of 128 (and M one of 256): torch's "
            "native op can hang on other sizes"
        )
    A_shard = _SymmetricMemory.empty_strided_p2p(
        (M_local, K), (K, 1), p.operands.A_shard.dtype, p.device
    )
    _native_shards.append(A_shard)
    A_shard.copy_(p.operands.A_shard)
    symm_mem.rendezvous(A_shard, p.group_name)
    B, name = p.operands.B, p.group_name
    op = symm_mem._fused_all_gather_matmul_native

    def call() -> Result:
        A, out = op(A_shard, B, name)
        return A, out

    return call


def _agmm(return_A: bool) -> Callable[[Problem], Callable[[], Result]]:
    def prepare(p: Problem) -> Callable[[], Result]:
        A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
        op = agmm.all_gather_matmul

        def with_A() -> Result:
            A, out = op(A_shard, B, group, return_A=True)
            return A, out

        def without_A() -> Result:
            return None, op(A_shard, B, group)

        return with_A if return_A else without_A

    return prepare


def _as_graph(
    prepare: Callable[[Problem], Callable[[], Result]],
) -> Callable[[Problem], Callable[[], Result]]:
    def prepare_graph(p: Problem) -> Callable[[], Result]:
        call = prepare(p)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread may touch CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = call()

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    return prepare_graph


def _ways() -> dict[str, Way]:
    ways = [
        Way("roof", "matmul alone (roof)", _roof, on_cpu=True),
        Way("unfused", "all-gather, then matmul", _unfused, on_cpu=True),
        Way("unfused-graph", "all-gather, then matmul, graph", _as_graph(_unfused)),
        Way("torch-decomposed", "torch decomposed", _torch_decomposed(False)),
        Way(
            "torch-decomposed-graph",
            "torch decomposed, graph",
            _as_graph(_torch_decomposed(False)),
        ),
        Way("torch-decomposed-A", "torch decomposed, returns A", _torch_decomposed(True)),
        Way(
            "torch-decomposed-A-graph",
            "torch decomposed, returns A, graph",
            _as_graph(_torch_decomposed(True)),
        ),
        Way("torch-native", "torch native, returns A", _torch_native),
        Way("torch-native-graph", "torch native, returns A, graph", _as_graph(_torch_native)),
        Way("agmm", "agmm", _agmm(False), on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", _as_graph(_agmm(False)), is_agmm=True),
        Way("agmm-A", "agmm, returns A", _agmm(True), on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-A-graph", "agmm, returns A, graph", _as_graph(_agmm(True)), is_agmm=True),
    ]
    return {way.name: way for way in ways}


WAYS = _ways()
"""Every way by name. All-gather is NCCL's on GPUs and gloo's on the CPU; the matmul is torch.mm."""


def select_ways(names: Iterable[str] | None, device_type: str) -> list[str]:
    """The ways to run on 'cuda' or 'cpu': those named, or all that exist there; always the roof.

    Raises InvalidArgument that names an unknown way and the nearest known one.
    """
    there = [way.name for way in WAYS.values() if device_type == "cuda" or way.on_cpu]
    if names is None:
        return there
    chosen = ["roof"]
    for name in names:
        if name not in WAYS:
            close = get_close_matches(name, WAYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgument(f"way: found {name!r}, wanted one of {', '.join(WAYS)}{hint}")
        if name not in there:
            raise InvalidArgument(
                f"way: found {name!r}, which needs GPUs, wanted one of {', '.join(there)}"
            )
        if name not in chosen:
            chosen.append(name)
    return chosen


@dataclass(frozen=True)
class Options:
    """What to run. `shapes` and `ways` None: all of the device's defaults; spin in µs."""

    device: str = "cuda"
    world_size: int = DEFAULT_WORLD_SIZE
    shapes: Sequence[Shape] | None = None
    ways: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    samples: int = SAMPLES
    warmup: int = WARMUP
    spin_us: float = SPIN_US
    seed: int = 0
    limit_s: float = LIMIT_S
    """So long may one call of a way take; then its ranks are ended, and it has no time."""

    def resolved(self) -> Options:
        """The same with every default filled in. Raises InvalidArgument for what cannot run."""
        shapes = self.shapes
        if shapes is None:
            shapes = BENCH_SHAPES if self.device == "cuda" else CPU_BENCH_SHAPES
        for shape in shapes:
            if shape.M % self.world_size:
                raise InvalidArgument(
                    f"shape: found {shape}, wanted an M that is a multiple of the world size, "
                    f"{self.world_size}"
                )
        dtype = self.dtype
        if dtype is None:
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        ways = tuple(select_ways(self.ways, self.device))
        if self.device == "cpu":
            check_memory(shapes, dtype, self.world_size)
        return replace(self, shapes=tuple(shapes), ways=ways, dtype=dtype)


def check_memory(shapes: Sequence[Shape], dtype: torch.dtype, world_size: int) -> None:
    """Raises InvalidArgument where the operands and the product of the CPU ranks, all on this host,
    do not fit into what is free: Linux would end a process rather than refuse."""
    free = _free_memory()
    for shape in shapes:
        elements = shape.M * shape.K + shape.N * shape.K + shape.M * shape.N
        needed = world_size * elements * dtype.itemsize
        if free is not None and needed > free:
            raise InvalidArgument(
                f"shape: found {shape}, of which {world_size} ranks need {size(needed)}, wanted "
                f"at most {size(free)}, the memory that is free here"
            )


def _free_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


@dataclass
class WayResult:
    """What came of one way on one shape. `reason` says why it has no time; times in µs."""

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
"""Of this rank, where somebody watches it."""


def _begin_step(what: int) -> None:
    if _writer is not None:
        _writer.at(what)


def measure_watched(folder: str, shape: Shape, options: Options) -> dict[str, Any]:
    """As `measure`. The steps are the ways, by their places in `options.ways`; `folder` is that of
    the `steps.Watch`."""
    global _writer
    _writer = steps.Writer(Path(folder), dist.get_rank())
    try:
        return measure(shape, options)
    finally:
        _writer = None


def measure(shape: Shape, options: Options) -> dict[str, Any]:
    """Checks and times the ways on one shape. Every rank of the default group calls this.

    `options` are resolved ones. Returns the same on every rank: the shape, the ways' `WayResult`s
    as dicts, and the SM clock after the samples in MHz where it can be read.
    """
    group = dist.group.WORLD
    assert group is not None
    assert options.ways is not None
    assert options.dtype is not None
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu")
    )
    operands = make_operands(
        shape, rank, world_size, dtype=options.dtype, device=device, seed=options.seed
    )
    problem = Problem(shape, group, device, operands)
    results, calls = _prepare_and_check(problem, options.ways)
    timed = time_ways(
        {name: _as_step(options.ways.index(name), call) for name, call in calls.items()},
        group=group,
        samples=options.samples,
        warmup=options.warmup,
        spin_us=options.spin_us,
        device=device,
    )
    clock = _sm_clock_mhz(device)
    for name, samples in timed.items():
        result = results[name]
        result.samples_us = [round(s, 3) for s in samples]
        result.median_us = statistics.median(samples)
        result.tflops = shape.flops / result.median_us / 1e6
    if device.type == "cuda":
        for name in calls:
            if WAYS[name].host_time:
                _begin_step(options.ways.index(name))
                mine = torch.tensor(host_time(calls[name], device=device), dtype=torch.float64)
                by_rank = of_all_ranks(mine, group, device)
                middle = by_rank.quantile(0.5, dim=0)
                results[name].host_time_us, results[name].host_time_after_drain_us = middle.tolist()
                results[name].host_times_us_by_rank = by_rank[:, 0].tolist()
    roof = results["roof"].median_us
    if roof is not None:
        for result in results.values():
            if result.median_us is not None:
                result.ratio_to_roof = result.median_us / roof
    del calls, problem, operands
    release_memory(device)
    return {
        "M": shape.M,
        "N": shape.N,
        "K": shape.K,
        "sm_clock_mhz": clock,
        "ways": {name: asdict(result) for name, result in results.items()},
    }


def _as_step(what: int, call: Callable[[], Result]) -> Callable[[], Result]:
    def step() -> Result:
        _begin_step(what)
        return call()

    return step


def _prepare_and_check(
    problem: Problem, names: Sequence[str]
) -> tuple[dict[str, WayResult], dict[str, Callable[[], Result]]]:
    """Prepares each way, checks it, and keeps those that are right on every rank."""
    reference = gathered_product(problem.operands.A, problem.operands.B)
    results: dict[str, WayResult] = {}
    calls: dict[str, Callable[[], Result]] = {}
    allowed = 0.0
    for what, name in enumerate(names):
        _begin_step(what)
        result, call = check_way(WAYS[name].prepare, problem, reference)
        if name == "roof" and result.relative_error is not None:
            allowed = allowed_error(result.relative_error)
        judge(result, allowed)
        results[name] = result
        if result.reason is None and call is not None:
            calls[name] = call
        del call
    del reference
    release_memory(problem.device)
    return results, calls


def check_way(
    prepare: Callable[[Problem], Callable[[], Result]], problem: Problem, reference: torch.Tensor
) -> tuple[WayResult, Callable[[], Result] | None]:
    """Prepares a way and compares it with the reference on every rank. Collective.

    Returns the ranks' common result, without a time, and the call where this rank has one.
    """
    call: Callable[[], Result] | None = None
    error, wrong, reason = None, None, None
    try:
        call = prepare(problem)
        _call_and_poison(call, problem)
    except Exception as e:
        reason = _one_line(e)
    # Before the next call, in which the others would wait for a rank that has failed.
    result = _agree(problem.group, 0.0, None, reason)
    if call is None or result.reason is not None:
        return result, None
    try:
        error, wrong = _check(call, problem, reference)
    except Exception as e:
        reason = _one_line(e)
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


def _call_and_poison(call: Callable[[], Result], problem: Problem) -> None:
    """One call, then NaN in the memory that the next one is about to write."""
    A, out = call()
    _synchronize(problem.device)
    for tensor in (A, out):
        if tensor is not None and tensor.data_ptr() != problem.operands.A_shard.data_ptr():
            poison(tensor)


def _check(
    call: Callable[[], Result], problem: Problem, reference: torch.Tensor
) -> tuple[float, str | None]:
    """One call's relative error."""
    A, out = call()
    _synchronize(problem.device)
    wrong = None
    if A is not None and not torch.equal(A, problem.operands.A):
        wrong = "the returned A is not the gathered A"
    return relative_error(out, reference), wrong


def _agree(
    group: dist.ProcessGroup, error: float | None, wrong: str | None, reason: str | None
) -> WayResult:
    """Makes one result of the ranks' own: the worst error, or the first rank's reason."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (error, wrong, reason), group=group)
    for rank, (_, _, failed) in enumerate(everyone):
        if failed is not None:
            return WayResult(reason=f"rank {rank}: {failed}")
    worst = max(e for e, _, _ in everyone)
    for rank, (_, differs, _) in enumerate(everyone):
        if differs is not None:
            return WayResult(relative_error=worst, wrong=True, reason=f"rank {rank}: {differs}")
    return WayResult(relative_error=worst)


def _one_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:300]}" if lines else type(e).__name__


def release_memory(device: torch.device) -> None:
    """Gives back what nothing refers to any more, CUDA graphs' pools included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sm_clock_mhz(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # needs nvidia-ml-py, which is optional
        return None


def run(
    options: Options,
    progress: Callable[[str], None] = lambda line: None,
    begun: Callable[[dict[str, Any]], None] = lambda report: None,
    lost: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs the benchmark and returns the report. `begun` gets it at first, without a shape; a shape
    is in there when it has been measured.

    Under torchrun the ranks are its own and every one of them returns the report. Where a way hangs
    there, rank 0 calls `lost` in a thread of its own, and all processes end with STUCK_EXIT_CODE.
    Otherwise this process starts `options.world_size` ranks.
    Raises InvalidArgument for options that cannot run.
    """
    torchrun_size = torchrun_world_size()
    if torchrun_size is not None:
        options = replace(options, world_size=torchrun_size)
    options = options.resolved()
    if options.device == "cuda" and torch.cuda.device_count() < options.world_size:
        raise InvalidArgument(
            f"world size: found {options.world_size}, wanted at most {torch.cuda.device_count()}, "
            "the number of GPUs here (--device cpu needs none)"
        )
    assert options.shapes is not None
    assert options.ways is not None
    with _Ranks(options, lost) as watched:
        report = new_report(options)
        begun(report)
        for i, shape in enumerate(options.shapes, 1):
            progress(f"[{i}/{len(options.shapes)}] {shape}: {len(options.ways)} ways")
            report["shapes"].append(_measure_in(watched, shape, options, progress))
    return report


def _measure_in(
    watched: _Ranks, shape: Shape, options: Options, progress: Callable[[str], None]
) -> dict[str, Any]:
    """One shape. Ways that break the ranks are left out, one after the other."""
    assert options.ways is not None
    left_out: dict[str, str] = {}

    def leave_out(names: Iterable[str], reason: str) -> None:
        for name in names:
            left_out[name] = reason
            progress(f"{shape}: left out {name}: {reason}")

    while True:
        names = tuple(name for name in options.ways if name not in left_out)
        if "roof" in left_out:  # all others are compared with it
            leave_out(names, "the matmul alone did not run")
        if "roof" in left_out or not names:
            report = _unmeasured(shape)
            break
        try:
            report = watched.measure(shape, replace(options, ways=names))
            break
        except _WayFailed as failure:
            leave_out(names if failure.way is None else [failure.way], failure.reason)
            watched.restart()
    failed = {name: asdict(WayResult(reason=reason)) for name, reason in left_out.items()}
    found = {**report["ways"], **failed}
    return {**report, "ways": {name: found[name] for name in options.ways}}


def _unmeasured(shape: Shape) -> dict[str, Any]:
    return {"M": shape.M, "N": shape.N, "K": shape.K, "sm_clock_mhz": None, "ways": {}}


class _WayFailed(Exception):
    """The ranks are lost; `way` is the one they were in, None before the first."""

    def __init__(self, way: str | None, reason: str) -> None:
        super().__init__(reason)
        self.way = way
        self.reason = reason


class _Ranks:
    """Ranks that measure, torchrun's or its own, each of whose steps has a limit."""

    def __init__(self, options: Options, lost: Callable[[], None]) -> None:
        self._options = options
        self._lost = lost
        self._stack = contextlib.ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="agmm-bench-"))

    def __enter__(self) -> _Ranks:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._stack.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        options = self._options
        self._pool = self._stack.enter_context(_ranks(options.device, options.world_size))

    def restart(self) -> None:
        """Ends the ranks and starts new ones."""
        self._stack.close()
        self._start()

    def measure(self, shape: Shape, options: Options) -> dict[str, Any]:
        """`measure` in every rank. Raises _WayFailed where the ranks are lost by it."""
        world_size = options.world_size if self._pool is not None else 1
        watch = steps.Watch(self._folder, world_size, options.limit_s, _SHAPE_TIMEOUT_S)
        if self._pool is None:
            return self._measure_here(watch, shape, options)
        from agmm.testing.ranks import RankError

        self._pool.submit(measure_watched, str(self._folder), shape, options)
        try:
            results: list[dict[str, Any]] = self._pool.collect(watch.is_stuck)
        except RankError as error:
            behind, what = watch.behind(sorted(error.exit_codes) or error.ranks)
            reason = _cause(error, behind, options.limit_s)
            raise _WayFailed(_way(options, what), reason) from None
        return results[0]

    def _measure_here(self, watch: steps.Watch, shape: Shape, options: Options) -> dict[str, Any]:
        global _writer
        rank = dist.get_rank()

        def give_up() -> None:
            way = _way(options, watch.behind()[1]) or "before the first way"
            said = f"did not come back within {options.limit_s:g} s"
            print(f"agmm: rank {rank}: {shape}: {way} {said}", file=sys.stderr, flush=True)
            if rank:
                time.sleep(_LATER_S)
            else:
                self._lost()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(STUCK_EXIT_CODE)

        _writer = steps.Writer(self._folder, 0)
        end = watch.call_if_stuck(give_up)
        try:
            return measure(shape, options)
        finally:
            end()
            _writer = None


def _way(options: Options, what: int) -> str | None:
    assert options.ways is not None
    return None if what == steps.BEGINNING else options.ways[what]


def _cause(error: RankError, behind: Sequence[int], limit_s: float) -> str:
    """What became of the ranks that are furthest behind, in a line."""
    rank = behind[0]
    code = error.exit_codes.get(rank)
    of_rank = str(error).partition(f"rank {rank}: ")[2].partition("\nrank ")[0]
    lines = [line for line in of_rank.splitlines() if line.strip()]
    if code is not None:
        last = f": {lines[-1]}" if len(lines) > 1 else ""
        return f"rank {rank} ended in it with exit code {code}{last}"
    if not lines or lines[0].startswith("did not answer"):
        which = f"rank{'s' if len(behind) > 1 else ''} {', '.join(map(str, behind))}"
        return f"{which} did not come back from it within {limit_s:g} s"
    return f"rank {rank}: {lines[-1]}"


def torchrun_world_size() -> int | None:
    """The world size where torchrun started this process as one of its ranks, else None."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    return int(os.environ["WORLD_SIZE"])


def world_size_or(given: int | None) -> int | None:
    """torchrun's world size where there is one, else the given one.

    Raises:
        InvalidArgument: both are there and differ.
    """
    started = torchrun_world_size()
    if started is not None and given not in (None, started):
        raise InvalidArgument(
            f"world size: found {given}, wanted {started}, the ranks that torchrun has started"
        )
    return given if started is None else started


def is_rank_0() -> bool:
    """Whether this process should print: the only one, or rank 0 of torchrun's."""
    return torchrun_world_size() is None or os.environ["RANK"] == "0"


@contextlib.contextmanager
def _ranks(device_type: str, world_size: int) -> Iterator[RankPool | None]:
    """A pool of ranks; None under torchrun, where this process is one of them and has its group."""
    if torchrun_world_size() is not None:
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
        try:
            yield None
        finally:
            dist.destroy_process_group()
        return
    from agmm.testing.ranks import RankPool

    with RankPool(world_size, device=device_type, timeout_s=_SHAPE_TIMEOUT_S) as pool:
        yield pool


@contextlib.contextmanager
def ranks(device_type: str, world_size: int) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls another one with its arguments in every rank, of torchrun's or
    started for it, and returns what it returned in rank 0 (under torchrun: in this rank)."""
    with _ranks(device_type, world_size) as pool:
        if pool is None:
            yield lambda fn, *args: fn(*args)
        else:
            yield lambda fn, *args: pool.run(fn, *args)[0]


def new_report(options: Options) -> dict[str, Any]:
    """A report without shapes: machine, versions, commit, date and settings."""
    return {
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine_facts(),
        "settings": {
            "device": options.device,
            "world_size": options.world_size,
            "dtype": str(options.dtype).removeprefix("torch."),
            "samples": options.samples,
            "warmup": options.warmup,
            "spin_us": options.spin_us if options.device == "cuda" else None,
            "flush_mib": FLUSH_BYTES // _MIB if options.device == "cuda" else None,
            "limit_s": options.limit_s,
            "statistic": "median of the samples, each the maximum over the ranks",
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("AGMM_") or name in RECORDED_VARIABLES
            },
        },
        "shapes": [],
    }


def commit() -> str | None:
    """$AGMM_COMMIT, or the commit of the working directory ('+' after it: with changes), if that is
    a checkout of agmm."""
    given = os.environ.get("AGMM_COMMIT")
    if given:
        return given
    try:
        _git("ls-files", "--error-unmatch", ":/python/agmm/__init__.py")
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def write_json(report: dict[str, Any], path: Path) -> None:
    """Writes the report, every sample included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False, default=str) + "\n")


@dataclass(frozen=True)
class Summary:
    """One shape's outcome in a line. Times in µs; None where there is no such time."""

    shape: Shape
    roof: float | None
    best_other: str | None
    best_other_us: float | None
    agmm: float | None
    agmm_graph: float | None
    agmm_ratio: float | None
    speedup: float | None


def summarize(shape_report: dict[str, Any]) -> Summary:
    """agmm beside the roof and the fastest of the ways that are neither."""
    ways = shape_report["ways"]
    times = {name: w["median_us"] for name, w in ways.items() if w["median_us"] is not None}
    ours_too = {name for name in times if name in WAYS and WAYS[name].is_agmm}
    others = {n: t for n, t in times.items() if n != "roof" and n not in ours_too}
    best = min(others, key=lambda n: others[n]) if others else None
    ours, roof = times.get("agmm"), times.get("roof")
    return Summary(
        shape=Shape(shape_report["M"], shape_report["N"], shape_report["K"]),
        roof=roof,
        best_other=best,
        best_other_us=others[best] if best else None,
        agmm=ours,
        agmm_graph=times.get("agmm-graph"),
        agmm_ratio=ours / roof if ours and roof else None,
        speedup=others[best] / ours if best and ours else None,
    )


def wrong_ways(report: dict[str, Any]) -> list[str]:
    """'way at shape' for every result that failed its check."""
    return [
        f"{name} at {Shape(s['M'], s['N'], s['K'])}"
        for s in report["shapes"]
        for name, way in s["ways"].items()
        if way["wrong"]
    ]


def failed_ways(report: dict[str, Any]) -> list[str]:
    """'way at shape' for every way of agmm that did not run."""
    return [
        f"{name} at {Shape(s['M'], s['N'], s['K'])}"
        for s in report["shapes"]
        for name, way in s["ways"].items()
        if name in WAYS and WAYS[name].is_agmm and way["median_us"] is None and not way["wrong"]
    ]


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a table per shape and the summary of them all."""
    machine, settings = report["machine"], report["settings"]
    console.print(
        f"{settings['world_size']} ranks on {machine['device_name']}, {settings['dtype']}; "
        f"torch {machine['torch']}, CUDA {machine['cuda'] or '-'}, NCCL {machine['nccl'] or '-'}, "
        f"driver {machine['driver'] or '-'}, agmm {machine['agmm']}, commit {report['commit']}",
        highlight=False,
    )
    console.print(
        f"median of {settings['samples']} interleaved samples, each the maximum over the ranks",
        highlight=False,
    )
    for shape_report in report["shapes"]:
        print_table(console, shape_table(shape_report))
    print_table(console, summary_table(report))


def shape_table(shape_report: dict[str, Any]) -> Table:
    """One shape's ways: µs, TFLOPS per rank, ratio to the roof, relative error."""
    shape = Shape(shape_report["M"], shape_report["N"], shape_report["K"])
    table = plain_table(f"M x N x K = {shape.M} x {shape.N} x {shape.K}")
    table.add_column("way", overflow="fold")
    headings = ["µs", "TFLOPS/rank", "÷ roof", "error"]
    with_host = any(w["host_time_us"] is not None for w in shape_report["ways"].values())
    if with_host:
        headings.append("host µs")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for name, w in shape_report["ways"].items():
        table.add_row(
            WAYS[name].title if name in WAYS else name,
            "WRONG" if w["wrong"] else _number(w["median_us"], ".1f"),
            _number(w["tflops"], ".4g"),
            _number(w["ratio_to_roof"], ".3f"),
            _number(w["relative_error"], ".2e"),
            *([_number(w["host_time_us"], ".1f")] if with_host else []),
            escape(w["reason"] or ""),
        )
    return table


def summary_table(report: dict[str, Any]) -> Table:
    """One row per shape: roof, best other way, agmm eager and as a graph."""
    table = plain_table("summary (µs)")
    table.add_column("shape", no_wrap=True)
    for heading in ("roof", "best other"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("(way)", no_wrap=True)
    for heading in ("agmm", "agmm graph", "agmm ÷ roof", "best other ÷ agmm", "host µs"):
        table.add_column(heading, justify="right")
    for shape_report in report["shapes"]:
        s = summarize(shape_report)
        host = shape_report["ways"].get("agmm", {}).get("host_time_us")
        table.add_row(
            str(s.shape),
            _number(s.roof, ".1f"),
            _number(s.best_other_us, ".1f"),
            s.best_other or "-",
            _number(s.agmm, ".1f"),
            _number(s.agmm_graph, ".1f"),
            _number(s.agmm_ratio, ".3f"),
            _number(s.speedup, ".3f"),
            _number(host, ".1f"),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
