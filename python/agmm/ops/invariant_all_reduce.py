"""Matmul + all-reduce that is batch-invariant: see `ops.invariant`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from agmm.ops import invariant, small_collectives
from agmm.ops.all_reduce import ByLibrary, LibrarySum
from agmm.ops.copying import Copying
from agmm.ops.pipeline import KERNEL, LIBRARY, Ready, Route
from agmm.ops.plain_all_reduce import PlainAllReduce, PlainLibrary
from agmm.planning import call_plans
from agmm.planning.problems import KernelConfig
from agmm.runtime import collectives, cpu_scatter
from agmm.runtime.calls import Call
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import cpu_workspace


class InvariantAllReduce(PlainAllReduce):
    """``all_reduce(A @ B) (+ bias) (+ residual)``, of which no row depends on how many others there
    are. Its products and its sums are chosen apart, the sums by what all ranks know."""

    learns = False

    def words(self) -> Call:
        return Call(self.op, A=self.A, B=self.B, batch_invariant=True, **self.asked)

    def route(self) -> Route:
        if self.device.type == "cuda":
            call_plans.agree(self.group, self.device)
            reason = invariant.why_not_streamed(self._matrix(), self.B)
            return Route(LIBRARY if reason else KERNEL, reason)
        reason = self.why_no_kernel()
        return Route(LIBRARY, reason) if reason else Route(KERNEL, lasts=False)

    def look(self, route: Route, words: Call) -> None:
        """What a rank sends is looked through where it is sent, on every route."""

    def by_cpu(self, words: Call) -> torch.Tensor:
        return cpu_workspace(self.group).matmul_all_reduce(
            *(self._matrix(), self.B, self.bias, words),
            agreed=f"{self.shape}, batch-invariant",
            residual=None if self.residual is None else self.residual.flatten(0, -2),
            invariant=True,
        )

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu":
            return super().prepare(route)
        library, words = self._streamed(), self.words()

        def call(*operands: Any) -> torch.Tensor:
            partial = library.partial(*operands)
            return library.total(self._summed(partial, words), *operands)

        return call

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        if not (self.A.is_contiguous() and found.is_contiguous()) or self.group.size() == 1:
            return None
        collective = small_collectives.prepare_again("all_reduce", found, self.group, strict=True)
        return None if collective is None else ByLibrary(collective, self._streamed())

    def library_to_keep(self, found: torch.Tensor) -> Ready | None:
        return None

    def library(self) -> LibrarySum:
        return _InBlocks()

    def by_library(self, words: Call) -> torch.Tensor:
        if self.device.type == "cuda":
            library, operands = self.library(), self.operands()
            partial = library.partial(*operands)
            return library.total(self._summed(partial, words), *operands)
        return reshaped(self._by_backend(words), self.shape)

    def _streamed(self) -> LibrarySum:
        kernel = invariant.kernel_of(self._matrix(), self.B)
        assert kernel is not None
        return streamed(self.A, self.B, kernel)

    def _summed(self, partial: torch.Tensor, words: Call) -> torch.Tensor:
        return small_collectives.all_reduced(partial, self.group, words, in_order=True)

    def _by_backend(self, words: Call) -> torch.Tensor:
        """The sum as the CPU backend makes it, of products that the group's backend gathers."""
        A, residual = self._matrix(), self.residual
        residual = None if residual is None else residual.flatten(0, -2)
        summed = cpu_scatter.plain_sum([A], [self.B], self.bias, residual, invariant=True)
        summands = summed.summands(len(A))
        own = summed.own(summands.product(slice(0, len(A))))
        gathered = collectives.start_all_gather(own, self.group.group_name, 0, call=words)()
        parts = list(gathered.chunk(self.group.size()))
        rank, out = self.group.rank(), own.new_empty(own.shape)
        del parts[rank]
        summands.sum(own, parts, rank, 1, self.bias, out, residual)
        return out


def streamed(A: torch.Tensor, B: torch.Tensor, kernel: KernelConfig) -> LibrarySum:
    """The sum of products like these, which a streaming kernel computes: of A [M, ..., K]."""
    rows = A.reshape(-1, A.shape[-1]).contiguous()
    copying = Copying.of([rows], [B], 0)
    weight = B if copying is None else copying.weight(B)
    return _Streamed(invariant.streamed(rows, weight, kernel), copying)


class _InBlocks(PlainLibrary):
    """A product of the library's in blocks of rows, then what every sum is added to."""

    def partial(self, A: torch.Tensor, B: torch.Tensor, *_: Any) -> torch.Tensor:
        rows = A.reshape(-1, A.shape[-1])
        return reshaped(invariant.in_blocks(rows, B), [*A.shape[:-1], B.shape[1]])


class _Streamed(NamedTuple):
    """A product of a streaming kernel, and what the sum is added to."""

    product: invariant.Product
    copying: Copying | None

    def partial(self, A: torch.Tensor, B: torch.Tensor, *_: Any) -> torch.Tensor:
        rows = A.reshape(-1, A.shape[-1]).contiguous()
        weight = B if self.copying is None else self.copying.weight(B)
        found = self.product(rows, weight)
        return found if A.dim() == 2 else reshaped(found, [*A.shape[:-1], B.shape[1]])

    def total(self, out: torch.Tensor, *operands: Any) -> torch.Tensor:
        return PlainLibrary().total(out, *operands)
