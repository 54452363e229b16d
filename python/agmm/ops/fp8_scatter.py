"""Matmul + reduce-scatter of fp8 operands: what differs from operands of other formats."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from agmm.ops.fp8_sums import Fp8Sum, by_library, of_call, rounded
from agmm.ops.pipeline import Ready
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scatter import ScatterCall, ScatterSettings
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import collectives, cpu_scatter
from agmm.runtime.calls import Call
from agmm.runtime.rank_sums import Total
from agmm.runtime.scaled import ScaledProducts
from agmm.runtime.workspaces import cpu_workspace


class Fp8Scatter(Fp8Sum, ScatterCall):
    """``reduce_scatter(sum of (A * scale_a) @ (B * scale_b)) (+ bias)``.

    Args:
        given: the products.
        is_bias_of_each: the bias is this rank's own, a part of its first product.
    """

    op = "scaled_matmul_reduce_scatter"

    def __init__(
        self,
        given: ScaledProducts,
        group: dist.ProcessGroup,
        settings: ScatterSettings,
        *,
        is_bias_of_each: bool = False,
    ) -> None:
        super().__init__(given.As[0], group, settings)
        self.given = given
        self.is_bias_of_each = is_bias_of_each

    def check(self) -> None:
        settings = self.settings
        check_scaled_scatter(
            self.given, self.group.size(), settings.scatter_dim, settings.reduce_op
        )

    def words(self) -> Call:
        dim, reduce_op = self.settings.scatter_dim, self.settings.reduce_op
        return Call(self.op, **self.named(), scatter_dim=dim, reduce_op=reduce_op)

    def operands(self) -> tuple[Any, ...]:
        scale_as = [rows.scale for rows, _ in self.products]
        scale_bs = [weight.B.scale for _, weight in self.products]
        return of_call(self._fronts(), self.given.Bs, self.given.bias, scale_as, scale_bs)

    def _fronts(self) -> list[torch.Tensor]:
        """Each A, contiguous, with the scattered dimension first."""
        leading = self.A.movedim(self.dim, 0).shape[:-1]
        return [rows.values.view(*leading, rows.values.shape[1]) for rows, _ in self.products]

    def lasts(self) -> bool:
        return self.dim == 0 and all(A.is_contiguous() for A in self.given.As)

    def why_no_kernel(self) -> str | None:
        reason = super().why_no_kernel()
        if reason is None and self.device.type != "cpu" and self._bias_of_each is not None:
            return "bias: one of each rank, the fused path wants one of the sum"
        return reason

    @property
    def _bias_of_each(self) -> torch.Tensor | None:
        return self.given.bias if self.is_bias_of_each else None

    def problem(self) -> Problem:
        found = self.of_scatter(self.A.shape[:-1].numel())
        return cast("Problem", found)  # else it has no kernel

    def by_cpu(self, words: Call) -> torch.Tensor:
        summed = cpu_scatter.scaled_sum(self.products, is_bias_of_each=self.is_bias_of_each)
        return cpu_workspace(self.group).reduce_scatter(
            summed,
            self.settings.reduce_op,
            words,
            agreed=f"scaled, {list(self.A.shape[:-1])} along {self.dim}",
        )

    def ready_on_cuda(self, kernel: KernelConfig) -> Ready:
        call = self.ready_scatter(
            kernel, self._fronts()[0], is_average=self.settings.reduce_op == "avg"
        )
        if self.dim == 0:
            return call
        return lambda *operands: self.in_shape(call(*operands))

    def ready_by_copies(self) -> Ready:
        size = self.group.size()
        total = Total(
            size if self.settings.reduce_op == "avg" else 1,
            None if self.is_bias_of_each else self.given.bias,
            result_scale=self.given.result_scale,
        )
        rows = self.A.shape[:-1].numel() // size
        return lambda *_: self.in_shape(self.by_pieces_of(rows, total, self._bias_of_each))

    def by_library(self, words: Call) -> torch.Tensor:
        reduce_op, of_all = self.settings.reduce_op, self.given._replace(bias=None)
        # The products are summed before the sum is scaled, and rounded to a dtype that cannot be
        # summed.
        partial = by_library(of_all._replace(bias=self._bias_of_each))
        out = collectives.reduce_scatter(
            partial, self.group.group_name, self.dim, call=words, then=f" for {reduce_op}"
        )
        if reduce_op == "avg":
            out = out.div_(self.group.size())
        return rounded(of_all if self.is_bias_of_each else self.given, out)
