"""The fused or the unfused path of an ``all_gather_matmul``. Calls that were found to be legal for
the fused one are kept (`kept`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported, warn_once
from agmm.ops import kept, small_collectives
from agmm.ops.checks import FLOATS, check_gatherable
from agmm.ops.prepare import prepare
from agmm.planning import call_plans, legality, plans
from agmm.runtime import backends, cuda_calls, groups, nan_check, symmetric
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.collectives import start_all_gather
from agmm.runtime.cuda_gather import Gathered, ReadyGather
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import cpu_workspace, cuda_workspace, take_turn


def fall_back(reason: str, strict: bool) -> None:
    """Raises Unsupported if strict, else warns of each reason once in a process."""
    if strict:
        raise Unsupported(f"{reason}; strict=True refuses the unfused path")
    warn_once(f"agmm takes the unfused path: {reason}")


def why_unfused(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    config: str,
    group: dist.ProcessGroup,
) -> str | None:
    """The reason why the fused path cannot serve this call, whose A_shard has elements, or None.
    The same on all ranks, as long as they call with the same shapes, dtypes and layouts.
    Collective at first use on GPUs."""
    if config == "unfused":
        return "config: unfused was asked for"
    if gather_dim % A_shard.dim() != 0:
        return f"gather_dim: {gather_dim}, the fused path wants 0"
    if not A_shard.is_contiguous():
        return f"A_shard: strides {tuple(A_shard.stride())} are not contiguous"
    if A_shard.device.type == "cpu":
        if A_shard.dtype not in FLOATS:
            return f"A_shard: dtype={A_shard.dtype}, the CPU backend wants a floating-point type"
        return None
    if A_shard.device.type != "cuda":
        return f"A_shard: device {A_shard.device}, the fused path wants cuda or cpu"
    rows = A_shard.shape[:-1].numel()
    reason = symmetric.why_group_unfused(group, A_shard.device)
    reason = reason or legality.why_too_many_rows(rows, group.size())
    dtype = str(A_shard.dtype).removeprefix("torch.")
    for B in Bs:
        reason = (
            reason
            or legality.why_unfused(dtype, B.shape[1], A_shard.shape[-1])
            or cuda_calls.why_b_unfused(B)
        )
    return reason


def unfused(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    call = Call("all_gather_matmul", A_shard=A_shard, B=Bs, gather_dim=gather_dim)
    A = start_all_gather(A_shard, group.group_name, gather_dim, call=call)()
    return A, _products(A, Bs, biases)


def without_elements(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    *,
    is_planned: bool = True,
) -> Outs:
    """A checked call whose A_shard has no elements: it moves nothing and takes its turn."""
    call = Call("all_gather_matmul", A_shard=A_shard, B=Bs, gather_dim=gather_dim)
    dim = gather_dim % A_shard.dim()
    what = f"all_gather_matmul of {list(A_shard.shape)} {A_shard.dtype} along {dim}, {return_A}"
    agree = call_plans.agree if is_planned else None
    take_turn(group, A_shard.device, what, call, agree=agree)
    shape = list(A_shard.shape)
    shape[dim] *= group.size()
    A = A_shard.new_empty(shape)
    return (A if return_A else None), _products(A, Bs, biases)


def _products(
    A: torch.Tensor, Bs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    outs = []
    rows = A.flatten(0, -2)
    for B, bias in zip(Bs, biases, strict=True):
        # One rounding, of product and bias together, as the fused path has it.
        out = torch.mm(rows, B) if bias is None else torch.addmm(bias, rows, B)
        outs.append(reshaped(out, (*A.shape[:-1], B.shape[1])))
    return outs


Outs = tuple[torch.Tensor | None, list[torch.Tensor]]


class _CpuCall(NamedTuple):
    """What `ReadyGather` is on CUDA."""

    group: weakref.ReferenceType[dist.ProcessGroup]  # else a kept call would keep its group
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> Gathered:
        group = self.group()
        assert group is not None
        A, outs = fused_cpu(A_shard, Bs, biases, group, self.return_A)
        return A, None, outs


class _GatherCall(NamedTuple):
    """An all-gather by agmm's kernel, then the library's matmul."""

    group: weakref.ReferenceType[dist.ProcessGroup]
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> Gathered:
        group = self.group()
        assert group is not None
        A = small_collectives.gather(A_shard, group)
        return (A if self.return_A else None), None, _products(A, Bs, biases)


_Kept = _CpuCall | _GatherCall | ReadyGather | Callable[..., Gathered]

_BY_LIBRARY = (plans.UNFUSED.name, plans.GATHERED.name)
"""Configs whose matmul is the library's."""

_Sending = TypeVar("_Sending", ReadyGather, _GatherCall)


def looking(call: _Sending, group: dist.ProcessGroup) -> _Sending | Callable[..., Gathered]:
    """The call, which looks for NaNs in its shard first where that was asked for."""
    rank = dist.get_rank(group)

    def look(A_shard: torch.Tensor, *_: object) -> None:
        nan_check.look_through("all_gather_matmul", "A_shard", A_shard, rank)

    return nan_check.before(call, look)


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def run(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    prefer_fused: bool = False,
    kinds: Sequence[Any] | None = None,
) -> Outs:
    if kinds is None:
        kinds = [None if t is None else kind_of(t) for t in (A_shard, *Bs, *biases)]
    may_choose = not (config or strict or prefer_fused)
    key = ("all_gather_matmul", gather_dim, return_A, config, may_choose, len(Bs), *kinds)
    call = kept.find(group, key)
    if call is not None:
        try:
            A, _, outs = call(A_shard, Bs, biases)
            return A, outs
        except Unsupported:  # a workspace that cannot grow any more; nothing was begun
            kept.forget(group, key)
    in_words = Call("all_gather_matmul", A_shard=A_shard, B=Bs, gather_dim=gather_dim)
    with groups.of(group).lock, calling(in_words):
        return _run_anew(
            A_shard, Bs, biases, group, gather_dim, return_A, config, strict, may_choose, key
        )


def _run_anew(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    may_choose: bool,
    key: Any,
) -> Outs:
    """A call of a kind that is not kept."""
    groups.check_alive(group)
    check_gatherable(A_shard, Bs, biases, gather_dim, group.size())
    try:
        kernel, transport = plans.parse_config("" if config in _BY_LIBRARY else config)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    if backends.is_fake(group):
        A, outs = unfused(A_shard, Bs, biases, group, gather_dim)
        return (A if return_A else None), outs
    if A_shard.numel() == 0:
        is_planned = why_unfused(A_shard, Bs, gather_dim, config, group) is None
        return without_elements(
            A_shard, Bs, biases, group, gather_dim, return_A, is_planned=is_planned
        )
    reason = why_unfused(A_shard, Bs, gather_dim, config, group)
    if (
        reason is None
        and may_choose
        and call_plans.prefers_unfused(A_shard, Bs, group, return_A=return_A)
    ):
        reason, config = "plan: the unfused path is faster", "unfused"
    is_kept = True
    if reason is None and config == plans.GATHERED.name:
        reason = why_not_gathered(A_shard, group)
    elif (
        reason is None
        and may_choose
        and call_plans.prefers_gather(A_shard, Bs, group, return_A=return_A)
    ):
        is_kept = why_not_gathered(A_shard, group) is None
        if is_kept:
            config = plans.GATHERED.name
        # Else it is captured before the gather has memory: fused this time.
    if reason is None:
        try:
            if config == plans.GATHERED.name:
                call: _Kept = looking(_GatherCall(weakref.ref(group), return_A), group)
            elif A_shard.device.type == "cpu":
                call = _CpuCall(weakref.ref(group), return_A)
            else:
                workspace = cuda_workspace(group, A_shard.device)
                call = looking(
                    prepare(
                        workspace,
                        A_shard,
                        Bs,
                        return_A=return_A,
                        config=kernel,
                        transport=transport,
                    ),
                    group,
                )
            found = call(A_shard, Bs, biases)
        except Unsupported as error:
            if may_choose and config == plans.GATHERED.name:  # no memory for the gather: fused
                return _run_anew(
                    *(A_shard, Bs, biases, group, gather_dim, return_A),
                    *("", strict, False, key),
                )
            reason = str(error)
        else:
            if is_kept:
                kept.keep(group, key, call)
            return found[0], found[2]
    if strict or config != plans.UNFUSED.name:  # which is what the caller asked for, or the plan
        fall_back(reason, strict)
    A, outs = unfused(A_shard, Bs, biases, group, gather_dim)
    return (A if return_A else None), outs


def why_not_gathered(A_shard: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """The reason why agmm's kernel cannot gather what could be fused, or None."""
    if A_shard.device.type != "cuda":
        return f"config: {plans.GATHERED.name} was asked for on {A_shard.device}, it wants cuda"
    return small_collectives.why_not("all_gather", A_shard, group)


def fused_cpu(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    return_A: bool,
) -> Outs:
    k = A_shard.shape[-1]
    shard = A_shard.view(-1, k)
    workspace = cpu_workspace(group)
    chunks = call_plans.call_plan(A_shard, Bs, group, return_A=return_A).chunks_per_shard
    A, outs = workspace.all_gather_matmul(
        shard, list(Bs), list(biases), return_A=return_A, chunks_per_shard=chunks
    )
    leading = (dist.get_world_size(group) * A_shard.shape[0], *A_shard.shape[1:-1])
    outs = [reshaped(out, (*leading, out.shape[-1])) for out in outs]
    return (None if A is None else reshaped(A, (*leading, k))), outs
