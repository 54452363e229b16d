"""The flow of matmul + all-reduce: what is the same for all formats of operands."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.ops import portable, small_collectives
from agmm.ops.pipeline import KERNEL, LIBRARY, PORTABLE, Ready, Route
from agmm.ops.scatter_plan import AllReducePlan
from agmm.ops.sums import SumCall
from agmm.planning import call_plans
from agmm.planning.plans import BY_COPIES, Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transports import MESSAGES
from agmm.runtime import groups
from agmm.runtime.calls import Call
from agmm.runtime.collectives import by_newer_name
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import take_turn

Load = Any
"""What makes of an op's operands those of a `ReadyScatter`: matrices with as many rows as the ranks
can share. It is callable, and of a type that says nothing, as `pipeline.Ready` is."""


class LibrarySum(Protocol):
    """How the library computes what is summed, and what becomes of the sum, for the operands of any
    call of a kind."""

    def partial(self, *operands: Any) -> torch.Tensor:
        """This rank's product [M, ..., N], in memory of its own."""

    def total(self, out: torch.Tensor, *operands: Any) -> torch.Tensor:
        """The result, of the sum over the ranks, which may be overwritten."""


class AllReduceCall(SumCall):
    """A matmul + all-reduce of one format, which says beside what `SumCall` asks how its operands
    come to a kernel and to the library. The first two operands are A [M, ..., K] and B [K, N]."""

    op = "matmul_all_reduce"
    named_plan: Plan | None = None
    """The plan that the caller asks for."""

    # --- what a format says ---

    @abstractmethod
    def plan(self, rows: int) -> AllReducePlan:
        """What the planner chooses for so many rows, which the ranks can share."""

    @abstractmethod
    def load(self) -> Load:
        """What prepares operands of this kind for a kernel."""

    @abstractmethod
    def ready_on_cuda(self, kernel: KernelConfig, all_reduce_sms: int) -> Ready:
        """The call of agmm's kernel for what `load` makes; of one that sends finished tiles with
        ``all_reduce_sms``, as `_core.ScatterProblem` has them."""

    @abstractmethod
    def library(self) -> LibrarySum:
        """How the library computes calls of this kind."""

    @property
    def partial_dtype(self) -> torch.dtype:
        """The dtype that is summed where the library multiplies."""
        return self.out_dtype

    # --- the flow ---

    def choose_way(self, problem: Problem) -> Plan:
        """The plan that the caller names, or `choose` for a call under its ``strict``."""
        if self.named_plan is not None:
            return self.named_plan
        return self.choose(problem, fused=self.strict)

    @property
    def dim(self) -> int:
        """Ranks share the first dimension, of all rows as a matrix."""
        return 0

    @property
    def rows(self) -> int:
        """M, with all leading dimensions."""
        return self.A.shape[:-1].numel()

    @property
    def missing(self) -> int:
        """Rows of zeros that A lacks for the ranks to share them equally."""
        return -self.rows % self.group.size()

    def without_elements(self, words: Call) -> torch.Tensor:
        agree = call_plans.agree if self.asks_a_plan() else None
        what = f"{words.op} to {self.shape} {self.out_dtype}"
        take_turn(self.group, self.device, what, words, agree=agree)
        return self.A.new_empty(self.shape, dtype=self.out_dtype)

    def asks_a_plan(self) -> bool:
        """Whether the planner is asked how calls with elements are carried out."""
        return self.device.type == "cuda"

    def route(self) -> Route:
        is_on_cpu = self.device.type == "cpu"
        if not is_on_cpu and self.group.size() == 1:
            reason = "group: 1 rank, which has nothing to sum"
            return Route(LIBRARY, reason if self.strict else None)
        if self.named_plan is not None and self.named_plan.transport.needs == MESSAGES:
            return Route(LIBRARY)
        if self.named_plan == BY_COPIES:
            return self.by_copies(None)
        by_messages = portable.by_messages(self)
        if by_messages is not None:
            return by_messages
        why = self.why_no_kernel()
        if why is not None:
            return portable.instead(self) or Route(LIBRARY, why)
        if is_on_cpu:
            return Route(KERNEL, lasts=False)
        rows = self.rows + self.missing
        plan = self.plan(rows)
        if plan.way.needs == MESSAGES and not self.strict:
            return Route(LIBRARY)
        if plan.kernel is None:
            why = self._why_not_gathered(rows) if self.strict else None
            why = why or (None if plan.scatters is not None else _NO_KERNEL)
        return Route(KERNEL, plan=plan) if why is None else Route(LIBRARY, why)

    def rows_by_copies(self) -> int | None:
        return None if self.named_plan or self.why_no_pieces() else self.rows

    def _why_not_gathered(self, rows: int) -> str | None:
        """Why agmm's kernel cannot gather each rank's rows of the sum, or None."""
        one = self.A.new_empty(1, 1, dtype=self.out_dtype)
        of_rank = one.expand(rows // self.group.size(), self.columns)
        return small_collectives.why_not("all_gather", of_rank, self.group, strict=True)

    def prepare(self, route: Route) -> Ready:
        words, shape = self.words(), self.shape
        if self.device.type == "cpu" and not (route.by == PORTABLE and self.by_pieces):
            return lambda *_: reshaped(self.by_cpu(words), shape)
        plan: AllReducePlan | None = route.plan
        if plan is not None and plan.kernel is not None:
            call, gather = self.ready_on_cuda(plan.kernel, plan.sm_count), None
        else:
            if plan is None:
                call = self.ready_by_copies()
            else:
                assert plan.scatters is not None
                call = self.ready_on_cuda(plan.scatters, 0)

            def gather(shard: torch.Tensor) -> torch.Tensor:
                strict = self.strict and plan is not None  # copies go with any gather
                return small_collectives.all_gathered(shard, self.group, words, strict=strict)

        return _OnCuda(call, self.load(), self.missing, gather)

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        assert isinstance(ready, _OnCuda)
        if self.missing or not self.A.is_contiguous():
            return None
        if ready.gather is None:
            return ready
        shard = found.view(-1, found.shape[-1])[: self.rows // self.group.size()]
        collective = small_collectives.prepare_again(
            "all_gather", shard, self.group, strict=self.strict
        )
        if collective is not None:
            return ready._replace(gather=_Gather(collective, self.group.size()))
        if self.strict:
            return None
        return ready._replace(gather=_BackendsGather(weakref.ref(self.group)))

    def library_to_keep(self, found: torch.Tensor) -> Ready | None:
        if not (self.device.type == "cuda" and self.A.is_contiguous() and found.is_contiguous()):
            return None
        summed = found
        if found.dtype != self.partial_dtype:
            summed = torch.empty_like(found, dtype=self.partial_dtype)
        collective = small_collectives.prepare_again("all_reduce", summed, self.group)
        if collective is None or self.strict:
            return None
        return ByLibrary(collective, self.library())

    def finished(self, found: Any, route: Route) -> torch.Tensor:
        out: torch.Tensor = found
        return out

    def by_library(self, words: Call) -> torch.Tensor:
        library, operands = self.library(), self.operands()
        partial = library.partial(*operands)
        out = small_collectives.all_reduced(partial, self.group, words)
        return library.total(out, *operands)


_NO_KERNEL = "plan: found no kernel of this build that sends tiles, wanted one"


class _OnCuda(NamedTuple):
    """Computes calls by one kernel, or by one that scatters the sum and a gather, so that all ranks
    have the same bits."""

    call: Ready
    load: Load
    missing: int
    gather: Any
    """Gathers the shards of all ranks; None where the kernel has done that."""

    def __call__(self, A: torch.Tensor, B: torch.Tensor, *others: Any) -> torch.Tensor:
        call, load, missing, gather = self
        out: torch.Tensor = call(*load(A, B, *others))
        if gather is not None:
            out = gather(out)
        if missing:
            # The rows are copied, since no result is a view.
            out = out[: len(out) - missing].clone()
        return out if A.dim() == 2 else reshaped(out, [*A.shape[:-1], B.shape[1]])


class _Gather(NamedTuple):
    """The gather of a call that is kept, by agmm's kernel."""

    collective: small_collectives.CollectiveCall
    world_size: int

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        if not self.collective.is_ready:
            raise Unsupported("workspace: found none for collectives, wanted the one of before")
        out = shard.new_empty(self.world_size * shard.shape[0], shard.shape[1])
        self.collective(shard, out)
        return out


class _BackendsGather(NamedTuple):
    """The gather of a call that is kept, by the group's backend."""

    group: weakref.ReferenceType[dist.ProcessGroup]

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        group = self.group()
        assert group is not None
        out = shard.new_empty(group.size() * shard.shape[0], shard.shape[1])
        with groups.of(group).lock:
            gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
            gather(out, shard, group)
        return out


class ByLibrary(NamedTuple):
    """A matmul of the library's, then agmm's all-reduce."""

    collective: small_collectives.CollectiveCall
    library: LibrarySum

    def __call__(self, *operands: Any) -> torch.Tensor:
        if not self.collective.is_ready:
            raise Unsupported("workspace: found none for collectives, wanted the one of before")
        out = self.library.partial(*operands)
        self.collective(out, out)
        return self.library.total(out, *operands)
