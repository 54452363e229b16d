"""Provides the ranks of a run: torchrun's, or processes started for the run, on GPUs or the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from agmm.bench.options import DEFAULT_WORLD_SIZE
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

SHAPE_TIMEOUT_S = 300.0
"""The time limit of all that precedes the first way of a shape. Its reference in float64 is what
takes long."""


MOST_CPU_RANKS = 64
"""The most processes that a command starts on the CPU; each takes some 300 MB."""


def choose(device: str, world_size: int | None) -> tuple[str, int]:
    """Return device and world size, from 'auto', 'cuda' or 'cpu' and the world size that is asked
    for: GPUs where there are at least 2.

    Raises InvalidArgument where there are too few GPUs, or too many processes would be started.
    """
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count >= max(2, world_size or 0) else "cpu"
    if device == "cuda":
        if count == 0:
            raise InvalidArgument("device: found cuda, wanted cpu: no GPU is visible here")
        size = min(DEFAULT_WORLD_SIZE, count) if world_size is None else world_size
        if size < 1 or size > count:
            raise InvalidArgument(f"world size: found {size}, wanted 1 to {count}, the GPUs here")
        return device, size
    size = DEFAULT_WORLD_SIZE if world_size is None else world_size
    if size > MOST_CPU_RANKS and torchrun_world_size() is None:
        raise InvalidArgument(
            f"world size: found {size}, wanted at most {MOST_CPU_RANKS} processes on the CPU"
        )
    return device, size


def why_cpu(device: str, world_size: int | None) -> str | None:
    """The remark to print where `choose` takes CPU processes though there are GPUs, else None."""
    count = torch.cuda.device_count()
    if device != "auto" or count == 0 or choose(device, world_size)[0] == "cuda":
        return None
    if world_size is not None and world_size > count:
        return f"{world_size} ranks are more than the {count} GPUs here: on CPU processes"
    return "one GPU is here, and overlap needs 2: on CPU processes"


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
    """Whether this process should print: it is the only one, or rank 0 of torchrun's."""
    return torchrun_world_size() is None or os.environ["RANK"] == "0"


@contextlib.contextmanager
def rank_pool(device_type: str, world_size: int) -> Iterator[RankPool | None]:
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
    with RankPool(world_size, device=device_type, timeout_s=SHAPE_TIMEOUT_S) as pool:
        yield pool


@contextlib.contextmanager
def ranks(device_type: str, world_size: int) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls another one with its arguments in every rank, of torchrun's or
    started for it, and returns what it returned in rank 0 (under torchrun: in this rank)."""
    with rank_pool(device_type, world_size) as pool:
        if pool is None:
            yield lambda fn, *args: fn(*args)
        else:
            yield lambda fn, *args: pool.run(fn, *args)[0]
