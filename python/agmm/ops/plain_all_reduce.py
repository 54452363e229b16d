"""Matmul + all-reduce of operands that need no scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import portable, scatter_plan
from agmm.ops.all_reduce import AllReduceCall, LibrarySum, Load
from agmm.ops.checks import check_reducible, check_residual
from agmm.ops.copying import Copying
from agmm.ops.pipeline import Ready
from agmm.ops.plain_scatter import call_with, of_call
from agmm.planning.plans import Plan
from agmm.planning.problems import KernelConfig
from agmm.runtime import groups
from agmm.runtime.calls import Call
from agmm.runtime.workspaces import cpu_workspace


class PlainAllReduce(AllReduceCall):
    """``all_reduce(A @ B) (+ bias) (+ residual)``.

    Args:
        A: [M, ..., K].
        B: [K, N].
        bias: [N] or None.
        residual: [M, ..., N] or None.
        plan: what the caller asks for.
    """

    def __init__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        strict: bool,
        residual: torch.Tensor | None = None,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(A, group, strict=strict)
        self.B, self.bias, self.residual = B, bias, residual
        self.named_plan = plan

    def check(self) -> None:
        check_reducible(self.A, self.B, self.bias)
        check_residual(self.residual, self.shape, self.A)

    def words(self) -> Call:
        return Call(self.op, A=self.A, B=self.B, **self.asked)

    def operands(self) -> tuple[Any, ...]:
        return of_call(self.A, self.B, self.bias, self.residual)

    @property
    def columns(self) -> int:
        return self.B.shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        return self.A.dtype

    def sent(self) -> dict[str, list[torch.Tensor]]:
        return {"A": [self.A], "B": [self.B]}

    def why_no_kernel(self) -> str | None:
        return scatter_plan.why_not_native([self.A], [self.B], 0, self.group)

    def _matrix(self) -> torch.Tensor:
        return self.A.reshape(self.rows, self.A.shape[-1])

    def plan(self, rows: int) -> scatter_plan.AllReducePlan:
        return scatter_plan.all_reduce_plan(
            *(rows, self._matrix(), self.B, self.group),
            strict=self.strict,
            choose=self.choose_way,
        )

    def by_cpu(self, words: Call) -> torch.Tensor:
        residual = None if self.residual is None else self.residual.flatten(0, -2)
        return cpu_workspace(self.group).matmul_all_reduce(
            *(self._matrix(), self.B, self.bias, words), agreed=f"{self.shape}", residual=residual
        )

    def load(self) -> Load:
        copying, group = Copying.of([self._matrix()], [self.B], 0), self.group
        return _Load(copying, self.missing, groups.of(group).rank, group.size())

    def ready_on_cuda(self, kernel: KernelConfig, all_reduce_sms: int) -> Ready:
        A, copying = self._matrix(), Copying.of([self._matrix()], [self.B], 0)
        if self.missing:
            A = A.new_empty(1, 1).expand(self.rows + self.missing, A.shape[1])
        B = self.B if copying is None else copying.weight(self.B)
        return call_with(kernel, [A], [B], self.group, "sum", all_reduce_sms=all_reduce_sms)

    def ready_by_copies(self) -> Ready:
        words = self.words()
        workspace = portable.scatters(self.group, self.device, words)
        return portable.ReadyScatter(workspace, 0, 1, str(words))

    def library(self) -> LibrarySum:
        return PlainLibrary()


class _Load(NamedTuple):
    copying: Copying | None
    missing: int
    rank: int
    world_size: int

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        copying, missing, rank, world_size = self
        rows = A if A.dim() == 2 else A.reshape(-1, A.shape[-1])
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        if residual is not None:  # of which a kernel adds this rank's rows
            shared = len(rows) // world_size
            residual = residual.flatten(0, -2)[rank * shared : (rank + 1) * shared]
            if len(residual) < shared:
                residual = torch.nn.functional.pad(residual, (0, 0, 0, shared - len(residual)))
        if copying is None:
            return (rows,), (B,), bias, residual
        return *copying((rows,), (B,)), bias, residual


class PlainLibrary(NamedTuple):
    """A product of the library's, and what its sum over the ranks is added to."""

    def partial(self, A: torch.Tensor, B: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.matmul(A, B)

    def total(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if bias is not None:
            out.add_(bias)
        return out if residual is None else out.add_(residual)
