"""Matmul + reduce-scatter of fp8 operands: what differs from operands of other formats."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import scaled_products
from agmm.ops.fp8_operands import Fp8Weights, kernel_of, problem_of, rows_of, why_unfused
from agmm.ops.pipeline import Ready
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scatter import ScatterCall, ScatterSettings
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
from agmm.runtime.scaled import FP8, Scaled, Weight, rounded_into
from agmm.runtime.scaling import Tile
from agmm.runtime.workspaces import cpu_workspace, scatter_workspace


class Fp8Scatter(ScatterCall):
    """``reduce_scatter((A * scale_a) @ (B * scale_b)) (+ bias)``.

    Args:
        A: [M, ..., K].
        scale_a: float32, of A.
        given: the one weight.
        is_bias_of_each: the bias is this rank's own, a part of its product.
    """

    op = "scaled_matmul_reduce_scatter"

    def __init__(
        self,
        A: torch.Tensor,
        scale_a: torch.Tensor,
        given: Fp8Weights,
        group: dist.ProcessGroup,
        settings: ScatterSettings,
        *,
        is_bias_of_each: bool = False,
    ) -> None:
        super().__init__(A, group, settings)
        self.scale_a = scale_a
        self.given = given
        self.is_bias_of_each = is_bias_of_each

    def check(self) -> None:
        given, settings = self.given, self.settings
        of_weight = given.Bs[0], self.scale_a, given.scale_bs[0], given.biases[0]
        check_scaled_scatter(
            self.A,
            *of_weight,
            given.result_scales[0],
            given.out_dtypes[0],
            self.group.size(),
            settings.scatter_dim,
            settings.reduce_op,
        )

    def words(self) -> Call:
        settings = self.settings
        return Call(
            self.op,
            A=self.A,
            B=self.given.Bs[0],
            scale_a=self.scale_a,
            scale_b=self.given.scale_bs[0],
            scatter_dim=settings.scatter_dim,
            reduce_op=settings.reduce_op,
        )

    @cached_property
    def _described(self) -> tuple[Tile, list[Weight]]:
        return self.given.described(self.A, self.scale_a)

    @property
    def weight(self) -> Weight:
        return self._described[1][0]

    @cached_property
    def rows(self) -> Scaled:
        """A as a matrix, the scattered dimension first."""
        return rows_of(self.A, self.scale_a, self._described[0], self.dim)

    def operands(self) -> tuple[Any, ...]:
        scale_bs = [self.weight.B.scale]
        return [self._front], self.given.Bs, self.given.biases[0], [self.rows.scale], scale_bs

    @property
    def _front(self) -> torch.Tensor:
        """A, contiguous, with the scattered dimension first."""
        return self.rows.values.view(self.A.movedim(self.dim, 0).shape)

    @property
    def columns(self) -> int:
        return self.given.Bs[0].shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        return self.given.out_dtypes[0]

    def sent(self) -> dict[str, list[torch.Tensor]]:
        given = self.given
        return {
            "A": [self.A],
            "B": [given.Bs[0]],
            "scale_a": [self.scale_a],
            "scale_b": [given.scale_bs[0]],
        }

    def lasts(self) -> bool:
        return self.dim == 0 and self.A.is_contiguous()

    def asks_a_plan(self) -> bool:
        return self.device.type == "cuda" and why_unfused(self.device, self.group) is None

    def why_no_kernel(self) -> str | None:
        reason = why_unfused(self.device, self.group)
        if reason is not None or self.device.type == "cpu":
            return reason
        if self.A.shape[-1] == 0:
            return f"fp8: shape {tuple(self.A.shape)} has no elements to multiply"
        if self.group.size() == 1:
            return "group: 1 rank, which has nothing to scatter"
        if self.is_bias_of_each and self.weight.bias is not None:
            return "bias: one of each rank, the fused path wants one of the sum"
        if self.group.size() > MAX_PUSH_RANKS:
            return (
                f"group: {self.group.size()} ranks, the fused path wants at most {MAX_PUSH_RANKS}"
            )
        problem = self._problem()
        return problem if isinstance(problem, str) else None

    def _problem(self) -> Problem | str:
        m = len(self.rows.values)
        return problem_of(self.rows, self.weight, m, op=MATMUL_REDUCE_SCATTER, group=self.group)

    def problem(self) -> Problem:
        return cast("Problem", self._problem())  # else it has no kernel

    def by_cpu(self, words: Call) -> torch.Tensor:
        summed = cpu_scatter.scaled_sum(
            self.rows, self.weight, is_bias_of_each=self.is_bias_of_each
        )
        return cpu_workspace(self.group).reduce_scatter(
            summed,
            self.settings.reduce_op,
            words,
            agreed=f"scaled, {list(self.A.shape[:-1])} along {self.dim}",
        )

    def ready_on_cuda(self, kernel: KernelConfig) -> Ready:
        rows, n, size = len(self.rows.values), self.columns, self.group.size()
        part = _core.scatter_part_bytes(rows, n, size, kernel.core)
        tiles = part // (kernel.tile_m * kernel.tile_n * self.out_dtype.itemsize)
        if tiles > MAX_SCATTER_TILES:
            raise Unsupported(
                f"A @ B: {tiles} tiles in a chunk, a kernel sends at most {MAX_SCATTER_TILES}"
            )
        call = ready_scatter(
            scatter_workspace(self.group, self.device),
            [self._front],
            self.given.Bs,
            kernel_of(self.rows, self.weight, self.problem(), kernel),
            is_average=self.settings.reduce_op == "avg",
        )
        if self.dim == 0:
            return call
        return lambda *operands: self.in_shape(call(*operands))

    def by_library(self, words: Call) -> torch.Tensor:
        weight, dim, reduce_op = self.weight, self.dim, self.settings.reduce_op
        # Summed before it is rounded to what cannot be summed, and scaled.
        of_each = weight if self.is_bias_of_each else weight._replace(bias=None)
        if self.out_dtype in FP8:
            of_each = of_each._replace(result_scale=None, out_dtype=torch.bfloat16)
        A = rows_of(self.A, self.scale_a, self._described[0], 0)
        partial = scaled_products.product(A, of_each).view(self.shape)
        out = collectives.reduce_scatter(
            partial, self.group.group_name, dim, call=words, then=f" for {reduce_op}"
        )
        if reduce_op == "avg":
            out = out.div_(self.group.size())
        if weight.bias is not None and not self.is_bias_of_each:
            out = out.add_(weight.bias)
        if self.out_dtype in FP8:
            rounded = out.new_empty(out.shape, dtype=self.out_dtype)
            return rounded_into(rounded, out.float(), weight.result_scale)
        return out
