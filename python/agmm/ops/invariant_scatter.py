"""Matmul + reduce-scatter that is batch-invariant: see `ops.invariant`."""

from __future__ import annotations

from typing import Any

import torch

from agmm.ops import invariant_matmul, small_collectives
from agmm.ops.pipeline import KERNEL, LIBRARY, Ready, Route
from agmm.ops.plain_scatter import PlainScatter
from agmm.planning import call_plans
from agmm.runtime import collectives, cpu_scatter
from agmm.runtime.calls import Call
from agmm.runtime.cpu_summands import add_up, sum_dtype
from agmm.runtime.results import moved


class InvariantScatter(PlainScatter):
    """``reduce_scatter(sum of A @ B) (+ bias) (+ residual)``, of which no row depends on how many
    others there are. Each rank adds up its own rows alone."""

    learns = False
    is_invariant = True

    @property
    def asked(self) -> dict[str, Any]:
        return super().asked | {"batch_invariant": True}

    def asks_a_plan(self) -> bool:
        return False

    def route(self) -> Route:
        if self.device.type == "cuda":
            call_plans.agree(self.group, self.device)
            reason = self.why_no_dim() or invariant_matmul.why_not_streamed(self.As, self.Bs)
            return Route(LIBRARY if reason else KERNEL, reason, lasts=False)
        reason = self.why_not_fused()
        return Route(LIBRARY if reason else KERNEL, reason, lasts=False)

    def look(self, route: Route, words: Call) -> None:
        """What a rank sends is looked through where it is sent, on every route."""

    def instead(self, route: Route, reason: str) -> Route:
        return Route(LIBRARY, reason)

    def prepare(self, route: Route) -> Ready:
        if self.device.type == "cpu":
            return super().prepare(route)
        words = self.words()
        return lambda *_: self.by_library(words)

    def by_library(self, words: Call) -> torch.Tensor:
        if self.device.type == "cuda":
            return self._on_gpus(words)
        return self._by_backend(words)

    def _on_gpus(self, words: Call) -> torch.Tensor:
        """The sum of products by streaming kernels, or by the library in blocks of rows."""
        partial = None
        for A, B in zip(self.As, self.Bs, strict=True):
            product = invariant_matmul.product_on_gpu(A, B)
            partial = product if partial is None else partial.add_(product)
        assert partial is not None
        rows = moved(partial, self.dim, 0)
        out = moved(
            small_collectives.reduce_scattered_in_order(rows, self.group, words), 0, self.dim
        )
        if self.settings.reduce_op == "avg":
            out = out.div_(self.group.size())
        return self.with_residual(out if self.bias is None else out.add_(self.bias))

    def _by_backend(self, words: Call) -> torch.Tensor:
        """The sum as the CPU backend makes it, of products that the group's backend gathers."""
        size, rank = self.group.size(), self.group.rank()
        As = [A.reshape(-1, A.shape[-1]) for A in self.As]
        summed = cpu_scatter.plain_sum(As, self.Bs, None, invariant=True)
        summands = summed.summands(len(As[0]))
        product = summed.own(summands.product(slice(0, len(As[0])))).view(self.shape)
        gathered = collectives.start_all_gather(product, self.group.group_name, 0, call=words)()
        parts = [part.chunk(size, self.dim)[rank] for part in gathered.chunk(size)]
        total = torch.empty_like(parts[0], dtype=sum_dtype(product.dtype))
        add_up(parts, size if self.settings.reduce_op == "avg" else 1, total)
        for added in (self.bias, self.residual):
            if added is not None:
                total.add_(added)
        return total.to(product.dtype)
