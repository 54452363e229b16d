"""``matmul_reduce_scatter`` by agmm's kernels. Calls that were found to be legal are kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import kept, scatter_plan
from agmm.ops.paths import kind_of
from agmm.planning.plans import KernelConfig
from agmm.runtime import groups, nan_check
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.cuda_calls import Kernel, b_layout, plain_format
from agmm.runtime.cuda_scatter import ReadyScatter, ready_scatter
from agmm.runtime.results import moved
from agmm.runtime.workspaces import scatter_workspace

_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, ReadyScatter | None]]
_calls = weakref.WeakKeyDictionary()
"""None where another way is planned. They end with their group."""

_MAX_CALLS = 4096  # per group
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def find(
    A: Any, B: Any, bias: Any, group: dist.ProcessGroup, reduce_op: Any, strict: bool
) -> ReadyScatter | None:
    """The call that served one product of such operands before, along dimension 0 and as they are
    given, which then need no checks but whether they require gradients or are to be negated; or
    None, also for what is no tensor. Errors as those of `kept.find`."""
    try:
        found: ReadyScatter | None
        found = kept.find(group, _ready_key(A, B, bias, reduce_op, strict))
    except InvalidArgument:
        raise
    except (AttributeError, RuntimeError, TypeError):  # no tensors, not strided, or no name
        return None
    return found


def keep(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    reduce_op: str,
    strict: bool,
    call: ReadyScatter,
) -> None:
    """What `find` returns from now on for such operands."""
    kept.keep(group, _ready_key(A, B, bias, reduce_op, strict), call)


def _ready_key(A: Any, B: Any, bias: Any, reduce_op: Any, strict: bool) -> Any:
    return (
        type(A),
        A.shape,
        A.stride(),
        A.dtype,
        A.get_device(),
        type(B),
        B.shape,
        B.stride(),
        B.dtype,
        B.get_device(),
        None if bias is None else (type(bias), *kind_of(bias)),
        reduce_op,
        strict,
    )


def _key(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    reduce_op: str,
    strict: bool,
) -> Any:
    bias_kind = None if bias is None else kind_of(bias)
    return (reduce_op, strict, bias_kind, *map(kind_of, As), *map(kind_of, Bs))


def run(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_dim: int,
    reduce_op: str,
    *,
    strict: bool,
) -> torch.Tensor | None:
    """Checked operands for which `scatter_plan.why_not_native` has no reason. Collective.

    Returns:
        out, or None where another way is planned; not that under ``strict``.

    Raises:
        Unsupported: the group's GPUs do not reach each other, or have too little memory; all ranks
            raise.
    """
    if dist.get_world_size(group) == 1:
        raise Unsupported("group: 1 rank, which has nothing to scatter")
    given = [*As, *Bs]
    if nan_check.active:  # the kernel sends products as it computes them
        for name, tensors in (("A", As), ("B", Bs)):
            for tensor in tensors:
                rank = dist.get_rank(group)
                nan_check.look_through("matmul_reduce_scatter", name, tensor, rank)
    if scatter_dim != 0:
        As = [A.movedim(scatter_dim, 0) for A in As]
    # Copies, not another path: strides differ between ranks, and the path must not.
    As = [A if A.is_contiguous() else A.contiguous() for A in As]
    layouts = [b_layout(B) for B in Bs]
    is_column_major = all(layout is not None and layout.column_major for layout in layouts)
    Bs = [_as_tma_wants(B, is_column_major) for B in Bs]
    key = _key(As, Bs, bias, reduce_op, strict)
    known = _calls.setdefault(group, {})
    if key in known:
        call = known[key]
    else:
        in_words = Call("matmul_reduce_scatter", A=As, B=Bs, reduce_op=reduce_op)
        with groups.of(group).lock, calling(in_words):
            groups.check_alive(group)
            call = _prepare(As, Bs, group, reduce_op, strict)
            if len(known) >= _MAX_CALLS:
                known.clear()
            known[key] = call
    if call is None:
        return None
    out = call(As, Bs, bias)
    as_given = all(one is other for one, other in zip(given, (*As, *Bs), strict=True))
    is_plain = all(type(one) in _PLAIN for one in given)
    if len(As) == 1 and as_given and is_plain:
        keep(As[0], Bs[0], bias, group, reduce_op, strict, call)
    return out if scatter_dim == 0 else moved(out, 0, scatter_dim)


def all_reduce(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    kernel: KernelConfig,
    sm_count: int,
) -> torch.Tensor:
    """The sum over the ranks of a checked product, by a kernel that sends finished tiles to all.
    Collective.

    Args:
        A: [M, K], M a multiple of the ranks.
        kernel, sm_count: as `scatter_plan.AllReducePlan` has them.

    Returns:
        out [M, N], with the same bits on all ranks.

    Raises:
        Unsupported: as `run`.
    """
    if nan_check.active:  # as in `run`
        for name, tensor in (("A", A), ("B", B)):
            nan_check.look_through("matmul_all_reduce", name, tensor, dist.get_rank(group))
    A = A if A.is_contiguous() else A.contiguous()
    B = _as_tma_wants(B, B.stride(0) == 1)
    key = ("all_reduce", kernel, None if bias is None else kind_of(bias), kind_of(A), kind_of(B))
    known = _calls.setdefault(group, {})
    call = known.get(key)
    if call is None:
        with groups.of(group).lock:
            groups.check_alive(group)
            call = call_with(kernel, [A], [B], group, "sum", all_reduce_sms=sm_count)
            if len(known) >= _MAX_CALLS:
                known.clear()
            known[key] = call
    return call([A], [B], bias)


def _as_tma_wants(B: torch.Tensor, is_column_major: bool) -> torch.Tensor:
    layout = b_layout(B)
    wanted = layout is not None and (is_column_major, 0) == (
        layout.column_major,
        layout.leading % _core.ALIGNMENT,
    )
    if wanted:
        return B
    return B.t().contiguous().t() if is_column_major else B.contiguous()


def _prepare(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    reduce_op: str,
    strict: bool,
) -> ReadyScatter | None:
    plan = scatter_plan.kernel_plan(As, Bs, group, strict=strict)
    if plan is None or plan.kernel is None:
        return None
    return call_with(plan.kernel, As, Bs, group, reduce_op)


def call_with(
    kernel: KernelConfig,
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    reduce_op: str,
    *,
    all_reduce_sms: int = 0,
) -> ReadyScatter:
    """The call of one of agmm's kernels, of contiguous A along dimension 0 and of B as TMA wants
    it, all of one layout; with ``all_reduce_sms``, as `_core.ScatterProblem` has them, of those
    that send finished tiles, for all rows on all ranks. Collective at a group's first."""
    return ready_scatter(
        scatter_workspace(group, As[0].device),
        As,
        Bs,
        Kernel(kernel.core, plain_format("A", As[0])),
        is_average=reduce_op == "avg",
        all_reduce_sms=all_reduce_sms,
    )
