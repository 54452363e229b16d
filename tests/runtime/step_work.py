"""What the tests of lock step run inside ranks: late ranks, different calls, threads, little room,
groups that end."""

from __future__ import annotations

import gc
import resource
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import fresh_group

import agmm
from agmm.errors import forget_warnings
from agmm.runtime import groups, workspaces

gather: Callable[..., Any] = agmm.all_gather_matmul


def call(kind: str, rank: int) -> None:
    """One call of that kind, in which ranks may differ."""
    shard, B = torch.ones(4, 6), torch.ones(6, 2)
    if kind == "rows":
        shard = torch.ones(4 + rank, 6)
    elif kind == "K":
        shard, B = torch.ones(4, 6 + rank), torch.ones(6 + rank, 2)
    elif kind == "dtype":
        dtype = (torch.float32, torch.float64)[rank]
        shard, B = shard.to(dtype), B.to(dtype)
    if kind == "op" and rank == 1:
        agmm.matmul_reduce_scatter(shard, B)
    elif kind == "scatter":
        agmm.matmul_reduce_scatter(torch.ones(4 + 2 * rank, 6), B)
    elif kind == "scatter_dim":
        agmm.matmul_reduce_scatter(torch.ones(4, 4, 6), B, scatter_dim=rank)
    elif kind == "pairs":
        agmm.matmul_reduce_scatter([shard, shard], [torch.ones(6, 2 + rank)] * 2)
    elif kind == "reduce_op":
        agmm.matmul_reduce_scatter(shard, B, reduce_op=("sum", "avg")[rank])
    elif kind == "all_reduce":
        agmm.matmul_all_reduce(torch.ones(3 + rank, 6), B)
    elif kind == "sum" and rank == 1:
        agmm.matmul_all_reduce(shard, B)
    elif kind == "sum":
        agmm.matmul_reduce_scatter(shard, B)
    elif kind == "path":
        agmm.all_gather_matmul(shard, B, config=(None, "unfused")[rank])
    elif kind == "backward":
        leaf = shard.requires_grad_()
        out = agmm.all_gather_matmul(leaf, B)
        (out.sum() if rank == 0 else out.sum() * 0 + leaf.sum()).backward()
        if rank == 1:
            agmm.all_gather_matmul(shard.detach(), B, return_A=True)
    else:
        gather(shard, B, return_A=kind == "return_A" and rank == 1)


def differ(kind: str) -> None:
    call("good", 0)
    call(kind, dist.get_rank())


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


_one = torch.ones(1)
_packed = agmm.Packed4BitWeight.pack(
    torch.full((16, 8), 0x99, dtype=torch.uint8), torch.ones(16, 1)
)
OPS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "all_gather_matmul": (
        "all_gather_matmul",
        lambda rows: gather(torch.ones(rows, 16), torch.ones(16, 2)),
    ),
    "unfused": (
        "all_gather_matmul",
        lambda rows: gather(torch.ones(rows, 16), torch.ones(16, 2), config="unfused"),
    ),
    "packed": ("all_gather_matmul", lambda rows: gather(torch.ones(rows, 16), _packed)),
    "quantize": (
        "all_gather_matmul",
        lambda rows: gather(torch.ones(rows, 16), torch.ones(16, 16), quantize="rowwise"),
    ),
    "reduce_amax": (
        "all_gather_matmul",
        lambda rows: gather(
            *(torch.ones(rows, 16), torch.ones(16, 16)), quantize="tensorwise", reduce_amax=True
        ),
    ),
    "all_gather_scaled_matmul": (
        "all_gather_scaled_matmul",
        lambda rows: agmm.all_gather_scaled_matmul(_fp8(rows, 16), _fp8(16, 16), _one, _one),
    ),
    "matmul_reduce_scatter": (
        "matmul_reduce_scatter",
        lambda rows: agmm.matmul_reduce_scatter(torch.ones(rows, 16), torch.ones(16, 2)),
    ),
    "scattered columns": (
        "matmul_reduce_scatter",
        lambda rows: agmm.matmul_reduce_scatter(
            torch.ones(rows, 16), torch.ones(16, 2), scatter_dim=1
        ),
    ),
    "scaled_matmul_reduce_scatter": (
        "scaled_matmul_reduce_scatter",
        lambda rows: agmm.scaled_matmul_reduce_scatter(_fp8(rows, 16), _fp8(16, 16), _one, _one),
    ),
    "scaled_matmul_all_reduce": (
        "scaled_matmul_all_reduce",
        lambda rows: agmm.scaled_matmul_all_reduce(_fp8(rows, 16), _fp8(16, 16), _one, _one),
    ),
    "matmul_all_reduce": (
        "matmul_all_reduce",
        lambda rows: agmm.matmul_all_reduce(torch.ones(rows, 16), torch.ones(16, 2)),
    ),
    "matmul_all_reduce_rms_norm": (
        "matmul_all_reduce_rms_norm",
        lambda rows: agmm.matmul_all_reduce_rms_norm(
            *(torch.ones(rows, 16), torch.ones(16, 2), torch.ones(rows, 2), torch.ones(2))
        ),
    ),
    "all_gather": ("all_gather", lambda rows: agmm.collectives.all_gather(torch.ones(rows, 2))),
    "background": (
        "all_gather",
        lambda rows: agmm.collectives.all_gather(torch.ones(rows, 2), async_op=True).wait(),
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda rows: agmm.collectives.reduce_scatter(torch.ones(rows, 2)),
    ),
    "all_reduce": ("all_reduce", lambda rows: agmm.collectives.all_reduce(torch.ones(rows, 2))),
    "all_reduce_rms_norm": ("all_reduce_rms_norm", lambda rows: _norm(rows, needs_grad=False)),
    "norm with a gradient": ("all_reduce_rms_norm", lambda rows: _norm(rows, needs_grad=True)),
    "route": (
        "route",
        lambda rows: agmm.moe.route(torch.zeros(rows, 1, dtype=torch.int32), num_experts=2),
    ),
    "all_gather_grouped_matmul": (
        "all_gather_grouped_matmul",
        lambda rows: agmm.all_gather_grouped_matmul(
            torch.ones(rows, 16), torch.ones(1, 16, 2), _routing(2 * rows)
        ),
    ),
    "grouped_matmul_reduce_scatter": (
        "grouped_matmul_reduce_scatter",
        lambda rows: agmm.grouped_matmul_reduce_scatter(
            *(torch.ones(2 * rows, 16), torch.ones(1, 16, 2), _routing(2 * rows)),
            torch.ones(rows, 1),
        ),
    ),
    "reserve": ("reserve", lambda rows: agmm.reserve(None, rows << 20)),
    "release": ("release", lambda rows: agmm.release(None)),
}
"""The public functions by what is tried, each with a call of it on so many rows."""


def _routing(tokens: int) -> agmm.moe.Routing:
    """The routing of tokens that all go to one expert."""
    rows, one = torch.arange(tokens, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    offsets = torch.cat([torch.zeros_like(one), one])
    return agmm.moe.Routing(rows, torch.zeros_like(rows), one, offsets, rows[:, None])


def _norm(rows: int, *, needs_grad: bool) -> Any:
    x = torch.ones(rows, 4, requires_grad=needs_grad)
    return agmm.collectives.all_reduce_rms_norm(x, torch.ones(rows, 4), torch.ones(4))


def differ_in_ops(kinds: tuple[str, str]) -> None:
    """Each rank calls its own kind, with its own rows, in a group that has a workspace."""
    call("good", 0)
    rank = dist.get_rank()
    OPS[kinds[rank]][1](4 + 2 * rank)


def one_is_late(kind: str, late_s: float) -> None:
    """Rank 1 comes late, to a call of each path."""
    shard, B = torch.ones(4, 6), torch.ones(6, 2)
    leaf = shard.clone().requires_grad_()
    out = agmm.all_gather_matmul(leaf, B)
    if dist.get_rank() == 1 and kind != "first":
        time.sleep(late_s)
    if kind == "unfused":
        agmm.all_gather_matmul(shard, B, config="unfused")
    elif kind == "scatter":
        agmm.matmul_reduce_scatter(shard, B)
    elif kind == "all_reduce":
        agmm.matmul_all_reduce(shard, B)
    elif kind == "backward":
        out.sum().backward()
    elif kind == "first":
        group = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            time.sleep(late_s)
        agmm.all_gather_matmul(shard, B, group)


def threads_on_one_group(count: int, calls: int, kind: str) -> list[str]:
    """Threads that make the same calls in a fresh group, so that any order is the same one."""
    group = fresh_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    faults: list[str] = []
    ready = threading.Barrier(count)
    A = torch.arange(12.0 * world_size).view(4 * world_size, 3)
    B = torch.arange(6.0).view(3, 2)
    own = slice(4 * rank, 4 * rank + 4)
    shard = A[own].clone()
    partial = A[:, :3] * 0 + rank
    ops: dict[str, Callable[[], torch.Tensor]] = {
        "gather": lambda: agmm.all_gather_matmul(shard, B, group),
        "scatter": lambda: agmm.matmul_reduce_scatter(A, B, group),
        "reduce": lambda: agmm.matmul_all_reduce(A, B, group),
    }
    wanted = {"gather": A @ B, "scatter": world_size * (A @ B)[own], "reduce": world_size * A @ B}

    def work() -> None:
        try:
            ready.wait(30)
            for _ in range(calls):
                if not torch.equal(ops[kind](), wanted[kind]):
                    faults.append(f"{kind} differs")
        except BaseException as e:
            faults.append(repr(e))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = agmm.matmul_reduce_scatter(partial, torch.eye(3), group)
    if not torch.equal(out, torch.full((4, 3), float(sum(range(world_size))))):
        faults.append("the sum differs")
    return faults


def with_little_room(rows: int, limit_bytes: int) -> dict[str, Any]:
    """A small call, a large one for which rank 1 has no room, and small ones again."""
    forget_warnings()
    group = fresh_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}

    def right(m_local: int, **options: Any) -> bool:
        A = torch.arange(float(world_size * m_local * 8)).remainder(7).view(-1, 8)
        B = torch.ones(8, 2)
        out = agmm.all_gather_matmul(A[rank * m_local : (rank + 1) * m_local].clone(), B, group)
        return bool(torch.equal(out, A @ B))

    found["before"] = right(4)
    workspace = workspaces.cpu_workspace(group)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["large"] = [right(rows), right(rows), right(rows + 1)]
        found["warnings"] = [str(warning.message) for warning in caught]
        try:
            shard = torch.ones(rows, 8)
            agmm.all_gather_matmul(shard, torch.ones(8, 2), group, strict=True)
        except agmm.Unsupported as error:
            found["strict"] = str(error)
        found["after"] = right(4)
        found["kept"] = workspaces.cpu_workspace(group) is workspace
        agmm.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 2), group, strict=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return found


def without_any_room() -> tuple[bool, list[str]]:
    """A group that cannot have a workspace at all, called twice."""
    forget_warnings()
    group = fresh_group()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outs = [
                agmm.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 2), group) for _ in (0, 1)
            ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    good = all(torch.equal(out, torch.full((4, 2), 8.0)) for out in outs)
    return good, [str(warning.message) for warning in caught]


def calls_after_the_groups_end() -> list[str]:
    """What each op says of a destroyed subgroup that was used before."""
    group = dist.new_group(list(range(dist.get_world_size())))
    shard, B = torch.ones(10, 4), torch.ones(4, 2)
    calls = [
        lambda: agmm.all_gather_matmul(shard, B, group),
        lambda: agmm.all_gather_matmul(shard, B, group, config="unfused"),
        lambda: agmm.matmul_reduce_scatter(shard, B, group),
        lambda: agmm.matmul_all_reduce(shard, B, group),
        lambda: agmm.reserve(group, 4096),
        lambda: agmm.release(group),
    ]
    for one in calls:
        one()
    dist.barrier(group)
    dist.destroy_process_group(group)
    errors = []
    for one in calls:
        try:
            one()
        except agmm.InvalidArgument as error:
            errors.append(str(error))
    return errors


def same_name_again(times: int) -> list[str]:
    """Groups of one name, one after the other, whose words in the store stay where they are."""
    tokens = []
    for i in range(times):
        group = dist.new_group(list(range(dist.get_world_size())), group_desc="again")
        known = groups.of(group)
        _store_under_one_name(group)
        found = known.exchange("a word", f"{i} of {known.rank}")
        assert found == [f"{i} of {rank}" for rank in range(known.world_size)], found
        tokens.append(known.token)
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group, known
        gc.collect()
    return tokens


def _store_under_one_name(group: dist.ProcessGroup) -> None:
    """Gives the group the name and the store of the one before."""
    known = groups.of(group)
    world = dist.distributed_c10d._get_default_store()
    known.store = lambda: world  # type: ignore[method-assign]
    known.prefix = lambda: "agmm/again"  # type: ignore[method-assign]


def first_call_after_words_of_the_past(late: int) -> list[str]:
    """A group on whose store words of an earlier run are left, by ranks that had come far, and one
    rank of which is late."""
    group = fresh_group()
    known = groups.of(group)
    store, prefix = known.store(), known.prefix()
    if known.rank == 0:
        store.set(f"{prefix}/token", "past")
        for peer in range(1, known.world_size):
            store.set(f"{prefix}/past/here/{peer}", f"word{peer}")
            store.set(f"{prefix}/past/0/{peer}", '["a word", "stale"]')
        store.set(f"{prefix}/past/go", "word1,word2")
        store.set(f"{prefix}/past/0/0", '["a word", "stale"]')
    dist.barrier(group)
    if known.rank == late:
        time.sleep(0.3)
    return known.exchange("a word", str(known.rank))


def exchange_of_different_things() -> str:
    group = fresh_group()
    known = groups.of(group)
    try:
        known.exchange(("apples", "pears")[dist.get_rank() % 2], "")
    except agmm.AgmmError as error:
        return str(error)
    return ""


def first_call_of_a_strided_shard() -> str | None:
    """What a group's first call says where the shard of one rank is not contiguous, which takes the
    unfused path."""
    group = fresh_group()
    A, B = torch.ones(4, 6), torch.ones(6, 3)
    if dist.get_rank(group) % 2:
        A = A.t().contiguous().t()
    try:
        agmm.all_gather_matmul(A, B, group)
    except agmm.AgmmError as error:
        return str(error)
    return None
