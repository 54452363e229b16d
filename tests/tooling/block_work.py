"""What the tests of the block's benchmark run inside the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.block import measure, model, problem, ways

SIZES = model.Sizes(hidden=64, ffn=48, heads=4, kv_heads=2)


def _broken(p: problem.Problem, which: str) -> problem.Prepared:
    if dist.get_rank() == 1:
        raise RuntimeError("no such kernel\nand more")
    return ways.WAYS["agmm"].prepare(p, which)


def _wrong(p: problem.Problem, which: str) -> problem.Prepared:
    prepared = ways.WAYS["agmm"].prepare(p, which)

    def call() -> problem.Tensors:
        *others, last = prepared.call()
        return *others, last * 1.01

    return problem.Prepared(call)


def _stale(p: problem.Problem, which: str) -> problem.Prepared:
    results = ways.WAYS["agmm"].prepare(p, which).call()
    return problem.Prepared(lambda: results)


def checks() -> dict[str, dict[str, Any]]:
    """What the check finds of a right way and of three that are not, and whether it has a call."""
    settings = problem.Settings("cpu", SIZES, (), 1, True, False, 0.0)
    p = problem.make_problem(4 * dist.get_world_size(), settings)
    kinds: dict[str, Callable[[problem.Problem, str], problem.Prepared]]
    kinds = {"right": ways.WAYS["agmm"].prepare, "broken": _broken, "wrong": _wrong}
    found = {}
    for name, prepare in {**kinds, "stale": _stale}.items():
        result, call = measure.prepare_and_check(p, ways.Way(name, name, prepare), problem.STEP)
        found[name] = asdict(result) | {"has_call": call is not None}
    torch.compiler.reset()
    return found
