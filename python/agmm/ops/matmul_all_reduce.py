"""``agmm.matmul_all_reduce`` and its torch op."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import kept, scatter_plan, small_collectives
from agmm.ops.autograd import MatmulAllReduce
from agmm.ops.checks import check_operand, check_reducible, needs_gradient
from agmm.ops.library import library
from agmm.ops.operands import autocast, is_plain, is_watched
from agmm.ops.pipeline import KERNEL, LIBRARY, OpCall, Ready, Route, serve
from agmm.ops.plain_scatter import Copying, call_with
from agmm.planning import call_plans
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.collectives import by_newer_name
from agmm.runtime.cuda_scatter import ReadyScatter
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import cpu_workspace, take_turn


class AllReduce(OpCall[torch.Tensor]):
    """``all_reduce(A @ B) (+ bias)``.

    Args:
        A: [M, ..., K].
        B: [K, N].
        bias: [N] or None.
    """

    op = "matmul_all_reduce"

    def __init__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        strict: bool,
    ) -> None:
        self.A, self.B, self.bias = A, B, bias
        self.device = A.device
        self.group = group
        self.strict = strict

    def check(self) -> None:
        check_reducible(self.A, self.B, self.bias)

    def words(self) -> Call:
        return Call(self.op, A=self.A, B=self.B)

    @property
    def shape(self) -> list[int]:
        """The sizes of the result."""
        return [*self.A.shape[:-1], self.B.shape[1]]

    @property
    def rows(self) -> torch.Tensor:
        """A as a matrix."""
        return self.A.reshape(self.A.shape[:-1].numel(), self.A.shape[-1])

    @property
    def missing(self) -> int:
        """Rows of zeros that A lacks for the ranks to share them equally."""
        return -self.A.shape[:-1].numel() % self.group.size()

    def is_empty(self) -> bool:
        return 0 in self.shape

    def without_elements(self, words: Call) -> torch.Tensor:
        agree = call_plans.agree if self.device.type == "cuda" else None
        what = f"{self.op} to {self.shape} {self.A.dtype}"
        take_turn(self.group, self.device, what, words, agree=agree)
        return self.A.new_empty(self.shape)

    def look(self, route: Route, words: Call) -> None:
        # A kernel sends products as it computes them; other routes look through what they send.
        if nan_check.active and route.by == KERNEL and self.device.type == "cuda":
            rank = groups.of(self.group).rank
            for name, tensor in (("A", self.A), ("B", self.B)):
                nan_check.look_through(words.op, name, tensor, rank)

    def route(self) -> Route:
        if self.device.type == "cpu":
            reason = scatter_plan.why_not_on_cpu([self.A], [self.B], 0)
            return Route(KERNEL, lasts=False) if reason is None else Route(LIBRARY, reason)
        if self.group.size() == 1:
            reason = "group: 1 rank, which has nothing to sum"
            return Route(LIBRARY, reason if self.strict else None)
        reason = scatter_plan.why_not_native([self.A], [self.B], 0, self.group)
        if reason is not None:
            return Route(LIBRARY, reason)
        rows = self.A.shape[:-1].numel() + self.missing
        plan = scatter_plan.all_reduce_plan(rows, self.rows, self.B, self.group, strict=self.strict)
        if plan.way == "unfused" and not self.strict:
            return Route(LIBRARY)
        if plan.kernel is None:
            reason = self._why_not_gathered(rows) if self.strict else None
            reason = reason or (None if plan.scatters is not None else _NO_KERNEL)
        return Route(KERNEL, plan=plan) if reason is None else Route(LIBRARY, reason)

    def _why_not_gathered(self, rows: int) -> str | None:
        """Why agmm's kernel cannot gather each rank's rows of the sum, or None."""
        of_rank = self.A.new_empty(1, 1).expand(rows // self.group.size(), self.B.shape[1])
        return small_collectives.why_not("all_gather", of_rank, self.group, strict=True)

    def operands(self) -> tuple[Any, ...]:
        return self.A, self.B, self.bias

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu":
            words, shape = self.words(), self.shape
            workspace = cpu_workspace(self.group)
            return lambda A, B, bias: reshaped(
                workspace.matmul_all_reduce(self.rows, B, bias, words, agreed=f"{shape}"), shape
            )
        words = self.words()
        return self._ready(
            route.plan,
            lambda part: small_collectives.all_gathered(
                part, self.group, words, strict=self.strict
            ),
        )

    def _ready(
        self,
        plan: scatter_plan.AllReducePlan,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> _OnCuda:
        A = self.A.new_empty(1, 1).expand(len(self.rows) + self.missing, self.A.shape[-1])
        A = A if self.missing else self.rows
        copying = Copying.of([self.rows], [self.B], 0)
        B = self.B if copying is None else copying.weight(self.B)
        kernel = plan.kernel or plan.scatters
        assert kernel is not None
        sms = plan.sm_count if plan.kernel is not None else 0
        call = call_with(kernel, [A], [B], self.group, "sum", all_reduce_sms=sms)
        return _OnCuda(call, copying, self.missing, gather if plan.kernel is None else None)

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        assert isinstance(ready, _OnCuda)
        if self.missing or not self.A.is_contiguous():
            return None
        if ready.gather is None:
            return ready
        part = found.view(-1, found.shape[-1])[: len(self.rows) // self.group.size()]
        collective = small_collectives.prepare_again(
            "all_gather", part, self.group, strict=self.strict
        )
        if collective is not None:
            return ready._replace(gather=_Gather(collective, self.group.size()))
        if self.strict:
            return None
        return ready._replace(gather=_BackendsGather(weakref.ref(self.group)))

    def library_to_keep(self, found: torch.Tensor) -> Ready | None:
        if not (self.device.type == "cuda" and self.A.is_contiguous() and found.is_contiguous()):
            return None
        collective = small_collectives.prepare_again("all_reduce", found, self.group)
        return None if collective is None or self.strict else _ByLibrary(collective)

    def finished(self, found: Any, route: Route) -> torch.Tensor:
        out: torch.Tensor = found
        return out

    def by_library(self, words: Call) -> torch.Tensor:
        product = torch.matmul(self.A, self.B)
        out = small_collectives.all_reduced(product, self.group, words)
        return out if self.bias is None else out.add_(self.bias)


_NO_KERNEL = "plan: found no kernel of this build that sends tiles, wanted one"


class _OnCuda(NamedTuple):
    """By one kernel, or by one that scatters the sum and a gather, so that all ranks have the same
    bits."""

    call: ReadyScatter
    copying: Copying | None
    missing: int
    gather: Any
    """Gathers the parts of all ranks; None where the kernel has done that."""

    def __call__(self, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        call, copying, missing, gather = self
        rows = A if A.dim() == 2 else A.reshape(-1, A.shape[-1])
        whole = rows
        if missing:
            whole = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        if copying is not None:
            (whole,), (B,) = copying([whole], [B])
        out = call((whole,), (B,), bias)
        if gather is not None:
            out = gather(out)
        if missing:
            # A copy, since no result is a view.
            out = out[: len(rows)].clone()
        return out if A.dim() == 2 else reshaped(out, [*A.shape[:-1], B.shape[1]])


class _Gather(NamedTuple):
    """The gather of a call that is kept, by agmm's kernel."""

    collective: small_collectives.CollectiveCall
    world_size: int

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        if not self.collective.is_ready:
            raise Unsupported("workspace: found none for collectives, wanted the one of before")
        out = part.new_empty(self.world_size * part.shape[0], part.shape[1])
        self.collective(part, out)
        return out


class _BackendsGather(NamedTuple):
    """The gather of a call that is kept, by the group's backend."""

    group: weakref.ReferenceType[dist.ProcessGroup]

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        group = self.group()
        assert group is not None
        out = part.new_empty(group.size() * part.shape[0], part.shape[1])
        with groups.of(group).lock:
            gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
            gather(out, part, group)
        return out


class _ByLibrary(NamedTuple):
    """A matmul of the library's, then agmm's all-reduce."""

    collective: small_collectives.CollectiveCall

    def __call__(self, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.collective.is_ready:
            raise Unsupported("workspace: found none for collectives, wanted the one of before")
        out = torch.matmul(A, B)
        self.collective(out, out)
        return out if bias is None else out.add_(bias)


def _impl(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    world_size: int,
    strict: bool = False,
    keep_as: Any = None,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    return serve(AllReduce(A, B, bias, group, strict), keep_as)


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
        again: torch.Tensor | None = kept.call_kept(known, keep_as, A, B, bias)
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
        return _impl(A, B, bias, group_name, world_size, strict, keep_as)
    op = torch.ops.agmm._matmul_all_reduce.default
    found: torch.Tensor = op(A, B, bias, group_name, world_size, strict)
    return found
