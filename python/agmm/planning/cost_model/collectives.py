"""The times of agmm's collectives on CUDA by each method, and the method that serves a call. This
is the one place of these numbers.

"one_shot" and "two_shot" send packets, 12 bytes of data and their signal in one store; "blocks"
sends data, then a signal. Each is one kernel. All-gather and reduce-scatter send once. All-reduce
sends everything to all in one shot, or the summands of each rank's shard and then the sums.

Fitted to four H200, but for a segment's signal. NCCL's small all-reduce takes 15 to 25 µs alone;
its times here are those of its gathers and scatters beside a matmul (`Constants`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Literal

from agmm import _core
from agmm.planning import formats
from agmm.planning.cost_model.gather import fused_us
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES, constants, constants_for
from agmm.planning.cost_model.libraries import library_all_gather_us, library_reduce_scatter_us
from agmm.planning.cost_model.matmul import (
    arithmetic_us,
    behind_us,
    is_b_in_l2,
    matmul_memory_us,
    matmul_us,
    roof_us,
    roofline_us,
)
from agmm.planning.cost_model.streaming import Stream
from agmm.planning.problems import CPU, MATMUL_REDUCE_SCATTER, KernelConfig, Problem

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Method = Literal["one_shot", "two_shot", "blocks"]

MOST_BYTES = 16 << 20
"""The most bytes of the tensor that is gathered, scattered or summed; NCCL is taken beyond. An
all-reduce sends as much in one launch: on 4 H100 it takes 0.86 of NCCL's time there, from 20 MiB on
as long."""

MOST_RANKS = _core.MAX_COLLECTIVE_RANKS

KERNEL_US = 5.4
"""The time of a launch right after another one, of its end, and of one trip over the links: 8 KiB
take 4.7 on 2 H100, 5.4 to 5.7 on 4 H200."""
SENT_GB_PER_S = 300.0
"""The rate at which one rank sends to all others. It is the same for every GPU, so that all ranks
choose alike: it was measured on 4 H200 from 64 KiB to 10 MiB, and on 4 H100 before a matmul."""
TRIP_US = 2.0
"""The time of a second step: stores, and the loads that see them. With it all-reduces of 8 KiB to
10 MiB take within 5% of what is predicted on 4 H200."""
SIGNAL_US = 1.5
"""The time of a segment's barrier, release and acquire, in each step. It is an estimate."""
PACKET_SHARE = 12 / 16
"""The share of a packet that is data."""


def methods(kind: Kind) -> tuple[Method, ...]:
    if kind == "all_reduce":
        return "one_shot", "two_shot", "blocks"
    return "one_shot", "blocks"


def collective_us(kind: Kind, method: Method, nbytes: int, world_size: int) -> float:
    """Predicted time of one method in µs.

    Args:
        nbytes: the bytes of the whole tensor, which is gathered, scattered or summed.
    """
    to_all = kind == "all_reduce" and method == "one_shot"
    sent = nbytes if to_all else ceil(nbytes / world_size)  # to each peer in a step
    steps = 2 if kind == "all_reduce" and not to_all else 1
    rate = SENT_GB_PER_S * 1e3
    if method == "blocks":
        kernel_us = KERNEL_US + (steps - 1) * TRIP_US + steps * SIGNAL_US
        return kernel_us + steps * (world_size - 1) * sent / rate
    of_a_launch = PACKET_SHARE * _core.COLLECTIVE_PACKET_BYTES / (2 * world_size)
    kernel_us = ceil(sent / of_a_launch) * (KERNEL_US + (steps - 1) * TRIP_US)
    return kernel_us + steps * (world_size - 1) * sent / PACKET_SHARE / rate


@lru_cache(maxsize=4096)
def collective_method(kind: Kind, nbytes: int, world_size: int) -> Method:
    """The method that is predicted to be the fastest."""
    return min(methods(kind), key=lambda one: collective_us(kind, one, nbytes, world_size))


def by_kernel_us(kind: Kind, nbytes: int, world_size: int) -> float:
    """Predicted time of agmm's collective in µs, by the method that it takes."""
    return collective_us(kind, collective_method(kind, nbytes, world_size), nbytes, world_size)


def is_by_kernel(nbytes: int, world_size: int) -> bool:
    """Whether agmm's kernels are meant to serve a collective on CUDA, rather than NCCL's."""
    return 1 < world_size <= MOST_RANKS and nbytes <= MOST_BYTES


def by_library_us(kind: Kind, nbytes: int, world_size: int, gpu: str) -> float:
    """Predicted time of NCCL's collective in µs. An all-reduce takes the time of a reduce-scatter
    and of an all-gather without its latency."""
    c, moved = constants(gpu), nbytes * (world_size - 1) / world_size
    if kind == "all_gather":
        return library_all_gather_us(c, moved)
    scattered_us = library_reduce_scatter_us(c, moved)
    if kind == "reduce_scatter":
        return scattered_us
    return scattered_us + moved / (c.all_gather_gb_per_s * 1e3)


def fastest_us(kind: Kind, nbytes: int, problem: Problem) -> float:
    """Predicted time in µs of a collective on the problem's ranks, by agmm or NCCL, whichever
    serves it."""
    if is_by_kernel(nbytes, problem.world_size):
        return by_kernel_us(kind, nbytes, problem.world_size)
    return by_library_us(kind, nbytes, problem.world_size, problem.gpu)


def gathered_us(
    problem: Problem, kernel: KernelConfig | None = None, alone_us: float | None = None
) -> float:
    """Predicted time in µs of A with its scales gathered by agmm's kernel, then the matmul: by
    ``kernel``, or by the library, whose time is ``alone_us`` where it is known; of fp8 by a kernel
    that is not named, whose time is taken to be the roof."""
    if kernel is not None:
        return before_kernel_us(problem) + fused_us(behind_gather(problem), kernel)
    gather_us = by_kernel_us("all_gather", gathered_bytes(problem), problem.world_size)
    if formats.of(problem.format).kind == formats.FP8:
        alone_us = roof_us(problem)
    elif alone_us is None:
        alone_us = matmul_us(problem)
    return gather_us + alone_us + behind_us(problem)


def before_kernel_us(problem: Problem) -> float:
    """Predicted time in µs of A gathered by agmm's kernel before another one begins."""
    gather_us = by_kernel_us("all_gather", gathered_bytes(problem), problem.world_size)
    return gather_us + constants_for(problem).call_us


def least_behind_us(problem: Problem) -> float:
    """The least time in µs of a kernel behind a gather, which reaches the rates of the library and
    loses nothing to its tiles."""
    us = roofline_us(arithmetic_us(problem), matmul_memory_us(problem))
    return constants_for(problem).launch_us + us


def behind_gather(problem: Problem) -> Problem:
    """The product of all rows that follows a gather, as that of one rank."""
    return replace(problem, world_size=1, return_A=False)


def streamed_gather_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs of A gathered by agmm's kernel, then the matmul by a streaming kernel
    that starts with it: that of the stream, or of the gather and what is left to read behind it."""
    gather_us = by_kernel_us("all_gather", gathered_bytes(problem), problem.world_size)
    stream_us, left_us = Stream(problem, kernel).us(problem)
    return max(stream_us, gather_us + left_us) + behind_us(problem)


def streamed_scatter_us(problem: Problem, kernel: KernelConfig) -> float:
    """Predicted time in µs of a streaming kernel that sends its sums: of the stream, one trip of
    packets, and the links for what a rank sends."""
    alone = replace(problem, world_size=1)
    stream_us, _ = Stream(alone, kernel).us(alone)
    sent = problem.m * problem.n * ELEMENT_BYTES * (problem.world_size - 1) / problem.world_size
    return stream_us + TRIP_US + sent / PACKET_SHARE / (SENT_GB_PER_S * 1e3)


def why_no_streamed_scatter(problem: Problem) -> str | None:
    """The reason why a streaming kernel cannot send the sums of a matmul + reduce-scatter, or
    None."""
    w, rows = problem.world_size, problem.m
    if not 1 < w <= MOST_RANKS:
        return f"streamed: found {w} ranks, wanted 2 to {MOST_RANKS}"
    if rows % w != 0:
        return f"streamed: found {rows} rows, wanted a multiple of {w} ranks"
    one_shot = _core.CollectiveMethod.one_shot
    if not _core.streams_sum(one_shot, rows, problem.n, 0, w, True):
        return (
            f"streamed: found {rows} rows, of whose sum with {problem.n} columns a slot does not "
            "have room for the packets, wanted fewer"
        )
    return None


def gathered_bytes(problem: Problem) -> int:
    """The size of the gathered A with its scales."""
    return problem.m * formats.of(problem.format).row_bytes(problem.k)


STEADY_GATHER_BYTES = 4e6
"""The most bytes of an all-gather whose time is its latency, which is steady."""

STEADY_SCATTER_BYTES = 2.2e6
"""The most bytes of a sum whose reduce-scatter by NCCL is mostly latency, between two H200. Where
there are more, a fused call takes less than the library, which seldom is much faster."""

_GATHERED_MARGIN = 1.1
"""A gather by agmm's kernel before the library's matmul may take so many times the predicted time
of a fused call. Alone on one H200 the model's favourite took 12 to 14% longer than predicted up to
1024 rows (112 shapes), and the library's matmul what was predicted or less."""
_LARGE_GATHERED_MARGIN = 0.9
"""`_GATHERED_MARGIN` for more than two ranks and more than `STEADY_GATHER_BYTES`: on 4 H100 the
fused call was the faster one of 31 of 32 shapes from 296 to 1024 rows."""

_LARGE_B_GATHERED_MARGIN = 1.0
"""`_LARGE_GATHERED_MARGIN` where B does not fit into the L2 cache, so that a fused call has less to
gain: with it 89 of 111 shapes on 4 H100 are within 5% of the best, with 0.9 there 85."""


_LARGE_FP8_GATHERED_MARGIN = 0.85
"""`_LARGE_GATHERED_MARGIN` for fp8, between 2 ranks too; see `gather.SCALES_US`."""


def gathered_margin(problem: Problem) -> float:
    is_large = gathered_bytes(problem) > STEADY_GATHER_BYTES
    if is_large and formats.of(problem.format).kind == formats.FP8:
        return _LARGE_FP8_GATHERED_MARGIN
    if not is_large or problem.world_size <= 2:
        return _GATHERED_MARGIN
    return _LARGE_GATHERED_MARGIN if is_b_in_l2(problem) else _LARGE_B_GATHERED_MARGIN


def margin_name(problem: Problem, family: str) -> str:
    """The name that ``choice_margins`` has for plans with transports of a family."""
    if family.startswith("gather"):
        is_large = gathered_bytes(problem) > STEADY_GATHER_BYTES
    else:
        scatters = family == "unfused" and problem.op == MATMUL_REDUCE_SCATTER
        is_large = scatters and problem.m * problem.n * ELEMENT_BYTES > STEADY_SCATTER_BYTES
    return f"large {family}" if is_large else family


def choice_margin(problem: Problem, family: str) -> float | None:
    """The factor of ``choice_margins`` for plans with transports of a family; None where none were
    fitted for the op."""
    fitted = constants_for(problem).choice_margins.get(problem.op)
    return None if fitted is None else fitted.get(margin_name(problem, family), 1.0)


def margin_of(problem: Problem, family: str) -> float | None:
    """The factor that ``choice_margins`` has for just these plans, or None."""
    fitted = constants_for(problem).choice_margins.get(problem.op, {})
    return fitted.get(margin_name(problem, family))


def why_not_gathered(problem: Problem) -> str | None:
    """The reason why a call cannot be agmm's all-gather, then the library's matmul, or None."""
    if problem.gpu == CPU:
        return "plan: found gather on the CPU, wanted a GPU"
    nbytes = problem.m * formats.of(problem.format).value_bytes(problem.k)
    if not is_by_kernel(nbytes, problem.world_size):
        return (
            f"plan: found gather of {nbytes} bytes by {problem.world_size} ranks, wanted at most "
            f"{MOST_BYTES} by 2 to {MOST_RANKS}"
        )
    return None


_GRANULE = 1024
"""The bytes to which a threshold is known: it is a whole number of KiB, as it is printed."""


def thresholds(kind: Kind, world_size: int) -> list[tuple[Method, int]]:
    """The methods in the order of sizes, each with the most bytes that it serves, in whole KiB."""

    def method(nbytes: int) -> Method:
        return collective_method(kind, nbytes, world_size)

    found: list[tuple[Method, int]] = []
    below, nbytes = _GRANULE, _GRANULE
    while below < MOST_BYTES:
        below, nbytes = nbytes, min(2 * nbytes, MOST_BYTES)
        one, other = method(below), method(nbytes)
        if one != other:
            most, beyond = below, nbytes
            while beyond - most > _GRANULE:
                middle = (most + beyond) // (2 * _GRANULE) * _GRANULE
                most, beyond = (middle, beyond) if method(middle) == one else (most, middle)
            found.append((one, most))
    return [*found, (method(MOST_BYTES), MOST_BYTES)]
