"""The flow of matmul + reduce-scatter: what is the same for all formats of operands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import portable
from agmm.ops.pipeline import KERNEL, LIBRARY, PORTABLE, Ready, Route
from agmm.ops.sums import SumCall
from agmm.planning import call_plans
from agmm.planning.plans import BY_COPIES, BY_STREAM, UNFUSED, Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transports import MESSAGES, STREAMED, TORCH
from agmm.runtime.calls import Call
from agmm.runtime.results import moved, reshaped
from agmm.runtime.workspaces import take_turn

Meanwhile = Callable[[], None]
"""What a rank does while its parts are on their way. It is called once; what it raises is raised
when the call is done, since the other ranks wait for that."""


class ScatterSettings(NamedTuple):
    """What a caller says of a matmul + reduce-scatter beside its operands."""

    scatter_dim: int = 0
    reduce_op: str = "sum"
    strict: bool = False
    plan: Plan | None = None
    """What is carried out in place of the chosen plan."""


class ScatterCall(SumCall):
    """A matmul + reduce-scatter of one format, which says what its operands are, which of its calls
    have kernels, and how it multiplies.

    Args:
        A: [M, ..., K], the first of several.
        settings: what the caller says.
        meanwhile: see `Meanwhile`.
    """

    op = "matmul_reduce_scatter"

    def __init__(
        self,
        A: torch.Tensor,
        group: dist.ProcessGroup,
        settings: ScatterSettings,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        super().__init__(A, group, strict=settings.strict)
        self.settings = settings
        self.meanwhile = meanwhile

    # --- what a format says ---

    @abstractmethod
    def problem(self) -> Problem:
        """What the planner is asked."""

    @abstractmethod
    def ready_on_cuda(self, kernel: KernelConfig) -> Ready:
        """The call of agmm's kernel for any operands of this kind."""

    def streamed(self) -> Plan | str:
        """The plan of a streaming kernel that scatters its sums, for operands on CUDA, or the
        reason why there is none."""
        return "config: found streamed, wanted another for such operands"

    def ready_by_stream(self, kernel: KernelConfig) -> Ready:
        """The call of a streaming kernel, where `streamed` has it."""
        raise NotImplementedError(kernel.name)

    # --- the flow ---

    @property
    def dim(self) -> int:
        """The scattered dimension, counted from the first."""
        return self.settings.scatter_dim % self.A.dim()

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The sizes of this rank's part, the scattered dimension first."""
        front = self.A.movedim(self.dim, 0).shape
        return front[0] // self.group.size(), *front[1:-1], self.columns

    def without_elements(self, words: Call) -> torch.Tensor:
        shape, reduce_op = self.shape, self.settings.reduce_op
        what = f"{words.op} to {shape} {self.out_dtype} along {self.dim}, {reduce_op}"
        agree = call_plans.agree if self.asks_a_plan() else None
        take_turn(self.group, self.device, what, words, agree=agree)
        if self.meanwhile is not None:
            self.meanwhile()
        shape[self.dim] //= self.group.size()
        return self.A.new_empty(shape, dtype=self.out_dtype)

    def asks_a_plan(self) -> bool:
        """Whether the planner is asked how a call with elements is carried out."""
        return self.why_not_fused() is None

    def why_not_fused(self) -> str | None:
        """The reason why agmm cannot serve the call, whose result has elements, or None. The same
        on all ranks that call with the same shapes and dtypes. Collective at first use on GPUs."""
        return self.why_no_dim() or self.why_no_kernel()

    def why_no_dim(self) -> str | None:
        """The reason why rows along the dimension cannot be sent as they are computed, or None."""
        if self.dim == self.A.dim() - 1:
            dim = self.settings.scatter_dim
            return f"scatter_dim: {dim}, the fused path wants another than the last"
        return None

    def route(self) -> Route:
        plan = self.settings.plan
        if plan is not None and plan.transport.needs == MESSAGES:
            return Route(LIBRARY)
        if plan == BY_COPIES:
            return self.by_copies(self.why_no_dim())
        by_messages = portable.by_messages(self)
        if by_messages is not None:
            return by_messages
        reason = self.why_not_fused()
        if reason is not None:
            return portable.instead(self) or self.otherwise(reason)
        if plan == BY_STREAM:
            plan = None
            if self.device.type == "cuda":
                found = self.streamed()
                return (
                    Route(LIBRARY, found) if isinstance(found, str) else Route(KERNEL, plan=found)
                )
        if plan is None and self.asks_a_plan():
            plan = self.choose(self.problem(), fused=self.strict)
            if plan.transport == STREAMED and isinstance(self.streamed(), str):
                plan = self._not_streamed()
            if self.trial is not None and plan.transport.needs == MESSAGES:
                return Route(LIBRARY)
        if self.device.type == "cpu":
            by_library = plan is not None and plan.transport.needs == MESSAGES
            return Route(LIBRARY) if by_library else Route(KERNEL, plan=plan, lasts=False)
        if self.group.size() == 1:
            return self.otherwise("group: 1 rank, which has nothing to scatter")
        if plan is None or plan.kernel is None:
            return self.otherwise("plan: the unfused path is faster", is_planned=True)
        return Route(KERNEL, plan=plan, lasts=self.lasts())

    def _not_streamed(self) -> Plan:
        """The plan in place of a streaming kernel, which sums no several products."""
        if self.trial is not None:
            self.trial.miss()
        plans = call_plans.planner(self.group, self.device).alternatives(self.problem())
        others = (plan for plan, _ in plans if plan.transport not in (STREAMED, TORCH))
        return next(plan for plan in others if plan != UNFUSED or not self.strict)

    def rows_by_copies(self) -> int | None:
        is_left_out = self.settings.plan or self.why_no_dim() or self.why_no_pieces()
        return None if is_left_out else self.A.shape[:-1].numel()

    def otherwise(self, reason: str, *, is_planned: bool = False) -> Route:
        """The route of a call that agmm's kernel does not serve."""
        return Route(LIBRARY, reason if self.strict or not is_planned else None)

    def lasts(self) -> bool:
        """Whether later calls of the same kind may take the same route without being looked at."""
        return True

    def instead(self, route: Route, reason: str) -> Route:
        return self.otherwise(reason)

    def prepare(self, route: Route) -> Ready:
        if route.by == PORTABLE and self.by_pieces:
            return self.ready_by_copies()
        if self.device.type == "cpu":
            words = self.words()
            return lambda *_: self.in_shape(self.by_cpu(words))
        assert route.plan is not None and route.plan.kernel is not None
        if route.plan.transport == STREAMED:
            return self.ready_by_stream(route.plan.kernel)
        return self.ready_on_cuda(route.plan.kernel)

    def in_shape(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum in the shape that the op returns."""
        return moved(reshaped(rows, self.out_shape), 0, self.dim)

    def finished(self, found: Any, route: Route) -> torch.Tensor:
        is_by_cpu = self.device.type == "cpu" and not (route.by == PORTABLE and self.by_pieces)
        if self.meanwhile is not None and not is_by_cpu:  # a kernel fills the GPU
            self.meanwhile()
        out: torch.Tensor = found
        return out
