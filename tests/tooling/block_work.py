"""What the tests of the block's benchmark run inside the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import block

SIZES = block.Sizes(hidden=64, ffn=48, heads=4, kv_heads=2)


def _broken(p: block.Problem, which: str) -> block.Prepared:
    if dist.get_rank() == 1:
        raise RuntimeError("no such kernel\nand more")
    return block.WAYS["agmm"].prepare(p, which)


def _wrong(p: block.Problem, which: str) -> block.Prepared:
    prepared = block.WAYS["agmm"].prepare(p, which)

    def call() -> block.Tensors:
        *others, last = prepared.call()
        return *others, last * 1.01

    return block.Prepared(call)


def _stale(p: block.Problem, which: str) -> block.Prepared:
    results = block.WAYS["agmm"].prepare(p, which).call()
    return block.Prepared(lambda: results)


def checks() -> dict[str, dict[str, Any]]:
    """What the check finds of a right way and of three that are not, and whether it has a call."""
    settings = block.Settings("cpu", SIZES, (), 1, True, False, 0.0)
    p = block.make_problem(4 * dist.get_world_size(), settings)
    ways: dict[str, Callable[[block.Problem, str], block.Prepared]]
    ways = {"right": block.WAYS["agmm"].prepare, "broken": _broken, "wrong": _wrong}
    found = {}
    for name, prepare in {**ways, "stale": _stale}.items():
        result, call = block.prepare_and_check(p, block.Way(name, name, prepare), block.STEP)
        found[name] = asdict(result) | {"has_call": call is not None}
    torch.compiler.reset()
    return found
