"""All-gather + matmul of fp8 operands: what differs from operands of other formats."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument
from agmm.ops import portable, scaled_products
from agmm.ops.fp8_behind_gather import behind_gather
from agmm.ops.fp8_operands import Fp8Weights, kernel_of, problem_of, rows_of, why_unfused
from agmm.ops.gather import Behind, GatherCall, Gathered, GatherSettings
from agmm.ops.kernel_epilogues import why_scaled_behind
from agmm.ops.pipeline import Ready, Route
from agmm.ops.scaled_checks import check_scaled_gather
from agmm.planning import call_plans, legality
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transports import FusedGather
from agmm.runtime import collectives, groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.cpu_scaled import all_gather_scaled_matmul as all_gather_on_cpu
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_gather import ready_gather
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.results import moved, reshaped
from agmm.runtime.scaled import FP8, Scaled, Weight, rounded_into
from agmm.runtime.scaling import ALL, Tile
from agmm.runtime.workspaces import cpu_workspace

_Matrices = tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]
"""A, its scales and the products, all as matrices of rows."""


class Fp8Gather(GatherCall):
    """``all_gather(A_shard * scale_a) @ (B * scale_b) (+ bias)`` for each weight.

    Args:
        A_shard: [M_local, ..., K].
        scale_a: float32, of A_shard.
        given: the weights.
        quantize: the kind of the scales, where an ``all_gather_matmul`` has made them; else "".
    """

    def __init__(
        self,
        A_shard: torch.Tensor,
        scale_a: torch.Tensor,
        given: Fp8Weights,
        group: dist.ProcessGroup,
        settings: GatherSettings,
        quantize: str = "",
    ) -> None:
        super().__init__(A_shard, group, settings)
        self.scale_a = scale_a
        self.given = given
        self.quantize = quantize

    def check(self) -> None:
        given = self.given
        check_scaled_gather(
            *(self.A_shard, self.scale_a, given.Bs, given.scale_bs, given.biases),
            *(given.result_scales, given.out_dtypes, self.settings.gather_dim),
        )
        if self.settings.epilogue is not None:
            self.settings.epilogue.check(given.Bs, given.out_dtypes[0])
            if self.settings.epilogue.is_gated and given.result_scales[1] is not None:
                raise InvalidArgument(
                    "result_scale: found one of up, wanted one of the result alone, as that of gate"
                )
        self.named_config()

    def words(self) -> Call:
        given = self.given
        last = {"quantize": self.quantize} if self.quantize else {"return_A": self.return_A}
        return Call(
            self.op if self.quantize else "all_gather_scaled_matmul",
            A_shard=self.A_shard,
            B=list(given.Bs),
            scale_a=self.scale_a,
            scale_b=list(given.scale_bs),
            gather_dim=self.settings.gather_dim,
            **last,
            **self.asked,
        )

    @property
    def return_A(self) -> bool:
        return self.settings.return_A

    @cached_property
    def _described(self) -> tuple[Tile, list[Weight]]:
        return self.given.described(self.A_shard, self.scale_a, self.quantize)

    @property
    def weights(self) -> list[Weight]:
        """The weights as they are multiplied by all but the CPU backend: an epilogue behind the
        products has their scales and rounds them."""
        weights = self._described[1]
        if self.settings.epilogue is None:
            return weights
        return [
            weight._replace(out_dtype=self._before_rounding(weight.out_dtype), result_scale=None)
            for weight in weights
        ]

    def _before_rounding(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the products of which an epilogue makes results of that dtype."""
        if self.device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if dtype in FP8 else dtype

    def why_no_kernel_has(self, epilogue: Epilogue) -> str | None:
        kernel, _ = self.named_config()
        plan = self.settings.plan
        if plan is not None and plan.kernel is not None:
            kernel = plan.kernel
        return why_scaled_behind(epilogue, self.shard, self._described[1], kernel)

    def behind(self, epilogue: Epilogue) -> Behind:
        return _Behind(epilogue, self.given.out_dtypes, self.given.result_scales)

    def has_one_kind_of_scales(self) -> bool:
        return len({weight.B.tile for weight in self.weights}) == 1

    @cached_property
    def shard(self) -> Scaled:
        return rows_of(self.A_shard, self.scale_a, self._described[0], self.dim)

    def lasts(self) -> bool:
        """Only calls whose operands need no copies, and no argument that a kept call is not given,
        are kept."""
        has_result_scale = any(scale is not None for scale in self.given.result_scales)
        is_as_given = self.dim == 0 and self.A_shard.is_contiguous()
        return is_as_given and not has_result_scale and self.group.size() > 1

    def operands(self) -> tuple[Any, ...]:
        given, weights = self.given, self.weights
        if self.lasts():
            return self.A_shard, given.Bs, given.biases, self.scale_a, given.scale_bs
        scale_bs = [weight.B.scale for weight in weights]
        return self._front, given.Bs, given.biases, self.shard.scale, scale_bs

    @property
    def _front(self) -> torch.Tensor:
        """The shard, contiguous, with the gathered dimension first."""
        return self.shard.values.view(self.A_shard.movedim(self.dim, 0).shape)

    def columns(self) -> list[int]:
        return [B.shape[1] for B in self.given.Bs]

    def is_for_library(self) -> bool:
        """Whether ``torch._scaled_mm`` multiplies all weights; else the library would multiply
        dequantised operands."""
        if self.device.type != "cuda":
            return True
        return not any(map(scaled_products.why_not_by_torch, self.weights))

    def also_agreed(self) -> str:
        return f", scales {list(self.shard.scale.shape)}"

    def why_no_kernel(self) -> str | None:
        reason = why_unfused(self.device, self.group)
        if reason is not None or self.device.type == "cpu":
            return reason
        reason = legality.why_too_many_rows(len(self.shard.values), self.group.size())
        if reason is not None:
            return reason
        first = self.given.Bs[0].dtype
        for B in self.given.Bs:
            if B.dtype != first:
                return f"B: found dtypes {first} and {B.dtype}, wanted one on CUDA"
        problems = [self._problem(weight) for weight in self.weights]
        return next((problem for problem in problems if isinstance(problem, str)), None)

    def _problem(self, weight: Weight, epilogue: Epilogue | None = None) -> Problem | str:
        m, wanted = self.group.size() * len(self.shard.values), self.return_A
        return problem_of(
            self.shard, weight, m, return_A=wanted, group=self.group, epilogue=epilogue
        )

    def problem(self, weight: int | None) -> Problem:
        if self.device.type == "cpu":
            columns = self.columns()
            m = self.group.size() * len(self.shard.values)
            n = sum(columns) if weight is None else columns[weight]
            return call_plans.problem_of(
                (m, n, self.A_shard.shape[-1]),
                self.A_shard.dtype,
                self.device,
                group=self.group,
                return_A=self.return_A,
                column_major=self.given.Bs[weight or 0].stride(0) == 1,
            )
        # Else the call has no kernel.
        found = cast("Problem", self._problem(self.weights[weight or 0], self.in_kernel))
        return replace(found, n=sum(self.columns())) if weight is None else found

    def look(self, route: Route, words: Call) -> None:
        if not nan_check.active:
            return
        rank = groups.of(self.group).rank
        nan_check.look_through(words.op, "A_shard", self.A_shard, rank)
        if not self.quantize:  # else a NaN in A_shard is what made the scale one
            nan_check.look_through(words.op, "scale_a", self.scale_a, rank)

    def ready_on_cuda(
        self, workspace: CudaWorkspace, kernels: Sequence[KernelConfig], transport: FusedGather
    ) -> Ready:
        found = [
            kernel_of(self.shard, self.weights[i], self.problem(i), config, self.in_kernel)
            for i, config in enumerate(kernels)
        ]
        return ready_gather(
            workspace,
            self._front,
            [weight.B.values for weight in self.weights],
            found,
            return_A=self.return_A,
            transport=transport.core_arguments(),
        )

    def by_cpu(self) -> _Matrices:
        planner = call_plans.planner(self.group, self.device)
        plan = self.settings.plan or planner.plan(self.problem(None))
        return all_gather_on_cpu(
            cpu_workspace(self.group),
            self.shard,
            self._described[1],
            self.words(),
            return_A=self.return_A,
            chunks=plan.chunks_per_shard,
            epilogue=self.settings.epilogue,
        )

    def ready_behind_gather(self, kernels: Sequence[KernelConfig | None]) -> Ready:
        return behind_gather(
            self.shard, self.weights, kernels, self.leading, self.group, self.return_A
        )

    def ready_by_copies(self, pieces: int) -> Ready:
        weights, shard = self.weights, self.shard
        ready = portable.ReadyScaledGather(
            portable.gathers(self.group, self.device, self.words()),
            *(pieces, self.return_A, str(self.words())),
            [(weight.B.values.shape[1], weight.out_dtype) for weight in weights],
            lambda rows: [scaled_products.product(rows, weight) for weight in weights],
        )
        return lambda *_: ready(shard)

    def lasts_by_copies(self) -> bool:
        return False  # it is ready for these tensors alone

    def why_not_by_copies(self) -> str | None:
        return None  # the shard is made contiguous, with the gathered dimension first

    @property
    def values(self) -> torch.Tensor:
        return self.shard.values

    def again_on_cpu(self) -> Ready:
        if not self.lasts():
            return lambda *_: self.by_cpu()
        given = self.given
        settings = given.result_scales, given.out_dtypes, given.fast_accum
        return _OnCpu(weakref.ref(self.group), self.settings, settings, self.quantize)

    def finished(self, found: Any, route: Route) -> Gathered:
        return self.in_shape(*found)

    def by_library(self, words: Call) -> Gathered:
        shard, name = self.shard, self.group.group_name
        # Bytes are sent, since not all backends know the dtypes. Both begin before one is awaited.
        # What is sent has been looked through.
        with groups.of(self.group).lock, nan_check.done():
            finishes = [
                collectives.start_all_gather(tensor, name, 0, call=words)
                for tensor in (shard.values.view(torch.uint8), shard.scale)
            ]
        values, scale = (finish() for finish in finishes)
        return self.in_shape(*self._multiplied(values.view(shard.values.dtype), scale))

    def on_nothing(self) -> Gathered:
        """The results, for which nothing moves but scales that are asked for."""
        size, shard = self.group.size(), self.shard
        scale = shard.scale
        if self.return_A and scale.numel() and size > 1:
            gather = torch.ops.agmm._all_gather.default
            scale = gather(scale.contiguous(), self.group.group_name, size, 0)
        else:
            scale = scale.repeat(size, 1)
        values = shard.values.new_empty(size * len(shard.values), shard.values.shape[1])
        return self.in_shape(*self._multiplied(values, scale))

    def _multiplied(self, values: torch.Tensor, scale: torch.Tensor) -> _Matrices:
        """The gathered rows and scales, and the library's products with them."""
        tile = self.shard.tile
        if tile[0] == ALL:
            tile = (len(self.shard.values), ALL)
        A = Scaled(values, scale, tile)
        products = [scaled_products.product(A, weight) for weight in self.weights]
        return values, scale, self.with_epilogue(products)

    def in_shape(
        self, A: torch.Tensor | None, scale: torch.Tensor | None, outs: list[torch.Tensor]
    ) -> Gathered:
        """Matrices of rows in the shapes that the op returns."""
        leading, dim = self.leading, self.dim

        def unfolded(rows: torch.Tensor) -> torch.Tensor:
            return moved(reshaped(rows, (*leading, rows.shape[-1])), 0, dim)

        outs = [unfolded(out) for out in outs]
        if not self.return_A or A is None or scale is None:
            return Gathered(None, None, outs)
        if self.shard.tile[0] != ALL:
            scale = unfolded(scale)
        return Gathered(unfolded(A), scale, outs)


class _Behind(NamedTuple):
    """Makes results of products, rounded once to their dtypes."""

    epilogue: Epilogue
    out_dtypes: Sequence[torch.dtype]
    result_scales: Sequence[torch.Tensor | None]

    def __call__(self, products: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        of_each = zip(self.epilogue(products), self.out_dtypes, self.result_scales, strict=False)
        for result, dtype, scale in of_each:
            if dtype in FP8 or scale is not None:
                out = torch.empty_like(result, dtype=dtype)
                found.append(rounded_into(out, result.to(torch.float32), scale))
            else:
                found.append(result.to(dtype))
        return found


class _OnCpu(NamedTuple):
    """Computes calls of one kind, along dimension 0, by the CPU backend."""

    group: weakref.ReferenceType[dist.ProcessGroup]
    settings: GatherSettings
    of_weights: tuple[Any, ...]
    """The last fields of `Fp8Weights`, in which there is no tensor."""
    quantize: str

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        scale_a: torch.Tensor,
        scale_bs: Sequence[torch.Tensor],
    ) -> Gathered:
        group = self.group()
        assert group is not None
        given = Fp8Weights(Bs, scale_bs, biases, *self.of_weights)
        call = Fp8Gather(A_shard, scale_a, given, group, self.settings, self.quantize)
        return call.in_shape(*call.by_cpu())
