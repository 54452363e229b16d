"""How a matmul's rows are scattered, and how the rows of a backward are gathered beside it; the
same on all ranks, as long as they call with the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops.checks import FLOATS
from agmm.planning import call_plans, cost_model, formats, legality
from agmm.planning.plans import BY_COPIES, BY_STREAM, BY_TORCH, UNFUSED, Plan
from agmm.planning.problems import (
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MAX_SIZE,
    KernelConfig,
    Problem,
)
from agmm.planning.transports import LAGGED, SCATTER, Transport
from agmm.runtime import backends, symmetric
from agmm.runtime.workspaces import cuda_workspace

_FUSED_DTYPES = (torch.bfloat16, torch.float16)


def _has_kernels(device: torch.device, group: dist.ProcessGroup) -> bool:
    return (
        device.type == "cuda"
        and symmetric.why_group_unfused(group, device) is None
        and dist.get_world_size(group) > 1
        and not backends.is_fake(group)
    )


def _problem(A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup) -> Problem:
    return call_plans.problem_of(
        (A.numel() // A.shape[-1], B.shape[1], B.shape[0]),
        A.dtype,
        A.device,
        op=MATMUL_REDUCE_SCATTER,
        group=group,
        has_all_sms=True,
    )


def _is_planned(A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the plan of ``A @ B`` on a GPU is torch's fused op. Collective at first use."""
    return call_plans.planner(group, A.device).plan(_problem(A, B, group)) == BY_TORCH


def why_not_native(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    scatter_dim: int,
    group: dist.ProcessGroup,
) -> str | None:
    """The reason why agmm's own matmul + reduce-scatter cannot serve this call, whose result has
    elements, or None. The same on all ranks, as long as they call with the same shapes and
    dtypes. Collective at first use on GPUs."""
    if As[0].device.type != "cuda":
        return why_not_on_cpu(As, Bs, scatter_dim)
    return _why_no_product(As, Bs, scatter_dim) or _why_no_kernel(As, Bs, group)


def why_not_on_cpu(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], scatter_dim: int
) -> str | None:
    """The reason why the CPU backend cannot serve this call, or None."""
    A = As[0]
    if A.device.type != "cpu":
        return f"A: device {A.device}, agmm's own sums over the ranks want cpu"
    if A.dtype not in FLOATS:
        return f"A: dtype={A.dtype}, the CPU backend wants a floating-point type"
    return _why_no_product(As, Bs, scatter_dim)


def _why_no_product(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], scatter_dim: int
) -> str | None:
    A = As[0]
    if scatter_dim % A.dim() == A.dim() - 1:
        return f"scatter_dim: {scatter_dim}, the fused path wants another than the last"
    rows = A.shape[:-1].numel()
    if rows > MAX_SIZE:
        return f"A: {rows} rows, the fused path wants at most {MAX_SIZE}"
    return None


def _why_no_kernel(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> str | None:
    reason = symmetric.why_group_unfused(group, As[0].device)
    dtype = str(As[0].dtype).removeprefix("torch.")
    for B in Bs:
        reason = reason or legality.why_unfused(dtype, B.shape[1], B.shape[0], a="A")
    return reason or legality.why_too_many_products(formats.BITS_16, len(As))


def sum_problem(
    As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Problem:
    """What the planner is asked of a sum of products."""
    rows = As[0].shape[:-1].numel()
    shape = rows, Bs[0].shape[1], sum(B.shape[0] for B in Bs)
    return _kernel_problem(MATMUL_REDUCE_SCATTER, shape, As[0], Bs[0], group)


def _kernel_problem(
    op: str,
    shape: tuple[int, int, int],
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup,
) -> Problem:
    column_major = B.stride(0) == 1
    return call_plans.problem_of(
        shape, A.dtype, A.device, op=op, group=group, column_major=column_major
    )


def named(config: Any, others: tuple[str, ...] = ()) -> Plan | None:
    """The plan that a caller named as the ``config`` of a sum; None for none, and for one of
    ``others``, names that the op takes too.

    Raises:
        InvalidArgument: it is no such name.
    """
    if config is None or config == "" or config in others:
        return None
    for plan in (BY_COPIES, UNFUSED):
        if config == plan.name:
            return plan
    names = ", ".join(repr(name) for name in (BY_COPIES.name, UNFUSED.name, *others))
    raise InvalidArgument(f"config: found {config!r}, wanted {names} or None")


def named_of_scatter(config: Any) -> Plan | None:
    """`named` of a matmul + reduce-scatter of 16 bits, which has `BY_STREAM` too."""
    return BY_STREAM if config == BY_STREAM.name else named(config, (BY_STREAM.name,))


class AllReducePlan(NamedTuple):
    """How a matmul + all-reduce is to be computed."""

    way: Transport
    kernel: KernelConfig | None
    """The kernel of the lagged way."""
    sm_count: int
    """Multiprocessors that every rank has for it; the same on all ranks."""
    scatters: KernelConfig | None = None
    """The kernel of the way that scatters the sum and gathers it."""


def all_reduce_plan(
    rows: int,
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    strict: bool = False,
    choose: Callable[[Problem], Plan] | None = None,
) -> AllReducePlan:
    """The plan of a matmul + all-reduce of ``A @ B``. Collective at first use.

    Args:
        rows: those of A, with the rows of zeros that let the ranks share them equally.
        strict: leave the unfused way out, where there is another.
        choose: what says the plan of a problem in place of the planner.
    """
    shape = rows, B.shape[1], B.shape[0]
    problem = _kernel_problem(MATMUL_ALL_REDUCE, shape, A, B, group)
    return all_reduce_plan_of(problem, group, A.device, strict=strict, choose=choose)


def all_reduce_plan_of(
    problem: Problem,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    strict: bool = False,
    choose: Callable[[Problem], Plan] | None = None,
) -> AllReducePlan:
    """The plan of a matmul + all-reduce, for a problem of any format; arguments as those of
    `all_reduce_plan`. Collective at first use."""
    if choose is None:
        planner = call_plans.planner(group, device)
        choose = planner.fused_plan if strict else planner.plan
    plan = choose(problem)
    way = plan.transport
    lagged, scatters = (plan.kernel if way == one else None for one in (LAGGED, SCATTER))
    return AllReducePlan(way, lagged, problem.sm_count, scatters)


def is_fused(A: torch.Tensor, B: torch.Tensor, scatter_dim: int, group: dist.ProcessGroup) -> bool:
    """Whether torch's ``symm_mem.fused_matmul_reduce_scatter`` serves ``A @ B``: where it is legal
    and planned, by a row of a table or since the cost model has it faster than a matmul and a
    reduce-scatter by what it costs the host."""
    if A.dtype not in _FUSED_DTYPES or scatter_dim % A.dim() != 0 or A.numel() == 0:
        return False
    if not _has_kernels(A.device, group):
        return False
    # The plan is asked first, since no workspace is to be made where all calls are small.
    if not _is_planned(A, B, group):
        return False
    try:  # finds out whether the GPUs reach each other
        cuda_workspace(group, A.device).ensure(1)
    except Unsupported:
        return False
    return True


def is_worth_joining(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    scatter_dim: int,
    group: dist.ProcessGroup,
) -> bool:
    """Whether the sum of several products is to be made one, ``[A1|A2] @ [B1; B2]``, so that
    torch's fused op scatters it.

    That copies the operands. By the cost model, on H200 with the shapes of Llama's layers, it costs
    less than the fused op saves while they have no more columns together than the result has, and
    more than that where they have twice as many.
    """
    if len(As) < 2:
        return False
    columns = sum(A.shape[-1] for A in As)
    if columns > Bs[0].shape[1]:
        return False
    # These have the shapes of the joined operands, without their memory.
    A = As[0].new_empty(1).expand(*As[0].shape[:-1], columns)
    B = Bs[0].new_empty(1).expand(columns, Bs[0].shape[1])
    return is_fused(A, B, scatter_dim, group)


def is_gather_by_copies(
    shard: torch.Tensor,
    dout: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_scatter_by_torch: bool,
) -> bool:
    """Whether copy engines are to gather ``shard`` beside the product ``dout @ B``, whose rows are
    scattered. They do so only where the workspace is large enough, as it is after a fused
    forward."""
    if shard.numel() == 0 or not _has_kernels(shard.device, group):
        return False
    gathered_bytes = shard.nbytes * dist.get_world_size(group)
    if cuda_workspace(group, shard.device).slot_bytes < gathered_bytes:
        return False
    problem = _problem(dout, B, group)
    return cost_model.is_gather_by_copies(problem, is_scatter_by_torch=is_scatter_by_torch)
