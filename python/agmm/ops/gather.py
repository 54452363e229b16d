"""The flow of all-gather + matmul: what is the same for all formats of operands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops import behind_gather, one_launch, portable, small_collectives
from agmm.ops.kernel_epilogues import Composed, not_built
from agmm.ops.pipeline import GATHER, KERNEL, LIBRARY, PORTABLE, OpCall, Ready, Route, device_of
from agmm.planning import call_plans, plans
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transports import MESSAGES, STREAMED, FusedGather, Transport, copy_transports
from agmm.planning.transports import PORTABLE as BY_COPIES
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.workspaces import cuda_workspace, take_turn

Behind = Any
"""What makes results of products by torch's ops: callable with a list of products, and of a type
that says nothing, as `pipeline.Ready` is."""


class Gathered(NamedTuple):
    """What an all-gather + matmul returns."""

    A: torch.Tensor | None
    """The gathered A, where it is wanted."""
    scale: torch.Tensor | None
    """The gathered scales of A, where the format has some and A is wanted."""
    outs: list[torch.Tensor]
    """The products, in the order of the weights, or what the epilogue makes of them."""


class GatherSettings(NamedTuple):
    """What a caller says of an all-gather + matmul beside its operands."""

    gather_dim: int = 0
    return_A: bool = False
    config: str = ""
    """A kernel, perhaps with a transport; "gather", "portable", "unfused", or nothing."""
    strict: bool = False
    prefer_fused: bool = False
    """Whether a plan for the unfused path, or for agmm's gather, is passed over."""
    plan: Plan | None = None
    """What is carried out in place of the chosen plan."""
    epilogue: Epilogue | None = None
    """What becomes of the products before they are rounded."""


class GatherCall(OpCall[Gathered]):
    """An all-gather + matmul of one format, which says what its operands are, which of its calls
    have kernels, and how it multiplies.

    Args:
        A_shard: [M_local, ..., K].
        settings: what the caller says.
    """

    op = "all_gather_matmul"

    def __init__(
        self, A_shard: torch.Tensor, group: dist.ProcessGroup, settings: GatherSettings
    ) -> None:
        self.A_shard = A_shard
        self.device = device_of(A_shard)
        self.group = group
        self.settings = settings
        self.strict = settings.strict

    # --- what a format says ---

    @abstractmethod
    def columns(self) -> list[int]:
        """N of each weight."""

    @abstractmethod
    def problem(self, weight: int | None) -> Problem:
        """What the planner is asked of one weight, or of all of them together for None."""

    @abstractmethod
    def by_cpu(self) -> Any:
        """What the CPU backend returns."""

    @abstractmethod
    def ready_on_cuda(
        self, workspace: CudaWorkspace, kernels: Sequence[KernelConfig], transport: FusedGather
    ) -> Ready:
        """The call of agmm's kernels, one for each weight, for any operands of this kind."""

    @abstractmethod
    def ready_behind_gather(self, kernels: Sequence[KernelConfig | None]) -> Ready:
        """The call of agmm's gather, then of a matmul of all rows by a kernel for each weight, for
        any operands of this kind."""

    def ready_streamed(self) -> Ready:
        """The call of agmm's gather beside streaming kernels, for any operands of this kind."""
        raise Unsupported(str(self.why_not_streamed()))

    def why_not_streamed(self) -> str | None:
        """Why no streaming kernel multiplies behind agmm's gather, or None."""
        dtype = self.values.dtype
        return f"config: streamed was asked for with {dtype}, it wants bfloat16 or float16"

    @abstractmethod
    def ready_by_copies(self, pieces: int) -> Ready:
        """The call of the portable path on CUDA, and between hosts, for shards in so many
        pieces."""

    def has_one_kind_of_scales(self) -> bool:
        return True

    @property
    @abstractmethod
    def values(self) -> torch.Tensor:
        """The shard's values in the dtype in which they travel."""

    @abstractmethod
    def on_nothing(self) -> Gathered:
        """The results where no rank has any rows."""

    # --- the flow ---

    @property
    def returns_A(self) -> bool:
        return self.settings.return_A

    def why_not_gathered(self) -> str | None:
        """Why agmm's gather kernel cannot take the shard, or None."""
        if self.device.type != "cuda":
            return f"config: gather was asked for on {self.device}, it wants cuda"
        return small_collectives.why_not("all_gather", self.values, self.group)

    @property
    def dim(self) -> int:
        """The gathered dimension, counted from the first."""
        return self.settings.gather_dim % self.A_shard.dim()

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading sizes of the results, the gathered dimension first."""
        front = self.A_shard.movedim(self.dim, 0).shape
        return self.group.size() * front[0], *front[1:-1]

    @property
    def may_choose(self) -> bool:
        """Whether a plan may take another path than the fused one."""
        settings = self.settings
        return not (settings.config or settings.strict or settings.prefer_fused or settings.plan)

    def asks_a_plan(self) -> bool:
        """Whether agmm's kernels of a call with elements, or the path that it takes, are chosen by
        the planner, for which the ranks agree on their tables."""
        kernel, transport = self.named_config()
        is_named = kernel is not None or transport == plans.GATHERED.transport
        if self.device.type != "cpu":  # whose backend asks for its chunks
            is_named = is_named or transport in (BY_COPIES, STREAMED)
        return self.settings.plan is None and not is_named

    def is_empty(self) -> bool:
        return self.A_shard.numel() == 0

    def without_elements(self, words: Call) -> Gathered:
        shape, dtype = list(self.A_shard.shape), self.A_shard.dtype
        what = f"{self.op} of {shape} {dtype} along {self.dim}, {self.settings.return_A}"
        asks = self.why_not_fused() is None and self.asks_a_plan()
        agree = call_plans.agree if asks else None
        take_turn(self.group, self.device, what + self.also_agreed(), words, agree=agree)
        return self.on_nothing()

    @property
    def asked(self) -> dict[str, Any]:
        """The activation by the name of its argument, for messages; nothing where there is none."""
        epilogue = self.settings.epilogue
        return {} if epilogue is None else {"activation": epilogue.activation}

    def behind(self, epilogue: Epilogue) -> Behind:
        """What makes the results of products that are rounded already, by torch's ops."""
        return epilogue.composed

    def with_epilogue(self, products: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of products that no kernel has given an epilogue."""
        epilogue = self.settings.epilogue
        if epilogue is not None:
            products = self.behind(epilogue)(products)
        return products

    def why_composed(self, route: Route) -> str | None:
        if route.by == PORTABLE and self.settings.epilogue is not None:
            name = self.settings.epilogue.activation
            return f"activation: found {name!r} on the portable path, wanted none"
        if self.settings.epilogue is None or self.device.type != "cuda":
            return None
        if self.named_config()[1] in plans.BEHIND_GATHER:
            name = self.settings.epilogue.activation
            return f"config: found {self.settings.config!r} with activation {name!r}, wanted none"
        return self.why_behind  # where a plan has chosen the gather, there is no kernel to have it

    @cached_property
    def why_behind(self) -> str | None:
        """The reason why no kernel computes the call's epilogue on CUDA, or None; None too where
        there is no epilogue. The same on all ranks, and found without a plan."""
        epilogue = self.settings.epilogue
        if epilogue is None or self.device.type != "cuda":
            return None
        return self.why_no_kernel_has(epilogue)

    def why_no_kernel_has(self, epilogue: Epilogue) -> str | None:
        """Return `why_behind` of an epilogue, for operands of this kind."""
        return not_built(epilogue)

    @property
    def in_kernel(self) -> Epilogue | None:
        """The epilogue that a kernel on CUDA computes, or None."""
        is_behind = self.device.type != "cuda" or self.why_behind is not None
        return None if is_behind else self.settings.epilogue

    def widths(self) -> list[int]:
        """The columns of B that each kernel multiplies: one behind a gate has those of both
        weights."""
        epilogue, columns = self.in_kernel, self.columns()
        return [sum(columns)] if epilogue is not None and epilogue.is_gated else columns

    def also_agreed(self) -> str:
        """What else has to be the same on all ranks, after a comma."""
        return ""

    def look(self, route: Route, words: Call) -> None:
        looks = self.device.type == "cuda" or (route.by == PORTABLE and self.by_pieces)
        if nan_check.active and looks and route.by != LIBRARY:
            nan_check.look_through(words.op, "A_shard", self.A_shard, groups.of(self.group).rank)

    def why_not_fused(self) -> str | None:
        """The reason why agmm cannot serve the call, whose shard has elements, or None. The same on
        all ranks that call with the same shapes, dtypes and layouts. Collective at first use on
        GPUs."""
        if _goes_by_messages(self.named_config()[1]):
            return f"config: {self.settings.config} was asked for"
        device = self.device
        if device.type not in ("cpu", "cuda"):
            return f"A_shard: device {device}, the fused path wants cuda or cpu"
        return self.why_no_kernel()

    def route(self) -> Route:
        settings, planned = self.settings, self.settings.plan
        if planned is not None and _goes_by_messages(planned.transport):
            return Route(LIBRARY)
        _, named = self.named_config()
        if BY_COPIES in (named, None if planned is None else planned.transport):
            return self._portable()
        by_messages = portable.by_messages(self)
        if by_messages is not None:
            return by_messages
        reason = self.why_not_fused()
        if reason is not None:
            by_copies = portable.instead(self)
            wanted = _goes_by_messages(named) and not self.strict
            return by_copies or Route(LIBRARY, None if wanted else reason)
        is_one = True
        if self.may_choose:
            is_one = self.device.type == "cpu" or len(self.widths()) == 1
            planned = self.choose(self.problem(None), one_kernel=is_one)
        if planned is not None and _goes_by_messages(planned.transport):
            if self.is_for_library():
                return Route(LIBRARY)
            self._miss_trial()
            planned = None
        lasts = self.lasts()
        if named == STREAMED and self.device.type == "cpu":  # whose rows are sent as they are
            named = None
        if named is not None and named in plans.BEHIND_GATHER:
            reason = self.why_not_gathered()
            if reason is None and named == STREAMED:
                reason = self.why_not_streamed()
            return Route(LIBRARY if reason else GATHER, reason, Plan(named), lasts)
        if planned is not None and planned.transport in plans.BEHIND_GATHER:
            if self.why_not_gathered() is None:
                return Route(GATHER, plan=planned, lasts=lasts)
            # A capture before the gather has memory is fused this time.
            self._miss_trial()
            return Route(KERNEL, lasts=False)
        plan = planned if self.trial is not None and is_one else settings.plan
        return Route(KERNEL, plan=plan, lasts=lasts)

    def _portable(self) -> Route:
        """The route of a call that was asked to take the portable path."""
        if self.device.type == "cpu":  # whose backend is that path
            reason, plan = self.why_not_fused(), self.settings.plan
            found = Route(PORTABLE, plan=plan, lasts=self.lasts() and not self.by_pieces)
            return Route(LIBRARY, reason) if reason else found
        return portable.route(self, self.why_not_by_copies(), lasts=self.lasts_by_copies())

    def rows_by_copies(self) -> int | None:
        is_asked = self.settings.config or self.settings.plan
        is_left_out = is_asked or self.why_not_by_copies() or self.why_no_pieces()
        return None if is_left_out else self.group.size() * self.A_shard.shape[:-1].numel()

    def lasts_by_copies(self) -> bool:
        return self.lasts()

    def why_not_by_copies(self) -> str | None:
        """Why shards of this kind do not take the portable path on CUDA, or None."""
        if self.dim != 0:
            return f"gather_dim: {self.settings.gather_dim}, the fused path wants 0"
        return None

    def _miss_trial(self) -> None:
        """Say that the call does not take the plan that it was to try."""
        if self.trial is not None:
            self.trial.miss()

    def is_for_library(self) -> bool:
        """Whether a plan may leave the product to the library."""
        return True

    def lasts(self) -> bool:
        """Whether later calls of the same kind may take the same route without being looked at."""
        return True

    def instead(self, route: Route, reason: str) -> Route:
        if route.by == GATHER and self.may_choose:  # no memory for the gather
            return Route(KERNEL)
        return super().instead(route, reason)

    def prepare(self, route: Route) -> Ready:
        if route.by == GATHER:
            given = self.named_config()[0], route.plan, self.problem, len(self.columns())
            is_streamed = route.plan is not None and route.plan.transport == STREAMED
            kernels = [] if is_streamed else behind_gather.kernels_of(*given)
            ready = self.ready_streamed() if is_streamed else self.ready_behind_gather(kernels)
        elif route.by == PORTABLE and self.by_pieces:
            asked = 1 if self.settings.plan is None else self.settings.plan.chunks_per_shard
            rows = self.A_shard.shape[:-1].numel()
            ready = self.ready_by_copies(portable.pieces_of(rows, asked))
        elif self.device.type == "cpu":
            self.settings = self.settings._replace(plan=route.plan)
            return self.again_on_cpu()
        else:
            workspace = cuda_workspace(self.group, self.device)
            ready = self.ready_on_cuda(workspace, *self._kernels(route.plan))
            if self.in_kernel is not None:
                return ready
        epilogue = self.settings.epilogue
        return ready if epilogue is None else Composed(ready, self.behind(epilogue))

    @abstractmethod
    def again_on_cpu(self) -> Ready:
        """What computes calls of this kind by `by_cpu`. It must not hold the group, since a kept
        call ends with it."""

    def named_config(self) -> tuple[KernelConfig | None, Transport | None]:
        """The kernel and the transport that the caller named.

        Raises:
            InvalidArgument: the config is the name of nothing.
        """
        try:
            return plans.parse_config(self.settings.config)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None

    def _kernels(self, plan: Plan | None) -> tuple[list[KernelConfig], FusedGather]:
        """A kernel for each weight, and the transport of the first."""
        (kernel, transport), found = self.named_config(), list[KernelConfig]()
        problems = [self.problem(i) for i in range(len(self.widths()))]
        if plan is None and kernel is None and self.has_one_kind_of_scales():
            plan = one_launch.plan_of(problems, call_plans.planner(self.group, self.device))
        for problem in problems:
            if plan is not None:
                chosen = plan
            elif kernel is not None:
                chosen = Plan(copy_transports(problem, kernel)[0], kernel)
            else:
                chosen = call_plans.planner(self.group, self.device).fused_plan(problem)
            assert chosen.kernel is not None
            if not found:
                transport = transport or chosen.transport
                if transport == STREAMED:  # whose kernel takes rows by copies too
                    transport = copy_transports(problem, chosen.kernel)[0]
                reason = transport.why_illegal(problem, chosen.kernel)
                if reason is not None:
                    which = f"{chosen.kernel.kernel}, return_A={self.settings.return_A}"
                    raise InvalidArgument(f"config: {which}: {reason}")
            found.append(chosen.kernel)
        assert isinstance(transport, FusedGather)  # no other is legal with a kernel
        return found, transport


def _goes_by_messages(transport: Transport | None) -> bool:
    """Whether the group's backend carries out what a transport says, as every group's can."""
    return transport is not None and transport.needs == MESSAGES
