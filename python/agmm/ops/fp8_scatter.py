"""Matmul + reduce-scatter of fp8 operands: what differs from operands of other formats."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import scaled_products
from agmm.ops.fp8_operands import described, kernel_of, problem_of, rows_of, why_unfused
from agmm.ops.pipeline import Ready
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scatter import ScatterCall, ScatterSettings
from agmm.planning import formats, legality
from agmm.planning.plans import (
    MATMUL_REDUCE_SCATTER,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    KernelConfig,
    Problem,
)
from agmm.runtime import collectives, cpu_scatter
from agmm.runtime.calls import Call
from agmm.runtime.cuda_scatter import ready_scatter
from agmm.runtime.scaled import FP8, Scaled, ScaledProducts, Weight, rounded_into
from agmm.runtime.workspaces import cpu_workspace, scatter_workspace


class Fp8Scatter(ScatterCall):
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
        settings, given = self.settings, self.sent()
        operands = given if len(self.given.As) > 1 else {name: t for name, (t,) in given.items()}
        dim, reduce_op = settings.scatter_dim, settings.reduce_op
        return Call(self.op, **operands, scatter_dim=dim, reduce_op=reduce_op)

    @cached_property
    def products(self) -> list[tuple[Scaled, Weight]]:
        """Each A as a matrix, the scattered dimension first, and what it is multiplied with."""
        return self._products(self.dim)

    def _products(self, dim: int) -> list[tuple[Scaled, Weight]]:
        """Make `products` with the dimension first."""
        given = self.given
        return [
            (rows_of(A, scale, tile, dim), weight)
            for A, scale, (tile, weight) in zip(
                given.As, given.scale_as, described(given), strict=True
            )
        ]

    def operands(self) -> tuple[Any, ...]:
        scale_as = [rows.scale for rows, _ in self.products]
        scale_bs = [weight.B.scale for _, weight in self.products]
        return self._fronts(), self.given.Bs, self.given.bias, scale_as, scale_bs

    def _fronts(self) -> list[torch.Tensor]:
        """Each A, contiguous, with the scattered dimension first."""
        leading = self.A.movedim(self.dim, 0).shape[:-1]
        return [rows.values.view(*leading, rows.values.shape[1]) for rows, _ in self.products]

    @property
    def columns(self) -> int:
        return self.given.Bs[0].shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        return self.given.out_dtype

    def sent(self) -> dict[str, list[torch.Tensor]]:
        names = "A", "B", "scale_a", "scale_b"
        return {name: list(given) for name, given in zip(names, self.given[:4], strict=True)}

    def lasts(self) -> bool:
        return self.dim == 0 and all(A.is_contiguous() for A in self.given.As)

    def asks_a_plan(self) -> bool:
        return self.device.type == "cuda" and why_unfused(self.device, self.group) is None

    def why_no_kernel(self) -> str | None:
        reason = why_unfused(self.device, self.group)
        if reason is not None or self.device.type == "cpu":
            return reason
        for A in self.given.As:
            if A.shape[-1] == 0:
                return f"fp8: shape {tuple(A.shape)} has no elements to multiply"
        if self.group.size() == 1:
            return "group: 1 rank, which has nothing to scatter"
        if self.is_bias_of_each and self.given.bias is not None:
            return "bias: one of each rank, the fused path wants one of the sum"
        if self.group.size() > MAX_PUSH_RANKS:
            return (
                f"group: {self.group.size()} ranks, the fused path wants at most {MAX_PUSH_RANKS}"
            )
        reason = legality.why_too_many_products(formats.FP8, len(self.given.As))
        if reason is not None:
            return reason
        problem = self._problem()
        return problem if isinstance(problem, str) else None

    def _problem(self) -> Problem | str:
        ((rows, weight),) = self.products  # a kernel has one
        m = len(rows.values)
        return problem_of(rows, weight, m, op=MATMUL_REDUCE_SCATTER, group=self.group)

    def problem(self) -> Problem:
        return cast("Problem", self._problem())  # else it has no kernel

    def by_cpu(self, words: Call) -> torch.Tensor:
        summed = cpu_scatter.scaled_sum(self.products, is_bias_of_each=self.is_bias_of_each)
        return cpu_workspace(self.group).reduce_scatter(
            summed,
            self.settings.reduce_op,
            words,
            agreed=f"scaled, {list(self.A.shape[:-1])} along {self.dim}",
        )

    def ready_on_cuda(self, kernel: KernelConfig) -> Ready:
        ((rows, weight),) = self.products
        m, n, size = len(rows.values), self.columns, self.group.size()
        part = _core.scatter_part_bytes(m, n, size, kernel.core)
        tiles = part // (kernel.tile_m * kernel.tile_n * self.out_dtype.itemsize)
        if tiles > MAX_SCATTER_TILES:
            raise Unsupported(
                f"A @ B: {tiles} tiles in a chunk, a kernel sends at most {MAX_SCATTER_TILES}"
            )
        call = ready_scatter(
            scatter_workspace(self.group, self.device),
            self._fronts(),
            self.given.Bs,
            kernel_of(rows, weight, self.problem(), kernel),
            is_average=self.settings.reduce_op == "avg",
        )
        if self.dim == 0:
            return call
        return lambda *operands: self.in_shape(call(*operands))

    def by_library(self, words: Call) -> torch.Tensor:
        dim, reduce_op, bias = self.dim, self.settings.reduce_op, self.given.bias
        partial = self.partial().view(self.shape)
        out = collectives.reduce_scatter(
            partial, self.group.group_name, dim, call=words, then=f" for {reduce_op}"
        )
        if reduce_op == "avg":
            out = out.div_(self.group.size())
        if bias is not None and not self.is_bias_of_each:
            out = out.add_(bias)
        if self.out_dtype in FP8:
            rounded = out.new_empty(out.shape, dtype=self.out_dtype)
            return rounded_into(rounded, out.float(), self.given.result_scale)
        return out

    def partial(self) -> torch.Tensor:
        """What this rank adds to the sum, as a matrix: by the library, in a dtype that can be
        summed, not scaled."""
        changes: dict[str, Any] = {} if self.is_bias_of_each else {"bias": None}
        if self.out_dtype in FP8:
            changes |= {"result_scale": None, "out_dtype": torch.bfloat16}
        products = self._products(0)
        return scaled_products.sum_of([(A, weight._replace(**changes)) for A, weight in products])
