"""Ways of `agmm bench` that hang or end a rank on purpose; as a program, `agmm bench` with them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from agmm.bench import measure
from agmm.bench.options import Options
from agmm.bench.way import Result, Workload
from agmm.bench.ways import SCATTER_WAYS, WAYS
from agmm.planning.shapes import Shape

SICK_SHAPE = Shape(12, 8, 24)
CHECKS = 2
"""Calls of a way before it is timed."""


def _sick(fail: Callable[[], Any], *, after: int) -> Callable[[Workload], Callable[[], Result]]:
    """The unfused way, which fails on the last rank and on `SICK_SHAPE` after some calls."""

    def prepare(p: Workload) -> Callable[[], Result]:
        call = WAYS["unfused"].prepare(p)
        calls = 0

        def sick() -> Result:
            nonlocal calls
            calls += 1
            is_last = dist.get_rank() == dist.get_world_size() - 1
            if p.shape == SICK_SHAPE and is_last and calls > after:
                fail()
            return call()

        return sick

    return prepare


def _hang() -> None:
    threading.Event().wait()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


SICK_WAYS = {
    "hangs-at-once": _sick(_hang, after=0),
    "hangs-when-timed": _sick(_hang, after=CHECKS + 1),
    "ends-at-once": _sick(_end, after=0),
    "ends-when-timed": _sick(_end, after=CHECKS + 1),
}


def _lacks_a_rank(p: Workload) -> Callable[[], Result]:
    """A scatter to which the last rank brings nothing."""
    A = p.operands.A if dist.get_rank() < dist.get_world_size() - 1 else p.operands.A.new_zeros(())
    A = A.expand(p.operands.A.shape).clone()
    return SCATTER_WAYS["agmm"].prepare(replace(p, operands=replace(p.operands, A=A)))


def _sums_in_bf16(p: Workload) -> Callable[[], Result]:
    call = SCATTER_WAYS["agmm"].prepare(p)

    def rounded() -> Result:
        _, out = call()
        return None, out.bfloat16().to(out.dtype)

    return rounded


WRONG_SCATTERS: dict[str, Callable[[Workload], Callable[[], Result]]] = {
    "lacks-a-rank": _lacks_a_rank,
    "sums-in-bf16": _sums_in_bf16,
}


def add_sick_ways() -> None:
    for name, prepare in WRONG_SCATTERS.items():
        wrong = replace(SCATTER_WAYS["agmm"], name=name, title=name, prepare=prepare)
        SCATTER_WAYS[name] = wrong
    for name, prepare in SICK_WAYS.items():
        way = replace(WAYS["unfused"], name=name, title=name, prepare=prepare)
        WAYS[name] = way


def measure_watched(folder: str, shape: Shape, options: Options) -> dict[str, Any]:
    """Runs `measure.measure_watched` in a rank that has the sick ways too."""
    add_sick_ways()
    return measure.measure_watched(folder, shape, options)


if __name__ == "__main__":
    from agmm.__main__ import main

    add_sick_ways()
    main()
