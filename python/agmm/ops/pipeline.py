"""How every op on matrices is carried out: one flow for all ops and all formats of operands.

A call that was served before is made again as it is (`kept`). Any other call is checked, decided
once (`Route`), prepared and run here, and here only: the group's liveness, calls without elements,
the look for NaNs, warnings and ``strict`` are the same for all of them. An op says what its steps
are by a class of its own (`OpCall`); a format says what the op's class leaves open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from agmm import _env
from agmm.errors import Unsupported, compose, fall_back, take_portable, warn_once
from agmm.ops import kept, learning, seen
from agmm.planning import call_plans
from agmm.planning.plans import Plan
from agmm.planning.problems import (
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    NORMED,
    Problem,
)
from agmm.runtime import backends, groups, hosts
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call

COMPOSED = "composed"
"""Who serves a call by `KERNEL` of which torch's ops compute a part, behind the kernel."""
KERNEL = "kernel"
"""`Route.by` of a call that agmm's own kernel or CPU backend computes."""
GATHER = "gather"
"""`Route.by` of a call whose rows agmm's collective gathers before they are multiplied: by the
library, of fp8 by agmm's matmul."""
PORTABLE = "portable"
"""`Route.by` of a call whose pieces the library multiplies beside copies between the ranks."""
TORCH = "torch"
"""`Route.by` of a call that torch's fused op computes."""
LIBRARY = "library"
"""`Route.by` of a call that the group's backend and the library compute: the unfused path."""
TAKE_BATCH_INVARIANT = (MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, NORMED)
"""The ops that take ``batch_invariant=``."""


Ready = Any
"""What computes calls of one kind, any number of times, from `OpCall.operands`: callable, with
results in the shapes that the op returns. mypy has named tuples not callable."""


class Route(NamedTuple):
    """How a call is carried out."""

    by: str
    reason: str | None = None
    """Why agmm itself cannot serve the call; None where it can, or where a plan decided."""
    plan: Any = None
    """What the planner chose; of a type that the op knows."""
    lasts: bool = True
    """Whether later calls of the same kind take the same route."""


Result = TypeVar("Result")


def device_of(operand: Any) -> torch.device:
    """The device of an operand; that of nothing for what is no tensor, which `OpCall.check`
    refuses."""
    return operand.device if isinstance(operand, torch.Tensor) else torch.device("meta")


class OpCall(ABC, Generic[Result]):
    """One call of an op: its operands, its settings, and the steps that the flow takes with them.

    Every step but `check`, `words` and `is_empty` may be collective at a group's first use.
    """

    group: dist.ProcessGroup
    device: torch.device
    """Where the operands are."""
    strict: bool
    learns = True
    """Whether such calls try plans where the group learns some."""
    trial: learning.Trial | None = None
    """What is tried by this call."""
    is_settled = True
    """Whether later calls of the kind take the same plan."""

    def choose(self, problem: Problem, *, fused: bool = False, one_kernel: bool = True) -> Plan:
        """The plan of the call, or one that it tries. Collective at first use, and where what was
        learnt of a kind is agreed on.

        Args:
            fused: leave the unfused plan out; such calls try none.
            one_kernel: as for `studies.candidates`.
        """
        planner = call_plans.planner(self.group, self.device)
        if fused:
            return planner.fused_plan(problem)
        if planner.learns and self.learns:
            found = learning.of(self.group, planner, self.device).next(problem, one_kernel)
            self.trial, self.is_settled = found.trial, found.is_settled
            if found.trial is not None:
                return found.trial.plan
        return planner.plan(problem)

    def run(self, compute: Callable[..., Any], *operands: Any) -> Any:
        """What ``compute`` returns; timed, where the call tries a plan."""
        trial = self.trial
        return compute(*operands) if trial is None else trial.run(compute, *operands)

    @property
    def by_pieces(self) -> bool:
        """Whether the portable path multiplies piece by piece by the library: on GPUs, and between
        hosts. The backend of CPU ranks on one host is that path itself."""
        return self.device.type == "cuda" or hosts.spans(self.group)

    @property
    def returns_A(self) -> bool:
        """Whether the gathered A is returned, too."""
        return False

    def rows_by_copies(self) -> int | None:
        """The rows of A, of all ranks, of a call that may take the portable path without being
        asked to; None for others. The same on all ranks."""
        return None

    def why_no_kernel(self) -> str | None:
        """Why agmm's kernels, or its CPU backend, cannot serve operands of this kind, or None. The
        same on all ranks that call with the same shapes, dtypes and layouts."""
        return None

    def why_no_pieces(self) -> str | None:
        """Why CPU ranks multiply operands of this kind in no pieces, or None."""
        return self.why_no_kernel() if self.device.type == "cpu" else None

    def lasts_by_copies(self) -> bool:
        """Whether later calls of the same kind take the portable path where this one does."""
        return True

    @abstractmethod
    def check(self) -> None:
        """Refuse what no path can serve: raises `InvalidArgument` before another rank sees it."""

    @abstractmethod
    def words(self) -> Call:
        """The call by the names of its arguments, for messages."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the call has no elements to send."""

    @abstractmethod
    def without_elements(self, words: Call) -> Result:
        """Take this call's turn among the calls of the group, and return what has no elements."""

    @abstractmethod
    def route(self) -> Route:
        """Decide how the call is carried out, the same on all ranks."""

    @abstractmethod
    def look(self, route: Route, words: Call) -> None:
        """Look for NaNs in what the route is about to send, where that was asked for."""

    @abstractmethod
    def prepare(self, route: Route) -> Ready:
        """What computes calls of this kind from `operands`, any number of times.

        Raises:
            Unsupported: the group can have no memory for it; all ranks raise.
        """

    @abstractmethod
    def operands(self) -> tuple[Any, ...]:
        """What `prepare`'s call takes."""

    @abstractmethod
    def finished(self, found: Any, route: Route) -> Result:
        """The results of the prepared call in the shapes that the op returns."""

    @abstractmethod
    def by_library(self, words: Call) -> Result:
        """The call by the group's backend and the library."""

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        """What computes later calls of the same kind, from the operands that the op was given, with
        results in the shapes that it returns; None for nothing. ``found`` is what the call that was
        prepared has returned."""
        return ready

    def library_to_keep(self, found: Result) -> Ready | None:
        """The function to keep for a call that a plan has left to the library, or None."""
        return None

    def why_composed(self, route: Route) -> str | None:
        """Why torch's ops compute a part of the call behind what the route says, or None. The same
        on all ranks."""
        return None

    def instead(self, route: Route, reason: str) -> Route:
        """What takes the place of a route that the group has no memory for."""
        return Route(LIBRARY, reason)


def serve(call: OpCall[Result], keep_as: Any = None) -> Result:
    """Carry out a call of a kind that is not kept. Collective.

    Args:
        keep_as: the kind under which later calls find the prepared one (`kept.keep`); None keeps
            nothing.

    Raises:
        InvalidArgument: no path can serve the call; nothing was begun.
        Unsupported: under ``strict`` only.
    """
    group = call.group
    groups.check_alive(group)
    call.check()
    words = call.words()
    warn_of_batches(words.op)
    if backends.is_fake(group):
        dry = call.by_library(words)
        seen.served(call, words, "dry run", None)
        return dry
    if call.is_empty():
        nothing = call.without_elements(words)
        seen.served(call, words, "nobody", None)
        return nothing
    with groups.of(group).lock, calling(words):
        route = call.route()
        while route.by != LIBRARY:
            behind = call.why_composed(route)
            if behind is not None:
                compose(behind, call.strict)
            call.look(route, words)
            try:
                ready = call.prepare(route)
                found = call.run(ready, *call.operands())
            except Unsupported as error:
                if call.trial is not None:
                    call.trial.miss()
                route = call.instead(route, str(error))
                continue
            if route.by == PORTABLE and route.reason is not None:
                take_portable(route.reason)
            by = COMPOSED if behind is not None and route.by == KERNEL else route.by
            kind = seen.served(call, words, by, behind or route.reason, keep_as)
            if route.lasts and call.is_settled:
                kept.keep(group, keep_as, seen.noting(call.to_keep(ready, found), kind))
            return call.finished(found, route)
        if route.reason is not None:
            fall_back(route.reason, call.strict)
        call.look(route, words)
        by_library: Result = call.run(call.by_library, words)
        kind = seen.served(call, words, LIBRARY, route.reason, keep_as)
        if route.reason is None and route.lasts and call.is_settled:
            kept.keep(group, keep_as, seen.noting(call.library_to_keep(by_library), kind))
        return by_library


def warn_of_batches(op: str) -> None:
    """Warns where the environment asks for batch invariance and an op that multiplies cannot be
    asked for it: its kernel depends on the number of rows."""
    if "matmul" in op and op not in TAKE_BATCH_INVARIANT and _env.batch_invariant() == "on":
        warn_once(
            f"{_env.BATCH_INVARIANT.name}: found on, but {op} does not take batch_invariant, so "
            "the bits of its rows may depend on how many there are"
        )
