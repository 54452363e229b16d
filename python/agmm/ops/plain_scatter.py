"""Matmul + reduce-scatter of operands that need no scales."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from agmm.ops import invariant, kept, portable, scatter_plan, streamed_scatter
from agmm.ops.checks import check_residual, check_scatterable
from agmm.ops.copying import Copying
from agmm.ops.pipeline import LIBRARY, TORCH, Ready, Route, serve
from agmm.ops.products import joined, sum_of_products
from agmm.ops.scatter import Meanwhile, ScatterCall, ScatterSettings
from agmm.planning import legality
from agmm.planning.plans import BY_COPIES, BY_STREAM, BY_TORCH, Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transports import STREAMED
from agmm.runtime import collectives, cpu_scatter, groups, rendezvous
from agmm.runtime.calls import Call
from agmm.runtime.cuda_calls import Kernel, plain_format
from agmm.runtime.cuda_scatter import ReadyScatter, ready_scatter
from agmm.runtime.results import moved
from agmm.runtime.workspaces import cpu_workspace, scatter_workspace

# What torch's op uses until it needs more, by group. A CUDA graph writes to it at every replay.
_workspaces_of_graphs: weakref.WeakKeyDictionary[dist.ProcessGroup, list[torch.Tensor]]
_workspaces_of_graphs = weakref.WeakKeyDictionary()


def keep_for_graph(device: torch.device, group: dist.ProcessGroup) -> None:
    """In a capture, keep the workspace of torch's op as long as the group: torch frees it when a
    later call needs a larger one."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    workspace = symm_mem._group_name_to_workspace_tensor.get(group.group_name)
    known = _workspaces_of_graphs.setdefault(group, [])
    if workspace is not None and all(workspace is not other for other in known):
        known.append(workspace)


kernel_of_torch: Callable[..., torch.Tensor] | None = None
"""torch's own CUDA kernel of the op, while `agmm.async_tp` has put agmm's over it."""


class PlainScatter(ScatterCall):
    """``reduce_scatter(sum of A @ B) (+ bias) (+ residual)``.

    Args:
        As: [M, ..., K] each, of one shape but for K.
        Bs: [K, N] each.
        bias: [N] or None.
        residual: this rank's shard of one, or None.
    """

    is_invariant = False
    """Whether a row's bits may not depend on the other rows."""

    def __init__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        settings: ScatterSettings,
        meanwhile: Meanwhile | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        super().__init__(As[0], group, settings, meanwhile)
        self.residual = residual
        self.As = list(As)
        self.Bs = list(Bs)
        self.bias = bias

    def check(self) -> None:
        settings = self.settings
        check_scatterable(
            *(self.As, self.Bs, self.bias),
            *(self.group.size(), settings.scatter_dim, settings.reduce_op),
        )
        if self.residual is not None:
            shape = self.shape
            shape[self.dim] //= self.group.size()
            check_residual(self.residual, shape, self.A)

    def words(self) -> Call:
        A, B = (self.As[0], self.Bs[0]) if len(self.As) == 1 else (self.As, self.Bs)
        dim, reduce_op = self.dim, self.settings.reduce_op
        return Call(self.op, A=A, B=B, scatter_dim=dim, reduce_op=reduce_op, **self.asked)

    def operands(self) -> tuple[Any, ...]:
        return of_call(self.As, self.Bs, self.bias, self.residual)

    @property
    def columns(self) -> int:
        return self.Bs[0].shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        return self.A.dtype

    def sent(self) -> dict[str, list[torch.Tensor]]:
        return {"A": self.As, "B": self.Bs}

    def why_no_kernel(self) -> str | None:
        return scatter_plan.why_not_native(self.As, self.Bs, self.dim, self.group)

    def asks_a_plan(self) -> bool:
        if self.device.type == "cpu" and self.strict:
            return False
        return super().asks_a_plan()

    def problem(self) -> Problem:
        return scatter_plan.sum_problem(self.As, self.Bs, self.group)

    def otherwise(self, reason: str, *, is_planned: bool = False) -> Route:
        As, Bs, dim = self.As, self.Bs, self.dim
        if self.settings.plan == BY_TORCH:
            return Route(TORCH, lasts=False)
        if scatter_plan.is_worth_joining(As, Bs, dim, self.group):
            As, Bs = ([one] for one in joined(As, Bs))
        if len(As) == 1 and scatter_plan.is_fused(As[0], Bs[0], dim, self.group):
            self.As, self.Bs = As, Bs
            return Route(TORCH, reason, lasts=False)
        # On CUDA the library is a choice, of which nobody is warned.
        is_told = self.strict or self.device.type == "cpu"
        return Route(LIBRARY, reason if is_told else None)

    def instead(self, route: Route, reason: str) -> Route:
        if route.by == TORCH:
            return Route(LIBRARY, reason if self.strict else None)
        return self.otherwise(reason)

    def prepare(self, route: Route) -> Ready:
        if route.by == TORCH:
            return self.by_torch
        return super().prepare(route)

    def by_cpu(self, words: Call) -> torch.Tensor:
        # The scattered dimension first, and all but the columns in one.
        fronts = [A.movedim(self.dim, 0) for A in self.As]
        rows = fronts[0].shape[:-1].numel()
        As, residual = [A.reshape(rows, A.shape[-1]) for A in fronts], self.residual
        if residual is not None:
            residual = residual.movedim(self.dim, 0).flatten(0, -2)
        agreed = f"{list(self.A.shape[:-1])} along {self.dim}"
        if self.is_invariant:
            agreed += ", batch-invariant"
        return cpu_workspace(self.group).reduce_scatter(
            cpu_scatter.plain_sum(As, self.Bs, self.bias, residual, invariant=self.is_invariant),
            self.settings.reduce_op,
            words,
            agreed=agreed,
            meanwhile=self.meanwhile,
        )

    def ready_on_cuda(self, kernel: KernelConfig) -> Ready:
        copying = Copying.of(self.As, self.Bs, self.dim)
        As, Bs = (self.As, self.Bs) if copying is None else copying(self.As, self.Bs)
        call = call_with(kernel, As, Bs, self.group, self.settings.reduce_op)
        return call if copying is None else _Copied(copying, call)

    def streamed(self) -> Plan | str:
        if len(self.As) > 1:
            return f"A: found {len(self.As)} products, wanted one for config={BY_STREAM.name!r}"
        A, B = self.As[0].movedim(self.dim, 0).flatten(0, -2), self.Bs[0]
        reason = invariant.why_not_streamed(A, B)
        kernel = invariant.kernel_of(A, B)
        if reason is not None or kernel is None:
            return reason or "kernels: found no streaming one for it in this build, wanted one"
        plan = Plan(STREAMED, kernel)
        return legality.why_illegal(self.problem(), plan, [kernel]) or plan

    def ready_by_stream(self, kernel: KernelConfig) -> Ready:
        is_average = self.settings.reduce_op == "avg"
        given = kernel, self.As[0], self.Bs[0], self.group
        return streamed_scatter.ready(*given, dim=self.dim, is_average=is_average)

    def ready_by_copies(self) -> Ready:
        size, words = self.group.size(), self.words()
        return portable.ReadyScatter(
            portable.scatters(self.group, self.device, words),
            *(self.dim, size if self.settings.reduce_op == "avg" else 1, str(words)),
        )

    def by_torch(self, *_: Any) -> torch.Tensor:
        """The sum by torch's fused op."""
        A, B = self.As[0].contiguous(), self.Bs[0]
        fused = kernel_of_torch or torch.ops.symm_mem.fused_matmul_reduce_scatter
        # It sums with torch.sum, which autocast would have return float32.
        with groups.of(self.group).lock, torch.amp.autocast(A.device.type, enabled=False):
            out: torch.Tensor = fused(A, B, self.settings.reduce_op, 0, self.group.group_name)
            keep_for_graph(A.device, self.group)
            rendezvous.made.note_torchs()
        return self.with_residual(out if self.bias is None else out.add_(self.bias))

    def by_library(self, words: Call) -> torch.Tensor:
        partial = sum_of_products(None, self.As, self.Bs)
        assert partial is not None
        out = collectives.reduce_scatter(
            partial,
            self.group.group_name,
            self.dim,
            call=words,
            then=f" for {self.settings.reduce_op}",
            meanwhile=self.meanwhile,
        )
        if self.settings.reduce_op == "avg":
            out = out.div_(self.group.size())
        return self.with_residual(out if self.bias is None else out.add_(self.bias))


class _Copied(NamedTuple):
    """A call of operands that are copied first."""

    copying: Copying
    call: ReadyScatter

    def __call__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dim = self.copying.dim
        As, Bs = self.copying(As, Bs)
        if residual is not None:
            residual = residual.movedim(dim, 0)
        return moved(self.call(As, Bs, bias, residual), 0, dim)


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
    it, all of one layout. With ``all_reduce_sms``, as `_core.ScatterProblem` has them, it is that
    of a kernel that sends finished tiles, for all rows on all ranks. Collective at a group's first.
    """
    return ready_scatter(
        scatter_workspace(group, As[0].device),
        As,
        Bs,
        Kernel(kernel.core, plain_format("A", As[0])),
        is_average=reduce_op == "avg",
        all_reduce_sms=all_reduce_sms,
    )


def scatter(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    settings: ScatterSettings,
    meanwhile: Meanwhile | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply, sum and scatter: by the call that served this kind before, or as `serve` decides.
    Collective; errors as those of `serve`."""
    kind = None
    if settings.plan in (None, BY_COPIES, BY_STREAM) and As:
        kind = kind_of_scatter(As, Bs, bias, residual, *settings)
        operands = of_call(As, Bs, bias, residual)
        found: torch.Tensor | None = kept.call_kept(group, kind, *operands)
        if found is not None:
            if meanwhile is not None:
                meanwhile()
            return found
    if not As:
        check_scatterable(As, Bs, bias, group.size(), settings.scatter_dim, settings.reduce_op)
    return serve(PlainScatter(As, Bs, bias, group, settings, meanwhile, residual), kind)


def of_call(As: Any, Bs: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    """The operands of a prepared call."""
    return (As, Bs, bias) if residual is None else (As, Bs, bias, residual)


def kind_of_one(
    A: Any, B: Any, scatter_dim: Any, reduce_op: Any, strict: bool, plan: Plan | None = None
) -> Any:
    """`kind_of_scatter` of one product without a bias."""
    return kept.kind_of_product((PlainScatter.op, scatter_dim, reduce_op, strict, plan), A, B)


def kind_of_scatter(
    As: Sequence[Any],
    Bs: Sequence[Any],
    bias: Any,
    residual: Any,
    scatter_dim: Any,
    reduce_op: Any,
    strict: bool,
    plan: Plan | None = None,
) -> Any:
    """The kind under which calls are kept: see `kept.kind_of_call`."""
    settings = PlainScatter.op, scatter_dim, reduce_op, strict, plan
    if bias is None and residual is None and len(As) == 1 and len(Bs) == 1:
        return kind_of_one(As[0], Bs[0], *settings[1:])
    if residual is not None:
        return kept.kind_of_call(settings, list(As), list(Bs), bias, residual)
    if len(As) == 1 and len(Bs) == 1:
        return kept.kind_of_call(settings, As[0], Bs[0], bias)
    return kept.kind_of_call(settings, list(As), list(Bs), bias)
