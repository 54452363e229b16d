"""The flow of products that are summed over the ranks: what is the same for matmul + reduce-scatter
and matmul + all-reduce, of any format of operands."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from agmm.ops import portable
from agmm.ops.pipeline import LIBRARY, PORTABLE, OpCall, Ready, Route, device_of
from agmm.runtime import groups, nan_check
from agmm.runtime.calls import Call


class SumCall(OpCall[torch.Tensor]):
    """A sum over the ranks of what each of them multiplies. A format says what its operands are and
    which of its calls have kernels.

    Args:
        A: [M, ..., K], the first of several.
    """

    op: str
    residual: torch.Tensor | None = None
    """What is added to the sum, of the result's shape and dtype; None for nothing."""

    def __init__(self, A: torch.Tensor, group: dist.ProcessGroup, *, strict: bool) -> None:
        self.A = A
        self.device = device_of(A)
        self.group = group
        self.strict = strict

    # --- what a format says ---

    @property
    @abstractmethod
    def columns(self) -> int:
        """N of the product."""

    @property
    @abstractmethod
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""

    @abstractmethod
    def by_cpu(self, words: Call) -> torch.Tensor:
        """The sum by the CPU backend, as a matrix of rows."""

    @abstractmethod
    def ready_by_copies(self) -> Ready:
        """The call of the portable path on CUDA, and between hosts, which scatters the sum, for
        what a kernel that scatters it is given."""

    @abstractmethod
    def sent(self) -> dict[str, list[torch.Tensor]]:
        """What a kernel multiplies and sends, by the names of the op's arguments."""

    # --- the flow ---

    def by_copies(self, why_not_op: str | None) -> Route:
        """The route of a call that was asked to take the portable path.

        Args:
            why_not_op: why the op itself has no such path for the call, or None.
        """
        if self.device.type == "cpu":  # whose backend is that path
            reason = why_not_op or self.why_no_kernel()
            return Route(LIBRARY, reason) if reason else Route(PORTABLE, lasts=False)
        return portable.route(self, why_not_op, lasts=self.lasts_by_copies())

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension whose parts ranks own, counted from the first."""

    @property
    def shape(self) -> list[int]:
        """The sizes of the sum before it is scattered."""
        return [*self.A.shape[:-1], self.columns]

    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def asked(self) -> dict[str, Any]:
        """The residual by the name of its argument, for messages; nothing where there is none."""
        return {} if self.residual is None else {"residual": self.residual}

    def with_residual(self, out: torch.Tensor) -> torch.Tensor:
        """The result, of a sum that is rounded already and may be overwritten."""
        return out if self.residual is None else out.add_(self.residual)

    def look(self, route: Route, words: Call) -> None:
        # A kernel sends products as it computes them; other routes look through what they send.
        if not nan_check.active or route.by == LIBRARY or self.device.type != "cuda":
            return
        rank = groups.of(self.group).rank
        for name, tensors in self.sent().items():
            for tensor in tensors:
                nan_check.look_through(words.op, name, tensor, rank)
