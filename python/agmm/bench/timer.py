"""The one timing rule: every figure that the project reports is read by these functions.

A sample on CUDA: write a buffer larger than L2; spin for about 400 µs, so that the host's launches
are done before the work begins; align the ranks on the GPU by a tiny all-reduce; event, op, event.
The all-reduce comes after the spin because that is counted in cycles, and the clocks of the GPUs
differ: ranks aligned before it were found 25 µs apart after it. The ways under comparison are
interleaved within one process, in an order drawn anew for every sample, so that clocks and
temperature treat them alike. Without other ranks a sample whose launches took the host longer than
the spin is repeated: it would hold the host's pause. Where it is not repeated, or in vain, the spin
is longer from then on, since the host is a slow one. A sample is the maximum over the ranks; the
figure to report is the median of the samples.

On the CPU a sample is a barrier and `time.perf_counter` around the op.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.bench.exchange import group_or_alone, of_all_ranks

SAMPLES = 20  # of which the median is reported
WARMUP = 3  # both slots of agmm have been used then, and one of them again
SPIN_US = 400.0  # more than the launches of a call take on most hosts
FLUSH_BYTES = 256 * 2**20  # several times the 50 MB of a Hopper's L2

_ATTEMPTS = 3  # at a sample whose launches the spin did not hide
_LONGER = 1.5  # times what the host took is the next spin
_MOST_SPIN_US = 5000.0

_CALIBRATION_CYCLES = 4_000_000  # some 2 ms, beside which the events cost nothing


def pick_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device to time on: the current GPU where there is one, else the CPU.

    A group without NCCL is one of CPU processes and is timed on the CPU.
    """
    group = group_or_alone(group)
    on_gpu = group is None or "nccl" in dist.get_backend_config(group)
    if on_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time_ways(
    ways: Mapping[str, Callable[[], Any]],
    *,
    group: dist.ProcessGroup | None = None,
    samples: int = SAMPLES,
    warmup: int = WARMUP,
    spin_us: float = SPIN_US,
    flush_l2: bool = True,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Times each way `samples` times, interleaved, and returns its samples in µs.

    `ways` maps a name to a callable without arguments that enqueues the work on the current stream
    (CUDA) or does it (CPU); a CUDA graph is a callable that replays. All ranks of `group` must pass
    the same names in the same order. `group` None means the default group, or this process alone
    where torch.distributed is not initialised. `device` None means `pick_device(group)`.

    Raises ValueError when `samples` or `warmup` is out of range.
    """
    if samples < 1:
        raise ValueError(f"samples: found {samples}, wanted at least 1")
    if warmup < 0:
        raise ValueError(f"warmup: found {warmup}, wanted at least 0")
    if not ways:
        return {}
    group = group_or_alone(group)
    device = pick_device(group) if device is None else device
    names = list(ways)
    mine: dict[str, list[float]] = {name: [] for name in names}
    sample: Callable[[Callable[[], Any]], float]
    if device.type == "cuda":
        sample = CudaSampler(group, device, spin_us, flush_l2)
    else:
        sample = _CpuSampler(group)
    for i in range(-warmup, samples):
        order = list(names)
        random.Random(i).shuffle(order)
        for name in order:
            elapsed = sample(ways[name])
            if i >= 0:
                mine[name].append(elapsed)
    by_rank = of_all_ranks("samples", mine, group)
    return {
        name: [max(sample) for sample in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in names
    }


class HostTime(NamedTuple):
    """The host time of one call in µs, medians: of a call that follows another at once, as in a
    model, and of the first call after the GPU was drained, when the host's caches are cold."""

    us: float
    after_drain_us: float


def host_time(
    fn: Callable[[], Any],
    bursts: int = 20,
    *,
    calls_per_burst: int = 24,
    warmup: int = 2,
    device: torch.device | None = None,
) -> HostTime:
    """Measure how long a call of `fn` holds up its caller.

    Calls come in short bursts, not synchronised with the GPU inside; it is drained before every
    burst, so that a full launch queue cannot block a call. A burst has to be long enough that most
    of its calls find the host's caches warm after that wait. On the CPU this is the whole time of
    the call. Where `fn` is a collective, every rank must call this.

    Raises ValueError when `bursts` or `calls_per_burst` is out of range.
    """
    if bursts < 1:
        raise ValueError(f"bursts: found {bursts}, wanted at least 1")
    if calls_per_burst < 2:
        raise ValueError(f"calls_per_burst: found {calls_per_burst}, wanted at least 2")
    device = pick_device() if device is None else device
    first: list[float] = []
    following: list[float] = []
    for i in range(-warmup, bursts):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for j in range(calls_per_burst):
            begin = time.perf_counter_ns()
            result = fn()
            end = time.perf_counter_ns()
            del result
            if i >= 0:
                (following if j else first).append((end - begin) / 1e3)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return HostTime(statistics.median(following), statistics.median(first))


class CudaSampler:
    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, spin_us: float, flush_l2: bool
    ) -> None:
        self._group = group
        self._device = device
        self._spin_us = spin_us
        self._cycles_per_us = cycles_per_us(device.index)
        self._flush = (
            torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if flush_l2 else None
        )
        self._token = torch.ones(1, device=device)

    def __call__(self, fn: Callable[[], Any]) -> float:
        for _ in range(_ATTEMPTS):
            elapsed_us, host_us = self._sample(fn)
            if not self._spin_us or host_us < self._spin_us:
                return elapsed_us
            # With several ranks each would have to know that another repeats the sample.
            if self._group is not None:
                break
        longer_us = min(_LONGER * host_us, _MOST_SPIN_US)
        self._spin_us = max(self._spin_us, longer_us)  # of all ways, which clocks treat alike
        return elapsed_us

    def _sample(self, fn: Callable[[], Any]) -> tuple[float, float]:
        """Return the sample in µs, and how long the host took for what the spin is to hide."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        if self._flush is not None:
            self._flush.zero_()
        host_begin = time.perf_counter_ns()
        if self._spin_us:
            torch.cuda._sleep(round(self._spin_us * self._cycles_per_us))
        if self._group is not None:
            dist.all_reduce(self._token, op=dist.ReduceOp.MAX, group=self._group)
        begin.record()
        result = fn()
        host_us = (time.perf_counter_ns() - host_begin) / 1e3
        end.record()
        torch.cuda.synchronize(self._device)
        del result
        return float(begin.elapsed_time(end)) * 1e3, host_us


class _CpuSampler:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, fn: Callable[[], Any]) -> float:
        if self._group is not None:
            dist.barrier(self._group)
        begin = time.perf_counter_ns()
        result = fn()
        end = time.perf_counter_ns()
        del result
        return (end - begin) / 1e3


@cache
def cycles_per_us(device_index: int | None) -> float:
    with torch.cuda.device(device_index):
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        torch.cuda.synchronize()
        return _CALIBRATION_CYCLES / (float(begin.elapsed_time(end)) * 1e3)
