"""Matmul + all-reduce of fp8 operands: what differs from operands of other formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import scatter_plan
from agmm.ops.all_reduce import AllReduceCall, LibrarySum, Load
from agmm.ops.fp8_sums import Fp8Sum, by_library, of_call, rounded, summed_dtype
from agmm.ops.pipeline import Ready
from agmm.ops.scaled_checks import check_scaled_sum
from agmm.planning.plans import Plan
from agmm.planning.problems import MATMUL_ALL_REDUCE, KernelConfig
from agmm.runtime import cpu_scatter
from agmm.runtime.calls import Call
from agmm.runtime.rank_sums import Total
from agmm.runtime.scaled import ScaledProducts
from agmm.runtime.workspaces import cpu_workspace


class Fp8AllReduce(Fp8Sum, AllReduceCall):
    """``all_reduce((A * scale_a) @ (B * scale_b)) (+ bias)``.

    Args:
        given: one product.
        plan: what the caller asks for.
    """

    op = "scaled_matmul_all_reduce"

    def __init__(
        self,
        given: ScaledProducts,
        group: dist.ProcessGroup,
        strict: bool,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(given.As[0], group, strict=strict)
        self.given = given
        self.named_plan = plan

    def check(self) -> None:
        check_scaled_sum(self.given)

    def words(self) -> Call:
        return Call(self.op, **self.named())

    def operands(self) -> tuple[Any, ...]:
        (A,), (B,), (scale_a,), (scale_b,), bias, result_scale, *_ = self.given
        return A, B, bias, scale_a, scale_b, result_scale

    @property
    def partial_dtype(self) -> torch.dtype:
        return summed_dtype(self.out_dtype)

    def plan(self, rows: int) -> scatter_plan.AllReducePlan:
        found = self.of_scatter(rows)
        assert not isinstance(found, str)  # else it has no kernel
        problem = replace(found, op=MATMUL_ALL_REDUCE)
        return scatter_plan.all_reduce_plan_of(
            *(problem, self.group, self.device), strict=self.strict, choose=self.choose_way
        )

    def by_cpu(self, words: Call) -> torch.Tensor:
        summed = cpu_scatter.scaled_sum(self.products)
        return cpu_workspace(self.group).all_reduce(summed, words, agreed=f"scaled, {self.shape}")

    def load(self) -> Load:
        ((A, _),) = self.products
        return _Load(A.tile[0] == 1, self.missing)

    def ready_on_cuda(self, kernel: KernelConfig, all_reduce_sms: int) -> Ready:
        assert not all_reduce_sms  # legality has no lagged plan of fp8
        rows, columns = self.rows + self.missing, self.A.shape[-1]
        return self.ready_scatter(kernel, self.A.new_empty(1, 1).expand(rows, columns))

    def ready_by_copies(self) -> Ready:
        given, rows = self.given, (self.rows + self.missing) // self.group.size()
        total = Total(1, given.bias, result_scale=given.result_scale)
        return lambda *_: self.by_pieces_of(rows, total)

    def library(self) -> LibrarySum:
        return _Library(self.out_dtype, self.given.fast_accum)


class _Load(NamedTuple):
    is_rowwise: bool
    """Whether each row of A has a scale, or one for each block of it."""
    missing: int

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        _: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        rows = A.reshape(-1, A.shape[-1]).contiguous()
        if self.is_rowwise:
            scale_a = scale_a.reshape(-1, scale_a.shape[-1])
        if self.missing:
            more = 0, 0, 0, self.missing
            # Bytes are padded, whose zeros are those of fp8, since not all builds of torch fill fp8
            # tensors.
            rows = torch.nn.functional.pad(rows.view(torch.uint8), more).view(A.dtype)
            if self.is_rowwise:
                scale_a = torch.nn.functional.pad(scale_a, more)
        return of_call([rows], [B], bias, [scale_a], [scale_b])


class _Library(NamedTuple):
    out_dtype: torch.dtype
    fast_accum: bool

    def partial(self, *operands: Any) -> torch.Tensor:
        return by_library(self._given(*operands)._replace(bias=None))

    def total(self, out: torch.Tensor, *operands: Any) -> torch.Tensor:
        return rounded(self._given(*operands), out)

    def _given(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        result_scale: torch.Tensor | None,
    ) -> ScaledProducts:
        return ScaledProducts([A], [B], [scale_a], [scale_b], bias, result_scale, *self)
