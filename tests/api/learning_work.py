"""What the tests of `agmm.learn_plans` run inside CPU ranks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import packed_work
import rank_groups
import torch
import torch.distributed as dist

import agmm
from agmm.ops import kept
from agmm.testing import clocks

K, N = 24, 16
CALLS = 40
"""More calls than any kind needs until its ranks have agreed."""


@contextmanager
def learning(folder: str = "", *, on: bool = True) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that learns, with the user's tables in a folder."""
    before = {name: os.environ.get(name) for name in ("AGMM_CACHE", "AGMM_CACHE_DIR")}
    os.environ.update(AGMM_CACHE="on" if folder else "off", AGMM_CACHE_DIR=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups of other tests go on as they were
        agmm.learn_plans(on)
    try:
        yield rank_groups.fresh_group()
        dist.barrier()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agmm.learn_plans(False)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gather_of(group: dist.ProcessGroup, rows: int, **settings: Any) -> Callable[[], None]:
    """A call of `all_gather_matmul`, which checks its result."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    A = torch.arange(rows * world_size * K, dtype=torch.float32).view(-1, K) % 7
    B = torch.arange(K * N, dtype=torch.float32).view(K, N) % 5
    shard = A[rank * rows : (rank + 1) * rows].clone()

    def call() -> None:
        torch.testing.assert_close(agmm.all_gather_matmul(shard, B, group, **settings), A @ B)

    return call


def packed_of(group: dist.ProcessGroup, rows: int) -> Callable[[], None]:
    """A call of `all_gather_matmul` with a weight of 4 bits, whose plans are those of another
    matmul."""
    weight, _ = packed_work.weight(16, 64, 32, seed=0, bias=False)
    shard = torch.ones(rows, 64)

    def call() -> None:
        assert len(agmm.all_gather_matmul(shard, weight, group)) == rows * group.size()

    return call


def scatter_of(group: dist.ProcessGroup, rows: int, k: int = K) -> Callable[[], None]:
    """A call of `matmul_reduce_scatter`, which checks its result."""
    world_size = dist.get_world_size(group)
    A, B = torch.ones(rows * world_size, k), torch.ones(k, N)
    total = torch.tensor([k])
    dist.all_reduce(total, group=group)

    def call() -> None:
        out = agmm.matmul_reduce_scatter(A, B, group)
        torch.testing.assert_close(out, torch.full((rows, N), float(total)))

    return call


def all_reduce_of(group: dist.ProcessGroup, rows: int) -> Callable[[], None]:
    """A call of `matmul_all_reduce`, of which CPU ranks have one plan."""

    def call() -> None:
        agmm.matmul_all_reduce(torch.ones(rows, K), torch.ones(K, N), group)

    return call


def scaled_of(group: dist.ProcessGroup, rows: int) -> Callable[[], None]:
    """A call of `all_gather_scaled_matmul`."""
    A = torch.ones(rows, 32).to(torch.float8_e4m3fn)
    B = torch.ones(N, 32).to(torch.float8_e4m3fn).t()

    def call() -> None:
        out = agmm.all_gather_scaled_matmul(A, B, torch.ones(rows, 1), torch.ones(1, N), group)
        assert out.float().eq(32.0).all()

    return call


def of_status(m: int) -> list[Any]:
    """What was learnt last of calls with so many rows."""
    found = [one for one in agmm.status().learnt if one.m == m]
    return [(one.op, one.tried, one.calls, one.kept, one.us, one.model_us) for one in found][-1:]


def ends_with(times: list[dict[str, float]], op: str, rows: int, folder: str = "") -> Any:
    """What ranks learn that are fed these times, each its own, and which plans they took."""
    with learning(folder) as group:
        rank = dist.get_rank(group)
        call = {"gather": gather_of, "scatter": scatter_of, "scaled": scaled_of}[op](group, rows)
        with clocks.fed(lambda plan: times[rank].get(plan, 100.0)) as tried:
            for _ in range(CALLS):
                call()
        return of_status(rows * dist.get_world_size()), tried


def kept_when(rows: int) -> list[int]:
    """How many calls are kept after each call of a kind that is learnt."""
    with learning() as group:
        call = gather_of(group, rows)
        counts = []
        for _ in range(CALLS):
            call()
            counts.append(len(kept.kept_calls.get(group, {})))
        return counts


def late(rows: int, plan: str) -> Any:
    """What ranks learn of which the last comes late to some calls, also to the agreement."""
    with learning() as group:
        call = gather_of(group, rows)
        is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
        with clocks.fed(lambda name: 10.0 if name == plan else 20.0):
            for i in range(CALLS):
                if is_last and i % 5 == 2:
                    time.sleep(0.02)
                call()
        return of_status(rows * dist.get_world_size())


def raising(rows: int, plan: str) -> Any:
    """What ranks learn of which one makes calls in between that are refused, and makes them again
    as they should be."""
    with learning() as group:
        call = gather_of(group, rows)
        refused = 0
        with clocks.fed(lambda name: 10.0 if name == plan else 20.0) as tried:
            for i in range(CALLS):
                if dist.get_rank(group) == 0 and i % 7 == 3:
                    try:
                        agmm.all_gather_matmul(torch.ones(rows, K), torch.ones(K + 1, N), group)
                    except agmm.InvalidArgument:
                        refused += 1
                call()
        return of_status(rows * dist.get_world_size()), tried, refused


class _Broken(Exception):
    pass


def raising_within(rows: int) -> Any:
    """What ranks learn of which one raises what its clock raises, before a call has begun, and
    makes the call again."""
    with learning() as group:
        call = gather_of(group, rows)

        def time_of(_: str) -> float:
            return 10.0

        with clocks.fed(time_of) as tried:
            for i in range(CALLS):
                if dist.get_rank(group) == 0 and i in (2, 8):  # whose plans are not unfused
                    B = torch.ones(K, N)
                    with clocks.fed(time_of), _out_of_memory():
                        try:
                            agmm.all_gather_matmul(torch.ones(rows, K), B, group)
                        except _Broken:
                            pass
                        else:
                            raise AssertionError("it did not raise")
                call()
        return of_status(rows * dist.get_world_size()), tried


@contextmanager
def _out_of_memory() -> Iterator[None]:
    from unittest import mock

    from agmm.runtime import cpu

    with mock.patch.object(cpu.CpuWorkspace, "all_gather_matmul", side_effect=_Broken):
        yield


def _time_of(best: str, plan: str) -> float:
    return 10.0 if plan == best else 20.0


def two_groups(rows: int, plans: tuple[str, str]) -> Any:
    """What two groups learn of one kind, each of its own calls, which alternate unevenly."""
    found = []
    with learning() as first:
        second = dist.new_group(list(range(dist.get_world_size())))
        assert second is not None
        calls = [gather_of(group, rows) for group in (first, second)]
        time_of = [partial(_time_of, plan) for plan in plans]
        for i in range(2 * CALLS):
            for which, call in enumerate(calls):
                if which == 0 or i % 2:
                    with clocks.fed(time_of[which]):
                        call()
        found = [one.kept for one in agmm.status().learnt if one.m == rows * dist.get_world_size()][
            -2:
        ]
        dist.destroy_process_group(second)
    return found


def ends_early(rows: int) -> Any:
    """What is told of a group that ends before it has learnt, and what the next one learns."""
    with learning() as group:
        call = gather_of(group, rows)
        for _ in range(3):
            call()
        before = of_status(rows * dist.get_world_size())
        call = gather_of(rank_groups.fresh_group(), rows)
        for _ in range(CALLS):
            call()
    return before, of_status(rows * dist.get_world_size())


def compiled(rows: int, backend: str) -> Any:
    """How many eager calls were counted, beside calls of a compiled graph, which only rank 0 makes
    anew: it compiles twice."""
    with learning() as group:
        call = gather_of(group, rows)
        shard, B = torch.ones(rows, K), torch.ones(K, N)

        def function(x: torch.Tensor) -> torch.Tensor:
            return agmm.all_gather_matmul(x, B, group) + 1

        with clocks.fed(lambda name: 10.0 if name == "unfused" else 20.0) as tried:
            torch.compiler.reset()
            graph = torch.compile(function, backend=backend, fullgraph=True)
            for _ in range(6):
                assert graph(shard).eq(K + 1).all()
            in_graphs = len(tried)
            for i in range(CALLS):
                if i % 3 == 0:
                    graph(shard)
                call()
            graph(shard)
        torch.compiler.reset()
        return in_graphs, of_status(rows * dist.get_world_size()), tried


def differing(rows: int) -> str:
    """The error of a call in a group of which rank 0 learns alone."""
    with learning(on=dist.get_rank() == 0) as group:
        try:
            gather_of(group, rows)()
        except agmm.AgmmError as error:
            return str(error)
    return "none"


def with_own_k(rows: int) -> Any:
    """What ranks learn whose K differs, each after its own turn."""
    with learning() as group:
        rank = dist.get_rank(group)
        calls = [scatter_of(group, rows, 8 + 8 * rank), scatter_of(group, rows, 8)]
        for i in range(2 * CALLS):
            calls[i % 2]()
        learnt = [one for one in agmm.status().learnt if one.m == rows * dist.get_world_size()]
        return learnt[-1].kept, learnt[-1].reason


def not_learnt(rows: int) -> Any:
    """What is told of calls that have one plan, or name theirs."""
    with learning() as group:
        for call in (
            all_reduce_of(group, rows),
            gather_of(group, rows, strict=True),
            gather_of(group, rows, config="unfused"),
            packed_of(group, rows),
        ):
            for _ in range(4):
                call()
        return [one for one in agmm.status().learnt if one.m == rows * dist.get_world_size()]


def takes(rows: int, folder: str) -> Any:
    """The chunks that calls of a kind have from the first on, by a table in a folder."""
    from unittest import mock

    from agmm.runtime import cpu

    with learning(folder) as group:
        made = cpu.CpuWorkspace.all_gather_matmul
        chunks = []

        def noted(*given: Any, **named: Any) -> Any:
            chunks.append(named["chunks_per_shard"])
            return made(*given, **named)

        call = gather_of(group, rows)
        with mock.patch.object(cpu.CpuWorkspace, "all_gather_matmul", noted):
            for _ in range(6):
                call()
        return chunks, of_status(rows * dist.get_world_size())


def off(rows: int, folder: str) -> Any:
    """What calls leave behind without learning: plans that were timed, what is told, files."""
    with learning(folder, on=False) as group:
        call = gather_of(group, rows)
        with clocks.fed(lambda _: 10.0) as tried:
            for _ in range(CALLS):
                call()
        kinds = len(kept.kept_calls[group])
        return tried, of_status(rows * dist.get_world_size()), os.listdir(folder), kinds
