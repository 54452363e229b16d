"""How calls on fp8 operands are carried out: by agmm or unfused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.ops import kept, scaled_products
from agmm.ops.paths import fall_back
from agmm.ops.scaled_checks import check_scaled_gather, scaling_of, scalings_of
from agmm.ops.scaled_plans import kernel_of, problem_of
from agmm.planning import built_kernels, call_plans, legality
from agmm.planning.plans import UNFUSED, Plan, Problem
from agmm.runtime import (
    backends,
    collectives,
    cuda_scaled,
    cuda_scaled_calls,
    groups,
    nan_check,
    symmetric,
)
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.cpu_scaled import all_gather_scaled_matmul as all_gather_on_cpu
from agmm.runtime.results import reshaped
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, Scaling, Tile
from agmm.runtime.workspaces import cpu_workspace, cuda_workspace, take_turn


def why_no_kernel(device: torch.device) -> str | None:
    """The reason why agmm itself computes nothing of fp8 on the device, or None. The one place
    that decides it."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not built_kernels.has_fp8():
        return f"fp8: found device {device.type}, wanted one that this build has fp8 kernels for"
    return symmetric.why_unfused(device)


def why_unfused(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """The reason why no kernel serves fp8 calls of a group, on all ranks alike, or None. Collective
    at first use on GPUs."""
    if device.type == "cuda" and built_kernels.has_fp8():
        return symmetric.why_group_unfused(group, device)
    return why_no_kernel(device)


def rows_of(A: torch.Tensor, scale: torch.Tensor, tile: Tile, dim: int) -> Scaled:
    """A [..., K] as [M, K], contiguous, the rows in the order that ``dim`` first gives."""
    values = A.movedim(dim, 0).flatten(0, -2)
    if tile[0] == ALL:
        return Scaled(values.contiguous(), scale.reshape(1, 1), tile)
    found = scale.movedim(dim, 0).reshape(len(values), scale.shape[-1])
    return Scaled(values.contiguous(), found, tile)


def weight_of(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    B: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    scaling: Scaling | None = None,
) -> tuple[Tile, Weight]:
    """The tiles of A's scales, and the weight; of checked operands. ``scaling``: the kind of the
    scales where it is known, and not to be told by their shapes."""
    scaling = scaling or scaling_of(A, scale_a, B, scale_b)
    if scaling.b == (ALL, ALL):
        scale_b = scale_b.reshape(1, 1)
    operand = Scaled(B, scale_b, scaling.b)
    return scaling.a, Weight(operand, bias, result_scale, out_dtype, fast_accum)


def _weights_of(
    A: torch.Tensor,
    scale_a: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    *others: Any,
) -> tuple[Tile, list[Weight]]:
    """`weight_of` of weights that share A; ``others`` is what that takes behind scale_b, for each
    weight, and the kind of the scales by its name or ""."""
    *of_each, known = others
    scalings = scalings_of(A, scale_a, Bs, scale_bs, known)
    described = [
        weight_of(A, scale_a, *given)
        for given in zip(Bs, scale_bs, *of_each, scalings, strict=True)
    ]
    return described[0][0], [weight for _, weight in described]


Outs = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""A, its scales and the products, with the gathered dimension first."""


def gather(
    A_shard: torch.Tensor,
    scale_a: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype],
    fast_accum: Sequence[bool],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    strict: bool,
    plan: Plan | None = None,
    *,
    quantize: str = "",
    keep_as: Any = None,
) -> Outs:
    """``all_gather_scaled_matmul`` of checked or unchecked operands. What A and its scales are
    without ``return_A`` is nobody's to look at.

    Args:
        plan: instead of the chosen one.
        quantize: the kind of the scales, for an ``all_gather_matmul`` that has made them.
        keep_as: see `kept.keep`.
    """
    groups.check_alive(group)
    check_scaled_gather(
        A_shard, scale_a, Bs, scale_bs, biases, result_scales, out_dtypes, gather_dim
    )
    tile, weights = _weights_of(
        A_shard, scale_a, Bs, scale_bs, biases, result_scales, out_dtypes, fast_accum, quantize
    )
    shard = rows_of(A_shard, scale_a, tile, gather_dim)
    call = Call(
        "all_gather_matmul" if quantize else "all_gather_scaled_matmul",
        A_shard=A_shard,
        B=list(Bs),
        scale_a=scale_a,
        scale_b=list(scale_bs),
        gather_dim=gather_dim,
        **({"quantize": quantize} if quantize else {"return_A": return_A}),
    )
    if nan_check.active:
        rank = groups.of(group).rank
        nan_check.look_through(call.op, "A_shard", A_shard, rank)
        if not quantize:  # else a NaN in A_shard is what made the scale one
            nan_check.look_through(call.op, "scale_a", scale_a, rank)
    is_fake = backends.is_fake(group)
    if A_shard.numel() == 0 and not is_fake:
        found = _without_elements(A_shard, shard, weights, group, gather_dim, return_A, call)
    else:
        fused = None
        if plan != UNFUSED and not is_fake:
            try:
                with calling(call):
                    fused = _gather_fused(
                        *(A_shard, shard, weights, group, gather_dim, return_A, strict, call),
                        *(plan, keep_as),
                    )
            except Unsupported as error:
                fall_back(str(error), strict)
        found = fused or _gather_unfused(shard, weights, group, call)
    A, scale_A, outs = found
    front = A_shard.movedim(gather_dim, 0).shape
    leading = (group.size() * front[0], *front[1:-1])

    def unfolded(rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None:
            return A_shard.new_empty(0)
        return reshaped(rows, (*leading, rows.shape[-1]))

    if scale_A is None:
        scale_A = scale_a.new_empty(0)
    elif shard.tile[0] != ALL:
        scale_A = unfolded(scale_A)
    return unfolded(A), scale_A, [unfolded(out) for out in outs]


_Gathered = tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]
"""A, its scales and the products, all as matrices of rows."""


def _gather_fused(
    A_shard: torch.Tensor,
    shard: Scaled,
    weights: list[Weight],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    strict: bool,
    call: Call,
    plan: Plan | None,
    keep_as: Any,
) -> _Gathered | None:
    """By agmm; None where the unfused path is planned. Raises Unsupported where it cannot serve the
    call."""
    reason = why_unfused(A_shard.device, group)
    if reason is not None:
        raise Unsupported(reason)
    if A_shard.is_cuda:
        kernels, reason = _cuda_kernels(shard, weights, group, return_A, strict, plan)
        if reason is not None:
            raise Unsupported(reason)
        if not kernels:
            return None
        return _gather_on_cuda(
            A_shard, shard, weights, kernels, group, gather_dim, return_A, keep_as
        )
    if plan is None:
        Bs = [weight.B.values for weight in weights]
        plan = call_plans.call_plan(shard.values, Bs, group, return_A=return_A)
    if plan == UNFUSED:
        if not strict:
            return None
        plan = Plan("push")
    workspace = cpu_workspace(group)
    return all_gather_on_cpu(
        workspace, shard, weights, call, return_A=return_A, chunks=plan.chunks_per_shard
    )


def _without_elements(
    A_shard: torch.Tensor,
    shard: Scaled,
    weights: list[Weight],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    call: Call,
) -> _Gathered:
    """A call whose A_shard has no elements: it takes its turn, and moves nothing but scales that
    are asked for."""
    scale, rows = shard.scale, len(shard.values)
    what = (
        f"all_gather_scaled_matmul of {list(A_shard.shape)} {A_shard.dtype}, scales "
        f"{list(scale.shape)} along {gather_dim % A_shard.dim()}, {return_A}"
    )
    agree = call_plans.agree if why_unfused(A_shard.device, group) is None else None
    take_turn(group, A_shard.device, what, call, agree=agree)
    if return_A and scale.numel() and group.size() > 1:
        gather = torch.ops.agmm._all_gather.default
        scale = gather(scale.contiguous(), group.group_name, group.size(), 0)
    else:
        scale = scale.repeat(group.size(), 1)
    values = shard.values.new_empty(group.size() * rows, shard.values.shape[1])
    tile = (rows, ALL) if shard.tile[0] == ALL else shard.tile
    A = Scaled(values, scale, tile)
    return values, scale, [scaled_products.product(A, weight) for weight in weights]


def _gather_on_cuda(
    A_shard: torch.Tensor,
    shard: Scaled,
    weights: list[Weight],
    kernels: list[cuda_scaled.Kernel],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    keep_as: Any,
) -> _Gathered:
    if group.size() == 1:
        return cuda_scaled_calls.on_one_rank(shard, weights, kernels, return_A=return_A)
    workspace = cuda_workspace(group, A_shard.device)
    shape = A_shard.movedim(gather_dim, 0).shape
    call = cuda_scaled_calls.ready_gather(
        workspace, shape, shard, weights, kernels, return_A=return_A
    )
    found = call(
        shard.values,
        shard.scale,
        [weight.B.values for weight in weights],
        [weight.B.scale for weight in weights],
        [weight.bias for weight in weights],
    )
    if gather_dim % A_shard.dim() == 0 and A_shard.is_contiguous():
        kept.keep(group, keep_as, call)
    return found


def _cuda_kernels(
    shard: Scaled,
    weights: list[Weight],
    group: dist.ProcessGroup,
    return_A: bool,
    fused: bool,
    plan: Plan | None,
) -> tuple[list[cuda_scaled.Kernel], str | None]:
    """A kernel for each weight, none where a table says that the call is faster unfused (unless
    ``fused``), or the reason why not all have one. Collective at first use."""
    first = weights[0].B.values.dtype
    m = group.size() * len(shard.values)
    reason = legality.why_too_many_rows(len(shard.values), group.size())
    if reason is not None:
        return [], reason
    problems: list[Problem] = []
    for weight in weights:
        if weight.B.values.dtype != first:
            found_too = weight.B.values.dtype
            return [], f"B: found dtypes {first} and {found_too}, wanted one on CUDA"
        found = problem_of(shard, weight, m, return_A=return_A, group=group)
        if isinstance(found, str):
            return [], found
        problems.append(found)
    planner = call_plans.planner(group, shard.values.device)
    columns = sum(problem.n for problem in problems)
    joint = replace(problems[0], n=columns)
    if plan is None and not fused and planner.plan(joint) == UNFUSED:
        return [], None
    kernels: list[cuda_scaled.Kernel] = []
    for problem in problems:
        config = (plan or planner.fused_plan(problem)).kernel
        assert config is not None
        kernels.append(kernel_of(problem, config))
    return kernels, None


def why_no_cuda_kernels(
    A_shard: torch.Tensor,
    scale_a: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    result_scales: Sequence[torch.Tensor | None],
    out_dtypes: Sequence[torch.dtype],
    fast_accum: Sequence[bool],
    group: dist.ProcessGroup,
    gather_dim: int,
) -> str | None:
    """The reason why no kernels compute a checked call of ``gather``, or None. The same on all
    ranks, as long as they call with the same shapes and dtypes, and weights of the same layout."""
    tile, weights = _weights_of(
        A_shard, scale_a, Bs, scale_bs, biases, result_scales, out_dtypes, fast_accum, ""
    )
    shard = rows_of(A_shard, scale_a, tile, gather_dim)
    return _cuda_kernels(shard, weights, group, False, True, None)[1]


def _gather_unfused(
    shard: Scaled, weights: list[Weight], group: dist.ProcessGroup, call: Call
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    name = group.group_name
    # As bytes: not all backends know the dtypes. Both are begun before one is awaited.
    with groups.of(group).lock, nan_check.done():
        finishes = [
            collectives.start_all_gather(tensor, name, 0, call=call)
            for tensor in (shard.values.view(torch.uint8), shard.scale)
        ]
    values, scale = (finish() for finish in finishes)
    tile = shard.tile
    if tile[0] == ALL:
        tile = (len(shard.values), ALL)
    A = Scaled(values.view(shard.values.dtype), scale, tile)
    return A.values, scale, [scaled_products.product(A, weight) for weight in weights]
