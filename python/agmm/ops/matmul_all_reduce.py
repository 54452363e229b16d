"""``agmm.matmul_all_reduce`` and its torch op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import kept, scatter_cuda, scatter_plan, small_collectives
from agmm.ops.autograd import MatmulAllReduce
from agmm.ops.checks import check_operand, check_reducible, needs_gradient
from agmm.ops.library import library
from agmm.ops.operands import autocast, is_plain, is_watched
from agmm.ops.paths import fall_back
from agmm.planning import call_plans
from agmm.runtime import backends, groups
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.collectives import by_newer_name
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import cpu_workspace, scatter_workspace, take_turn


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    strict: bool = False,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    check_reducible(A, B, bias)
    call = Call("matmul_all_reduce", A=A, B=B)
    shape = (*A.shape[:-1], B.shape[1])
    if 0 in shape:
        agree = call_plans.agree if A.device.type == "cuda" else None
        what = f"matmul_all_reduce to {list(shape)} {A.dtype}"
        take_turn(group, A.device, what, call, agree=agree)
        return A.new_empty(shape)
    out = None
    if not backends.is_fake(group):
        rows = A.reshape(A.shape[:-1].numel(), A.shape[-1])
        fused = by_scatter_and_gather if A.device.type == "cuda" else _on_cpu
        try:
            with calling(call):
                out = fused(rows, B, bias, group, call, agreed=f"{list(shape)}", strict=strict)
        except Unsupported as error:
            fall_back(str(error), strict)
    if out is not None:
        return reshaped(out, shape)
    out = small_collectives.all_reduced(torch.matmul(A, B), group, call)
    return out if bias is None else out.add_(bias)


def _on_cpu(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    call: Call,
    *,
    agreed: str,
    strict: bool,
) -> torch.Tensor:
    """By the CPU backend. A is [M, K]. Raises Unsupported where that cannot serve the call."""
    reason = scatter_plan.why_not_on_cpu([A], [B], 0)
    if reason is not None:
        raise Unsupported(reason)
    return cpu_workspace(group).matmul_all_reduce(A, B, bias, call, agreed=agreed)


def by_scatter_and_gather(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    call: Call,
    *,
    agreed: str,
    strict: bool,
) -> torch.Tensor | None:
    """On CUDA: by one kernel, or by one that scatters the sum, then an all-gather, so that all
    ranks have the same bits; None where the unfused path is planned. A is [M, K]. Rows that the
    ranks cannot share equally are filled up with zeros. Raises Unsupported where no kernel can
    serve the call.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        if strict:
            raise Unsupported("group: 1 rank, which has nothing to sum")
        return None
    reason = scatter_plan.why_not_native([A], [B], 0, group)
    if reason is not None:
        raise Unsupported(reason)
    missing = -A.shape[0] % world_size
    plan = scatter_plan.all_reduce_plan(A.shape[0] + missing, A, B, group, strict=strict)
    if plan.way == "unfused" and not strict:
        return None
    if strict and plan.kernel is None:  # before the sums are made
        rows = (A.shape[0] + missing) // world_size
        of_rank = A.new_empty(1, 1).expand(rows, B.shape[1])
        reason = small_collectives.why_not("all_gather", of_rank, group, strict=True)
        if reason is not None:
            raise Unsupported(reason)
    whole = A if missing == 0 else torch.nn.functional.pad(A, (0, 0, 0, missing))
    if plan.kernel is not None:
        out = scatter_cuda.all_reduce(whole, B, bias, group, plan.kernel, plan.sm_count)
        return out if missing == 0 else out[: A.shape[0]]
    part = scatter_cuda.run([whole], [B], bias, group, 0, "sum", strict=True)
    if part is None:
        raise Unsupported("plan: found no kernel of this build that sends tiles, wanted one")
    return small_collectives.all_gathered(part, group, call, strict=strict)[: A.shape[0]]


class KeptAllReduce:
    """Calls on CUDA like one before, whose operands need no checks, no copies and no plan.

    ``plan`` None or unfused: a matmul, then ``collective``, an all-reduce. Else ``collective`` is
    the gather behind a scatter, the backend's for None.
    """

    def __init__(
        self,
        plan: scatter_plan.AllReducePlan | None,
        collective: small_collectives.CollectiveCall | None,
    ) -> None:
        self._plan = plan if plan is not None and plan.way != "unfused" else None
        self._collective = collective

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor | None:
        """None where the collective's memory has been released."""
        plan, collective = self._plan, self._collective
        if collective is not None and not collective.is_ready:
            return None
        if plan is None:
            assert collective is not None
            out = torch.matmul(A, B)
            collective(out, out)
            return out if bias is None else out.add_(bias)
        rows = A if A.dim() == 2 else A.view(-1, A.shape[-1])
        if plan.kernel is not None:
            out = scatter_cuda.all_reduce(rows, B, bias, group, plan.kernel, plan.sm_count)
        else:
            part = scatter_cuda.run([rows], [B], bias, group, 0, "sum", strict=True)
            assert part is not None
            out = part.new_empty(rows.shape[0], B.shape[1])
            if collective is not None:
                collective(part, out)
            else:
                with groups.of(group).lock:
                    gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
                    gather(out, part, group)
        return reshaped(out, [*A.shape[:-1], B.shape[1]])


def _keep(
    keep_as: Any,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    strict: bool,
) -> None:
    """After a call on CUDA that returned ``out``: `kept.keep`, where later ones may do the same."""
    if (
        out.numel() == 0
        or backends.is_fake(group)
        or not (A.is_contiguous() and out.is_contiguous())
    ):
        return
    rows = A.view(-1, A.shape[-1])
    plan = None
    if scatter_plan.why_not_native([rows], [B], 0, group) is None and group.size() > 1:
        if rows.shape[0] % group.size():
            return
        plan = scatter_plan.all_reduce_plan(rows.shape[0], rows, B, group, strict=strict)
    collective = None
    if plan is None or plan.way == "unfused":
        collective = small_collectives.prepare_again("all_reduce", out, group)
        if strict or collective is None:
            return
    else:
        if scatter_workspace(group, A.device).slot_bytes == 0:  # which a fused call has made
            return
        if plan.way == "scatter":
            part = out.view(-1, out.shape[-1])[: rows.shape[0] // group.size()]
            collective = small_collectives.prepare_again("all_gather", part, group, strict=strict)
            if strict and collective is None:
                return
    kept.keep(group, keep_as, KeptAllReduce(plan, collective))


def _fake(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    strict: bool = False,
) -> torch.Tensor:
    check_reducible(A, B, bias)
    return A.new_empty((*A.shape[:-1], B.shape[1]))


def _autograd(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    given = A, B, bias
    out: torch.Tensor
    if needs_gradient(*given):
        out = MatmulAllReduce.apply(*given, *settings)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            out = torch.ops.agmm._matmul_all_reduce.default(*given, *settings)
    return out


for _key in ("CPU", "CUDA"):
    library.impl("_matmul_all_reduce", _impl, _key)
library.impl("_matmul_all_reduce", _fake, "Meta")
library.impl("_matmul_all_reduce", _autograd, "Autograd")


def matmul_all_reduce(
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """``all_reduce(A @ B) (+ bias)``: the end of a tensor-parallel layer without sequence
    parallelism, as in serving. Collective.

    On the CPU agmm sends each rank its part of the rows as soon as it is computed, and finished
    rows to all, while others are computed: every rank gets the same bits, in every call. Sums are
    made in float32 (float64 for float64), in the order of the ranks, and rounded once; what goes to
    another rank on the way is rounded too. On Hopper, for bf16 and fp16 with N and K_local
    multiples of 8, it is the scatter of `matmul_reduce_scatter` in one kernel and an all-gather of
    the result, with the same promise but for the order of a sum, which is each row's own and always
    the same; or one kernel as on the CPU. Each is taken where the cost model has it faster, as with
    some thousand rows, one kernel between 4 GPUs where K_local is some 3000 to 5000; else a matmul
    and an all-reduce. That is agmm's where it is meant to serve it
    (`agmm.collectives.all_reduce`), with the same bits on all ranks, else the backend's.

    Differentiable once. The gradient of ``out`` is taken to be the same on all ranks, as it is
    where all of them compute the same from ``out``, so the backward communicates nothing: ``dA =
    dout @ Bᵀ`` and ``dB = Aᵀ @ dout``. It is that of Megatron's and torch's row-parallel layers
    without sequence parallelism. Ranks that use ``out`` for something of their own have to sum its
    gradient over the ranks themselves. Under autocast the operands are cast as
    ``torch.nn.functional.linear`` casts them.

    Args:
        A: [M, ..., K_local], this rank's columns of the whole A; the same leading sizes, of any
            number of rows, on all ranks.
        B: [K_local, N], this rank's rows of the whole B, row-major or column-major. On the CPU
            K_local is free on each rank, on CUDA the same on all.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        bias: [N], the same on all ranks; added once, to the sum, before it is rounded; on the
            unfused path in its dtype, with a rounding of its own. Its gradient is the same on all
            ranks.
        strict: raise `Unsupported` instead of taking the unfused path (``matmul`` +
            ``all_reduce``), of which agmm warns once for each reason why it cannot do otherwise.

    Returns:
        ``out`` [M, ..., N], the same on all ranks.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    keep_as = None
    if not torch.is_autocast_enabled("cuda"):  # which casts operands
        keep_as = kept.kind_on_gpu(("matmul_all_reduce",), strict, A, B, bias)
    if keep_as is not None:
        known = groups.resolved(group)
        again: torch.Tensor | None = kept.call_kept(known, keep_as, A, B, bias, known)
        if again is not None:
            return again
    for name, tensor in (("A", A), ("B", B), *([] if bias is None else [("bias", bias)])):
        check_operand(name, tensor)
    if strict is not True and strict is not False:
        raise InvalidArgument(f"strict: found {strict!r}, wanted True or False")
    bias, A, B = autocast((bias, A, B), A.device)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    given = (A, B) if bias is None else (A, B, bias)
    if not is_watched() and all(map(is_plain, given)):
        out = _impl(A, B, bias, group_name, world_size, strict)
        if keep_as is not None:
            _keep(keep_as, A, B, bias, out, groups.resolved(group), strict)
        return out
    op = torch.ops.agmm._matmul_all_reduce.default
    found: torch.Tensor = op(A, B, bias, group_name, world_size, strict)
    return found
