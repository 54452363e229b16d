"""How a ``matmul_reduce_scatter`` is carried out: by agmm, by torch's fused op, or unfused."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from agmm.errors import Unsupported
from agmm.ops import scatter_cuda, scatter_plan
from agmm.ops.checks import check_scatterable
from agmm.ops.paths import fall_back
from agmm.ops.products import joined, sum_of_products
from agmm.planning import call_plans
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan
from agmm.runtime import backends, collectives, groups, nan_check, rendezvous
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.results import moved, reshaped
from agmm.runtime.workspaces import cpu_workspace, take_turn

Meanwhile = Callable[[], None]
"""What a rank does while its parts are on their way. Called once; what it raises is raised when the
call is done, since the other ranks wait for that."""

# What torch's op uses until it needs more, by group. A CUDA graph writes to it at every replay.
_workspaces_of_graphs: weakref.WeakKeyDictionary[dist.ProcessGroup, list[torch.Tensor]]
_workspaces_of_graphs = weakref.WeakKeyDictionary()


def keep_for_graph(device: torch.device, group: dist.ProcessGroup) -> None:
    """In a capture, keep the workspace of torch's op as long as the group: torch frees it when a
    later call needs a larger one."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    workspace = symm_mem._group_name_to_workspace_tensor.get(group.group_name)
    kept = _workspaces_of_graphs.setdefault(group, [])
    if workspace is not None and all(workspace is not other for other in kept):
        kept.append(workspace)


kernel_of_torch: Callable[..., torch.Tensor] | None = None
"""torch's own CUDA kernel of the op, while `agmm.async_tp` has put agmm's over it."""


def run(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
    strict: bool = False,
    *,
    meanwhile: Meanwhile | None = None,
) -> torch.Tensor:
    """The op ``_matmul_reduce_scatter``, of checked or unchecked operands."""
    group = groups.group_of_size(group_name, world_size)
    check_scatterable(As, Bs, bias, world_size, scatter_dim, reduce_op)
    scatter_dim %= As[0].dim()
    if backends.is_fake(group):
        return unfused(As, Bs, bias, group, scatter_dim, reduce_op, meanwhile)
    if has_no_elements(As[0], Bs[0]):
        return without_elements(As, Bs, group, scatter_dim, reduce_op, strict, meanwhile)
    reason = scatter_plan.why_not_native(As, Bs, scatter_dim, group)
    if reason is None:
        try:
            if As[0].device.type == "cpu":
                if not strict and _prefers_unfused_on_cpu(As, Bs, group, scatter_dim, reduce_op):
                    return unfused(As, Bs, bias, group, scatter_dim, reduce_op, meanwhile)
                return native_cpu(As, Bs, bias, group, scatter_dim, reduce_op, meanwhile)
            out = scatter_cuda.run(As, Bs, bias, group, scatter_dim, reduce_op, strict=strict)
            if out is not None:
                if meanwhile is not None:  # the kernel fills the GPU
                    meanwhile()
                return out
            reason = "plan: the unfused path is faster"
        except Unsupported as error:
            reason = str(error)
    if scatter_plan.is_worth_joining(As, Bs, scatter_dim, group):
        As, Bs = ([one] for one in joined(As, Bs))
    if len(As) == 1 and scatter_plan.is_fused(As[0], Bs[0], scatter_dim, group):
        out = by_the_op_of_torch(As[0], Bs[0], group, reduce_op)
        if meanwhile is not None:  # torch's op has no end that could be awaited later
            meanwhile()
        return out if bias is None else out.add_(bias)
    if strict or As[0].device.type == "cpu":  # on CUDA it is a choice, of which nobody is warned
        fall_back(reason, strict)
    return unfused(As, Bs, bias, group, scatter_dim, reduce_op, meanwhile)


def _prefers_unfused_on_cpu(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
) -> bool:
    with calling(_call_of(As, Bs, scatter_dim, reduce_op)):
        return scatter_plan.prefers_unfused_on_cpu(As, Bs, group)


def has_no_elements(A: torch.Tensor, B: torch.Tensor) -> bool:
    """Whether ``A @ B`` has none, of checked operands."""
    return A.shape[:-1].numel() == 0 or B.shape[1] == 0


def without_elements(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
    strict: bool = False,
    meanwhile: Meanwhile | None = None,
) -> torch.Tensor:
    """A checked call whose result has no elements: it moves nothing and takes its turn."""
    shape = [*As[0].shape[:-1], Bs[0].shape[1]]
    what = f"matmul_reduce_scatter to {shape} {As[0].dtype} along {scatter_dim}, {reduce_op}"
    is_planned = scatter_plan.why_not_native(As, Bs, scatter_dim, group) is None
    is_planned = is_planned and not (strict and As[0].device.type == "cpu")
    call = _call_of(As, Bs, scatter_dim, reduce_op)
    agree = call_plans.agree if is_planned else None
    take_turn(group, As[0].device, what, call, agree=agree)
    if meanwhile is not None:
        meanwhile()
    shape[scatter_dim] //= group.size()
    return As[0].new_empty(shape)


def _call_of(
    As: list[torch.Tensor], Bs: list[torch.Tensor], scatter_dim: int, reduce_op: str
) -> Call:
    A, B = (As[0], Bs[0]) if len(As) == 1 else (As, Bs)
    return Call("matmul_reduce_scatter", A=A, B=B, scatter_dim=scatter_dim, reduce_op=reduce_op)


def native_cpu(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
    meanwhile: Meanwhile | None = None,
) -> torch.Tensor:
    """By the CPU backend, of checked operands for which `scatter_plan.why_not_native` has no
    reason."""
    # The scattered dimension first, and all but the columns in one.
    fronts = [A.movedim(scatter_dim, 0) for A in As]
    rows = fronts[0].shape[:-1]
    call = _call_of(As, Bs, scatter_dim, reduce_op)
    with calling(call):
        workspace = cpu_workspace(group)
    out = workspace.matmul_reduce_scatter(
        [A.reshape(rows.numel(), A.shape[-1]) for A in fronts],
        Bs,
        bias,
        reduce_op,
        call,
        agreed=f"{list(As[0].shape[:-1])} along {scatter_dim}",
        meanwhile=meanwhile,
    )
    shape = (rows[0] // group.size(), *rows[1:], out.shape[1])
    return moved(reshaped(out, shape), 0, scatter_dim)


def by_plan(plan: Plan, A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum along dimension 0 as a plan that is legal for it has it, whatever is planned: to
    measure it. A [M, K] is contiguous and B [K, N] as TMA wants it. Collective."""
    if plan == UNFUSED:
        return unfused([A], [B], None, group, 0, "sum")
    if plan == BY_TORCH:
        return by_the_op_of_torch(A, B, group, "sum")
    if plan.kernel is None:
        return native_cpu([A], [B], None, group, 0, "sum")
    return scatter_cuda.call_with(plan.kernel, [A], [B], group, "sum")([A], [B], None)


def by_the_op_of_torch(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup, reduce_op: str
) -> torch.Tensor:
    if nan_check.active:
        for name, tensor in (("A", A), ("B", B)):
            rank = dist.get_rank(group)
            nan_check.look_through("matmul_reduce_scatter", name, tensor, rank)
    fused = kernel_of_torch or torch.ops.symm_mem.fused_matmul_reduce_scatter
    # It sums with torch.sum, which autocast would have return float32.
    with groups.of(group).lock, torch.amp.autocast(A.device.type, enabled=False):
        out: torch.Tensor = fused(A.contiguous(), B, reduce_op, 0, group.group_name)
        keep_for_graph(A.device, group)
        rendezvous.made.note_torchs()
    return out


def unfused(
    As: list[torch.Tensor],
    Bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
    meanwhile: Meanwhile | None = None,
) -> torch.Tensor:
    partial = sum_of_products(None, As, Bs)
    assert partial is not None
    call = _call_of(As, Bs, scatter_dim, reduce_op)
    out = collectives.reduce_scatter(
        partial,
        group.group_name,
        scatter_dim,
        call=call,
        then=f" for {reduce_op}",
        meanwhile=meanwhile,
    )
    if reduce_op == "avg":
        out = out.div_(group.size())
    return out if bias is None else out.add_(bias)
