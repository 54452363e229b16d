"""Sums over the ranks of products of fp8 operands: what a reduce-scatter and an all-reduce of them
share, and what differs from operands of other formats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch

from agmm import _core
from agmm.errors import Unsupported
from agmm.ops import portable, scaled_products
from agmm.ops.fp8_operands import described, kernel_of, problem_of, rows_of, why_unfused
from agmm.ops.sums import SumCall
from agmm.planning import formats, legality
from agmm.planning.problems import (
    MATMUL_REDUCE_SCATTER,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    KernelConfig,
    Problem,
)
from agmm.runtime.cuda_scatter import ReadyScatter, ready_scatter
from agmm.runtime.rank_sums import Total
from agmm.runtime.results import reshaped
from agmm.runtime.scaled import FP8, Scaled, ScaledProducts, Weight, rounded_into
from agmm.runtime.workspaces import scatter_workspace


def summed_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """In which dtype the ranks' products are sent and summed where the library multiplies."""
    return torch.bfloat16 if out_dtype in FP8 else out_dtype


def by_library(given: ScaledProducts) -> torch.Tensor:
    """The sum of the products on this rank [M, ..., N], in `summed_dtype`, not scaled."""
    given = given._replace(result_scale=None, out_dtype=summed_dtype(given.out_dtype))
    total = scaled_products.sum_of(rows_and_weights(given, 0))
    return reshaped(total, (*given.As[0].shape[:-1], total.shape[1]))


def rounded(given: ScaledProducts, out: torch.Tensor) -> torch.Tensor:
    """The result: the sum over the ranks, which is overwritten, and the bias, in `out_dtype`."""
    if given.bias is not None:
        out = out.add_(given.bias)
    if given.out_dtype not in FP8:
        return out
    found = out.new_empty(out.shape, dtype=given.out_dtype)
    return rounded_into(found, out.float(), given.result_scale)


def rows_and_weights(given: ScaledProducts, dim: int) -> list[tuple[Scaled, Weight]]:
    """Each A as a matrix, the rows in the order that ``dim`` first gives, and what it is multiplied
    with."""
    operands = zip(given.As, given.scale_as, described(given), strict=True)
    return [(rows_of(A, scale, tile, dim), weight) for A, scale, (tile, weight) in operands]


class Fp8Sum(SumCall):
    """A sum of fp8 products, which are ``given``."""

    given: ScaledProducts

    @cached_property
    def products(self) -> list[tuple[Scaled, Weight]]:
        """Each A as a matrix, the dimension first whose parts ranks own, and what it is multiplied
        with."""
        return rows_and_weights(self.given, self.dim)

    @property
    def columns(self) -> int:
        return self.given.Bs[0].shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        return self.given.out_dtype

    def sent(self) -> dict[str, list[torch.Tensor]]:
        names = "A", "B", "scale_a", "scale_b"
        return {name: list(given) for name, given in zip(names, self.given[:4], strict=True)}

    def named(self) -> dict[str, object]:
        """The operands by the names of the op's arguments, in lists where there are several."""
        several = len(self.given.As) > 1
        return {name: given if several else given[0] for name, given in self.sent().items()}

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
        if self.group.size() > MAX_PUSH_RANKS:
            return (
                f"group: {self.group.size()} ranks, the fused path wants at most {MAX_PUSH_RANKS}"
            )
        reason = legality.why_too_many_products(formats.FP8, len(self.given.As))
        if reason is not None:
            return reason
        found = self.of_scatter(self.A.shape[:-1].numel())
        return found if isinstance(found, str) else None

    def ready_scatter(
        self, kernel: KernelConfig, A: torch.Tensor, *, is_average: bool = False
    ) -> ReadyScatter:
        """The call of agmm's kernel that scatters the one product, for any operands of this kind.

        Args:
            A: contiguous, of the sizes that the kernel is given.
        """
        ((operand, weight),) = self.products
        rows, n, size = A.shape[:-1].numel(), self.columns, self.group.size()
        part = _core.scatter_part_bytes(rows, n, size, kernel.core)
        tiles = part // (kernel.tile_m * kernel.tile_n * self.out_dtype.itemsize)
        if tiles > MAX_SCATTER_TILES:
            raise Unsupported(
                f"A @ B: {tiles} tiles in a chunk, a kernel sends at most {MAX_SCATTER_TILES}"
            )
        problem = cast("Problem", self.of_scatter(rows))  # else it has no kernel
        return ready_scatter(
            scatter_workspace(self.group, self.device),
            [A],
            self.given.Bs,
            kernel_of(operand, weight, problem, kernel),
            is_average=is_average,
        )

    def lasts_by_copies(self) -> bool:
        return False  # it is ready for these tensors alone

    def by_pieces_of(
        self, rows: int, total: Total, bias_of_each: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's rows of the sum over the ranks, by copies or messages beside products of the
        library. Collective.

        Args:
            rows: of each rank; those behind the last of A are zeros.
            bias_of_each: this rank's own, a part of its first product.
        """
        sent_dtype = summed_dtype(self.out_dtype)
        products = [
            (
                A,
                weight._replace(
                    bias=None if i else bias_of_each, result_scale=None, out_dtype=sent_dtype
                ),
            )
            for i, (A, weight) in enumerate(self.products)
        ]
        out = self.A.new_empty(rows, self.columns, dtype=self.out_dtype)
        last = len(products[0][0].values)

        def product(owner: int, into: torch.Tensor) -> None:
            cut = slice(min(owner * rows, last), min((owner + 1) * rows, last))
            there = cut.stop - cut.start
            if there:
                made = scaled_products.sum_of([(A.rows(cut), weight) for A, weight in products])
                into[:there].copy_(made)
            into[there:].zero_()

        words = self.words()
        workspace = portable.scatters(self.group, self.device, words)
        portable.scattered(workspace, out, sent_dtype, product, total, str(words))
        return out

    def of_scatter(self, rows: int) -> Problem | str:
        """What the planner is asked of a scatter of so many rows of the one product, or the reason
        why no kernel serves it."""
        ((A, weight),) = self.products
        return problem_of(A, weight, rows, op=MATMUL_REDUCE_SCATTER, group=self.group)


def of_call(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scale_as: Sequence[torch.Tensor],
    scale_bs: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Return the operands as `cuda_scatter.ReadyScatter` takes them; fp8 has no residual."""
    return As, Bs, bias, None, scale_as, scale_bs
