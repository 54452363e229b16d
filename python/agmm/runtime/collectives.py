"""All-gather and reduce-scatter along any dimension, and all-reduce: ops that ``torch.compile`` can
trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from agmm.runtime import backends, groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.groups import group_of, world_size_of
from agmm.runtime.identity import backend_name
from agmm.runtime.results import moved
from agmm.runtime.workspaces import cuda_workspace, meet, take_turn

_functional = torch.ops._c10d_functional


def by_newer_name(newer: str, older: str) -> Callable[..., Any]:
    """A function of torch.distributed: from torch 2.13 on the older name warns that it is
    deprecated."""
    found: Callable[..., Any] = getattr(dist, newer, None) or getattr(dist, older)
    return found


def _start(
    kind: str,
    tensor: torch.Tensor,
    group_name: str,
    dim: int,
    call: Call | None,
    start: Callable[[], torch.Tensor],
    then: str = "",
) -> torch.Tensor:
    """Starts a collective of the group's backend, on the CPU when all ranks come with the same.
    What is traced does without that."""
    if is_traced(tensor):
        if not torch.compiler.is_dynamo_compiling() and _is_recorded():
            backends.check_backend(group_of(group_name), tensor.device)
        return start()
    group = group_of(group_name)
    backends.check_backend(group, tensor.device)
    if nan_check.active:
        _look_through(kind, tensor, group, call)
    with groups.of(group).lock:
        if tensor.device.type == "cpu":
            meet(group, *_described(kind, tensor, dim, call, then))
        return start()


def _described(
    kind: str, tensor: torch.Tensor, dim: int, call: Call | None, then: str
) -> tuple[str, Call]:
    """What the ranks have to agree on, and the call in words."""
    along = dim % tensor.dim() if tensor.dim() else 0
    what = f"{kind} of {list(tensor.shape)} {tensor.dtype} along {along}{then}"
    return what, call or Call(kind, input=tensor, dim=dim)


def _take_turn(
    kind: str, tensor: torch.Tensor, group_name: str, dim: int, call: Call | None, then: str = ""
) -> None:
    """Takes the place of a collective of a tensor without elements."""
    group = group_of(group_name)
    take_turn(group, tensor.device, *_described(kind, tensor, dim, call, then))


def _look_through(
    kind: str, tensor: torch.Tensor, group: dist.ProcessGroup, call: Call | None
) -> None:
    name = "input"
    if call is not None:
        name = next((n for n, value in call.arguments.items() if value is tensor), "A @ B")
    nan_check.look_through(call.op if call else kind, name, tensor, groups.of(group).rank)


def start_all_gather(
    shard: torch.Tensor,
    group_name: str,
    dim: int,
    *,
    by_copies: bool = False,
    call: Call | None = None,
) -> Callable[[], torch.Tensor]:
    """Begin to gather ``shard`` along ``dim``.

    Args:
        by_copies: by copy engines instead of the group's backend, on GPUs that reach each other's
            memory. Not while the call is traced.
        call: what it is for, for messages.

    Returns:
        A function to call once, which returns the gathered tensor, contiguous.
    """
    given, shard = shard, moved(shard, dim, 0)
    world_size = world_size_of(group_name)
    if shard.numel() == 0:
        if is_traced(shard):
            found = torch.ops.agmm._all_gather.default(given, group_name, world_size, dim)
            return lambda: found
        _take_turn("all_gather", given, group_name, dim, call)
        empty = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
        return lambda: moved(empty, 0, dim)
    if by_copies and not is_traced(shard):
        group = group_of(group_name)
        if nan_check.active:
            _look_through("all_gather", given, group, call)
        finish = cuda_workspace(group, shard.device).start_all_gather(shard)
        return lambda: moved(finish(), 0, dim)

    def start() -> torch.Tensor:
        gather = _functional.all_gather_into_tensor
        found: torch.Tensor = gather(shard, world_size, backend_name(group_name))
        return found

    started = _start("all_gather", given, group_name, dim, call, start)
    return lambda: moved(_functional.wait_tensor(started), 0, dim)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a graph is being made of what is done to the tensor; also for tensors of a subclass,
    which may stand for others."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or _is_recorded()
    )


def _is_recorded() -> bool:
    """Whether a graph is made of what the dispatcher sees."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def reduce_scatter(
    partial: torch.Tensor,
    group_name: str,
    dim: int,
    *,
    call: Call | None = None,
    then: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """This rank's shard along ``dim`` of the sum over all ranks of ``partial``; contiguous.

    The size of ``dim`` is a multiple of the world size. ``call`` is what it is for, for messages,
    ``then`` what else has to be the same on all ranks, and ``meanwhile`` is called between its
    start and its end.
    """
    given, partial = partial, moved(partial, dim, 0)
    world_size = world_size_of(group_name)
    if partial.numel() == 0:
        if is_traced(partial):
            op = torch.ops.agmm._reduce_scatter.default
            shard = moved(op(given, group_name, world_size, "sum", dim), dim, 0)
        else:
            _take_turn("reduce_scatter", given, group_name, dim, call, then)
            shard = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
        if meanwhile is not None:
            meanwhile()
    else:

        def start() -> torch.Tensor:
            op = _functional.reduce_scatter_tensor
            found: torch.Tensor = op(partial, "sum", world_size, backend_name(group_name))
            return found

        started = _start("reduce_scatter", given, group_name, dim, call, start, then)
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            shard = _functional.wait_tensor(started)
    return moved(shard, 0, dim)


def all_to_all(
    parts: torch.Tensor, group_name: str, counts: list[int], rank: int, *, call: Call
) -> torch.Tensor:
    """The rows that all ranks have for this one, [world_size, counts[rank], ...], by rank.

    Args:
        parts: [sum(counts), ...], contiguous; ``counts[r]`` rows for each rank r, in their order.
        rank: this rank, in the group.
        call: what it is for, for messages. It is not traced.
    """
    mine = counts[rank]

    def start() -> torch.Tensor:
        op = _functional.all_to_all_single
        found: torch.Tensor = op(parts, [mine] * len(counts), counts, backend_name(group_name))
        return found

    started = _start("all_to_all", parts, group_name, 0, call, start, f", {counts} rows")
    found: torch.Tensor = _functional.wait_tensor(started)
    return found.view(len(counts), mine, *parts.shape[1:])


def all_reduce(
    partial: torch.Tensor,
    group_name: str,
    *,
    op: str = "sum",
    in_place: bool = False,
    call: Call | None = None,
) -> torch.Tensor:
    """The sum, or "max", over all ranks of ``partial``, contiguous. ``call`` is what it is for, for
    messages; ``in_place``: ``partial`` may be overwritten."""
    given, partial = partial, partial.contiguous()
    if partial.numel() == 0:
        if is_traced(partial):
            world_size = world_size_of(group_name)
            found: torch.Tensor = torch.ops.agmm._all_reduce.default(
                given, group_name, world_size, "sum"
            )
            return found
        _take_turn("all_reduce", given, group_name, 0, call)
        return partial if in_place else torch.empty_like(partial)

    def start() -> torch.Tensor:
        reduce = _functional.all_reduce_ if in_place else _functional.all_reduce
        found: torch.Tensor = reduce(partial, op, backend_name(group_name))
        return found

    out: torch.Tensor = _functional.wait_tensor(
        _start("all_reduce", given, group_name, 0, call, start)
    )
    return out
