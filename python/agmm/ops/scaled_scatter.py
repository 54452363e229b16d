"""How a scaled matmul + reduce-scatter is carried out: by agmm or unfused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import kept, scaled_paths, scaled_products
from agmm.ops.paths import fall_back
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scaled_paths import rows_of, weight_of
from agmm.ops.scaled_plans import kernel_of, problem_of
from agmm.planning import call_plans
from agmm.planning.plans import (
    MATMUL_REDUCE_SCATTER,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    UNFUSED,
    Plan,
)
from agmm.runtime import backends, collectives, cpu_scatter, groups, nan_check
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.cuda_scatter import ReadyScatter, ready_scatter
from agmm.runtime.results import moved, reshaped
from agmm.runtime.scaled import FP8, Scaled, Weight, rounded_into
from agmm.runtime.workspaces import cpu_workspace, scatter_workspace, take_turn


def scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    strict: bool,
    *,
    is_bias_of_each: bool = False,
    plan: Plan | None = None,
    keep_as: Any = None,
) -> torch.Tensor:
    """``scaled_matmul_reduce_scatter`` of checked or unchecked operands; contiguous.

    Args:
        is_bias_of_each: the bias is this rank's own, a part of its product.
        plan: instead of the chosen one, on a GPU.
        keep_as: see `kept.keep`.
    """
    groups.check_alive(group)
    world_size = group.size()
    check_scaled_scatter(
        A,
        B,
        scale_a,
        scale_b,
        bias,
        result_scale,
        out_dtype,
        world_size,
        scatter_dim,
        reduce_op,
    )
    tile, weight = weight_of(A, scale_a, B, scale_b, bias, result_scale, out_dtype, fast_accum)
    call = Call(
        "scaled_matmul_reduce_scatter",
        A=A,
        B=B,
        scale_a=scale_a,
        scale_b=scale_b,
        scatter_dim=scatter_dim,
        reduce_op=reduce_op,
    )
    scatter_dim %= A.dim()
    shape = [*A.shape[:-1], B.shape[1]]
    is_fake = backends.is_fake(group)
    if 0 in shape and not is_fake:
        what = f"scaled_matmul_reduce_scatter to {shape} {out_dtype} along {scatter_dim}"
        is_planned = A.is_cuda and scaled_paths.why_unfused(A.device, group) is None
        agree = call_plans.agree if is_planned else None
        take_turn(group, A.device, f"{what}, {reduce_op}", call, agree=agree)
        shape[scatter_dim] //= world_size
        return A.new_empty(shape, dtype=out_dtype)
    reason = scaled_paths.why_unfused(A.device, group)
    if reason is None and A.is_cuda and A.shape[-1] == 0:
        reason = f"fp8: shape {tuple(A.shape)} has no elements to multiply"
    if reason is None and scatter_dim == A.dim() - 1:
        reason = f"scatter_dim: {scatter_dim}, the fused path wants another than the last"
    planned_unfused = plan == UNFUSED or is_fake
    if reason is None and not planned_unfused:
        operand = rows_of(A, scale_a, tile, scatter_dim)
        front = A.movedim(scatter_dim, 0).shape
        out_shape = (front[0] // world_size, *front[1:-1], B.shape[1])
        rows = operand.values.view(front)
        try:
            if A.is_cuda:
                with calling(call):
                    on_cuda = _scatter_on_cuda(
                        operand, rows, weight, group, reduce_op, is_bias_of_each, strict, plan
                    )
                planned_unfused = on_cuda is None
                found = None
                if on_cuda is not None:
                    if nan_check.active:  # the kernel sends products as it computes them
                        operands = {"A": A, "B": B, "scale_a": scale_a, "scale_b": scale_b}
                        for name, tensor in operands.items():
                            nan_check.look_through(call.op, name, tensor, groups.of(group).rank)
                    found = on_cuda([rows], [B], bias, [operand.scale], [weight.B.scale])
                    if scatter_dim == 0 and A.is_contiguous():
                        kept.keep(group, keep_as, on_cuda)
            else:
                with calling(call):
                    found = cpu_workspace(group).reduce_scatter(
                        cpu_scatter.scaled_sum(operand, weight, is_bias_of_each=is_bias_of_each),
                        reduce_op,
                        call,
                        agreed=f"scaled, {list(A.shape[:-1])} along {scatter_dim}",
                    )
        except Unsupported as error:
            reason = str(error)
        else:
            if found is not None:
                return moved(reshaped(found, out_shape), 0, scatter_dim)
    if reason is not None and not is_fake:
        fall_back(reason, strict)
    # Summed before it is rounded to what cannot be summed, and scaled.
    of_each = weight if is_bias_of_each else weight._replace(bias=None)
    if out_dtype in FP8:
        of_each = of_each._replace(result_scale=None, out_dtype=torch.bfloat16)
    partial_sum = scaled_products.product(rows_of(A, scale_a, tile, 0), of_each)
    partial_sum = partial_sum.view(*A.shape[:-1], B.shape[1])
    out = collectives.reduce_scatter(
        partial_sum, group.group_name, scatter_dim, call=call, then=f" for {reduce_op}"
    )
    if reduce_op == "avg":
        out = out.div_(world_size)
    if bias is not None and not is_bias_of_each:
        out = out.add_(bias)
    if out_dtype in FP8:
        return rounded_into(out.new_empty(out.shape, dtype=out_dtype), out.float(), result_scale)
    return out


def _scatter_on_cuda(
    A: Scaled,
    rows: torch.Tensor,
    weight: Weight,
    group: dist.ProcessGroup,
    reduce_op: str,
    is_bias_of_each: bool,
    fused: bool,
    plan: Plan | None,
) -> ReadyScatter | None:
    """The call of one of agmm's kernels; None where a table says that it is faster unfused, unless
    ``fused``.

    Raises:
        Unsupported: there is none for such operands, or the group cannot have one.
    """
    if group.size() == 1:
        raise Unsupported("group: 1 rank, which has nothing to scatter")
    if is_bias_of_each and weight.bias is not None:
        raise Unsupported("bias: one of each rank, the fused path wants one of the sum")
    device = A.values.device
    problem = problem_of(A, weight, len(A.values), op=MATMUL_REDUCE_SCATTER, group=group)
    if isinstance(problem, str):
        raise Unsupported(problem)
    planner = call_plans.planner(group, device)
    plan = plan or (planner.fused_plan(problem) if fused else planner.plan(problem))
    if plan.kernel is None:
        return None
    kernel = kernel_of(A, weight, problem, plan.kernel)
    if group.size() > MAX_PUSH_RANKS:
        raise Unsupported(
            f"group: {group.size()} ranks, the fused path wants at most {MAX_PUSH_RANKS}"
        )
    shape = kernel.config
    part = _core.scatter_part_bytes(len(A.values), weight.B.values.shape[1], group.size(), shape)
    tiles = part // (shape.tile_m * shape.tile_n * weight.out_dtype.itemsize)
    if tiles > MAX_SCATTER_TILES:
        raise Unsupported(
            f"A @ B: {tiles} tiles in a chunk, a kernel sends at most {MAX_SCATTER_TILES}"
        )
    workspace = scatter_workspace(group, device)
    is_average = reduce_op == "avg"
    return ready_scatter(workspace, [rows], [weight.B.values], kernel, is_average=is_average)
