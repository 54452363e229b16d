"""All-gather + matmul of operands that need no scales."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.ops import behind_gather, kept, portable, small_collectives, streamed_gather
from agmm.ops.checks import FLOATS, check_gatherable
from agmm.ops.gather import GatherCall, Gathered, GatherSettings
from agmm.ops.kernel_epilogues import why_behind
from agmm.ops.pipeline import Ready, serve
from agmm.planning import call_plans, legality
from agmm.planning.problems import PLAIN, KernelConfig, Problem
from agmm.planning.transports import FusedGather
from agmm.runtime import cuda_calls, symmetric
from agmm.runtime.calls import Call
from agmm.runtime.collectives import start_all_gather
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import Kernel, b_layout, plain_format
from agmm.runtime.cuda_gather import ready_gather
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.results import reshaped
from agmm.runtime.workspaces import cpu_workspace


class PlainGather(GatherCall):
    """``all_gather(A_shard) @ B (+ bias)`` for each weight.

    Args:
        A_shard: [M_local, ..., K].
        Bs: [K, N] each.
        biases: [N] or None for each weight.
    """

    def __init__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        group: dist.ProcessGroup,
        settings: GatherSettings,
    ) -> None:
        super().__init__(A_shard, group, settings)
        self.Bs = Bs
        self.biases = biases

    def check(self) -> None:
        check_gatherable(
            self.A_shard, self.Bs, self.biases, self.settings.gather_dim, self.group.size()
        )
        if self.settings.epilogue is not None:
            self.settings.epilogue.check(self.Bs, self.A_shard.dtype)
        self.named_config()

    def words(self) -> Call:
        dim = self.settings.gather_dim
        return Call(self.op, A_shard=self.A_shard, B=self.Bs, gather_dim=dim, **self.asked)

    def operands(self) -> tuple[Any, ...]:
        return self.A_shard, self.Bs, self.biases

    def columns(self) -> list[int]:
        return [B.shape[1] for B in self.Bs]

    def why_no_kernel(self) -> str | None:
        A, device = self.A_shard, self.device
        if self.dim != 0:
            return f"gather_dim: {self.settings.gather_dim}, the fused path wants 0"
        if not A.is_contiguous():
            return f"A_shard: strides {tuple(A.stride())} are not contiguous"
        if device.type == "cpu":
            if A.dtype not in FLOATS:
                return f"A_shard: dtype={A.dtype}, the CPU backend wants a floating-point type"
            return None
        reason = symmetric.why_group_unfused(self.group, device)
        reason = reason or legality.why_too_many_rows(A.shape[:-1].numel(), self.group.size())
        dtype = str(A.dtype).removeprefix("torch.")
        for B in self.Bs:
            reason = (
                reason
                or legality.why_unfused(dtype, B.shape[1], A.shape[-1])
                or cuda_calls.why_b_unfused(B)
            )
        return reason

    def problem(self, weight: int | None) -> Problem:
        columns, B, epilogue = self.widths(), self.Bs[weight or 0], self.in_kernel
        k = self.A_shard.shape[-1]
        layout = b_layout(B)
        n = sum(columns) if weight is None else columns[weight]
        return call_plans.problem_of(
            (self.group.size() * (self.A_shard.numel() // k), n, k),
            self.A_shard.dtype,
            self.device,
            group=self.group,
            return_A=self.settings.return_A,
            column_major=layout.column_major if layout is not None else B.stride(0) == 1,
            epilogue=PLAIN if epilogue is None else epilogue.kernel,
        )

    def why_no_kernel_has(self, epilogue: Epilogue) -> str | None:
        kernel, _ = self.named_config()
        plan = self.settings.plan
        if plan is not None and plan.kernel is not None:
            kernel = plan.kernel
        return why_behind(epilogue, self.Bs, kernel)

    def ready_on_cuda(
        self, workspace: CudaWorkspace, kernels: Sequence[KernelConfig], transport: FusedGather
    ) -> Ready:
        form, epilogue = plain_format("A_shard", self.A_shard), self.in_kernel
        of_kernel = ("", "") if epilogue is None else (epilogue.activation, epilogue.quantize_out)
        return ready_gather(
            workspace,
            self.A_shard,
            self.Bs,
            [Kernel(kernel.core, form, *of_kernel) for kernel in kernels],
            return_A=self.settings.return_A,
            transport=transport.core_arguments(),
        )

    def by_cpu(self) -> Gathered:
        k = self.A_shard.shape[-1]
        planner = call_plans.planner(self.group, self.device)
        plan = self.settings.plan or planner.plan(self.problem(None))
        A, outs = cpu_workspace(self.group).all_gather_matmul(
            self.A_shard.view(-1, k),
            list(self.Bs),
            list(self.biases),
            return_A=self.settings.return_A,
            chunks_per_shard=plan.chunks_per_shard,
            epilogue=self.settings.epilogue,
        )
        outs = [reshaped(out, (*self.leading, out.shape[-1])) for out in outs]
        return Gathered(None if A is None else reshaped(A, (*self.leading, k)), None, outs)

    def why_not_streamed(self) -> str | None:
        return streamed_gather.why_not(self.A_shard, self.Bs)

    def ready_streamed(self) -> Ready:
        given = self.A_shard, self.Bs, self.group
        return streamed_gather.ready(*given, return_A=self.settings.return_A)

    def ready_behind_gather(self, kernels: Sequence[KernelConfig | None]) -> Ready:
        gather = small_collectives.prepare_gather(self.A_shard, self.group)
        shard = self.A_shard.flatten(0, -2)
        # All rows of a kind, without memory for them.
        rows = shard[:1].expand(self.group.size() * len(shard), shard.shape[1])

        def product(kernel: KernelConfig | None, B: torch.Tensor) -> cuda_calls.ReadyMatmul | None:
            if kernel is None:
                return None
            of_core = Kernel(kernel.core, plain_format("A_shard", rows))
            return cuda_calls.ready_matmul(rows, B, None, 0, of_core)

        products = tuple(map(product, kernels, self.Bs))
        return _BehindGather(gather, products, self.settings.return_A)

    def ready_by_copies(self, pieces: int) -> Ready:
        words = self.words()
        workspace = portable.gathers(self.group, self.device, words)
        return portable.ReadyGather(workspace, pieces, self.settings.return_A, str(words))

    @property
    def values(self) -> torch.Tensor:
        return self.A_shard

    def again_on_cpu(self) -> Ready:
        return _OnCpu(weakref.ref(self.group), self.settings)

    def finished(self, found: Any, route: Any) -> Gathered:
        return Gathered(*found)

    def by_library(self, words: Call) -> Gathered:
        finish = start_all_gather(
            self.A_shard, self.group.group_name, self.settings.gather_dim, call=words
        )
        A = finish()
        return Gathered(A if self.settings.return_A else None, None, self._products(A))

    def on_nothing(self) -> Gathered:
        shape = list(self.A_shard.shape)
        shape[self.dim] *= self.group.size()
        A = self.A_shard.new_empty(shape)
        return Gathered(A if self.settings.return_A else None, None, self._products(A))

    def _products(self, A: torch.Tensor) -> list[torch.Tensor]:
        return self.with_epilogue(_products(A, self.Bs, self.biases))


def _products(
    A: torch.Tensor, Bs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The library's products."""
    outs = []
    rows = A.flatten(0, -2)
    for B, bias in zip(Bs, biases, strict=True):
        out = behind_gather.by_library(rows, B, bias)
        outs.append(reshaped(out, (*A.shape[:-1], B.shape[1])))
    return outs


class _BehindGather(NamedTuple):
    """Computes calls of one kind of operands without scales."""

    gather: small_collectives.GatherOfKind
    products: tuple[cuda_calls.ReadyMatmul | None, ...]
    """What multiplies by each weight; None for the library."""
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> Gathered:
        A = self.gather(A_shard)
        rows = A.flatten(0, -2)
        outs = []
        for product, B, bias in zip(self.products, Bs, biases, strict=True):
            if product is None:
                out = behind_gather.by_library(rows, B, bias)
            else:
                out = product(rows, B, None, bias=bias)
            outs.append(reshaped(out, (*A.shape[:-1], B.shape[1])))
        return Gathered(A if self.return_A else None, None, outs)


class _OnCpu(NamedTuple):
    """Computes calls of one kind by the CPU backend."""

    group: weakref.ReferenceType[dist.ProcessGroup]
    settings: GatherSettings

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> Gathered:
        group = self.group()
        assert group is not None
        return PlainGather(A_shard, Bs, biases, group, self.settings).by_cpu()


def gather(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    settings: GatherSettings,
    kinds: Sequence[Any] | None = None,
) -> Gathered:
    """Gather and multiply: by the call that served this kind before, or as `serve` decides.
    Collective; errors as those of `serve`.

    Args:
        kinds: `kept.kind_of` each tensor, where the caller has made them.
    """
    if kinds is None:
        kinds = [None if t is None else kept.kind_of(t) for t in (A_shard, *Bs, *biases)]
    dim, return_A, config, strict, prefer_fused, plan, epilogue = settings
    key = _key(dim, return_A, config, strict or prefer_fused, len(Bs), kinds)
    if epilogue is not None:
        key += epilogue, strict  # under strict none is computed behind the kernel
    found: Gathered | None = kept.call_kept(group, key, A_shard, Bs, biases)
    if found is not None:
        return found
    call = PlainGather(A_shard, Bs, biases, group, settings)
    return serve(call, key if plan is None else None)


def gather_kept(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    kinds: Sequence[Any],
    *settings: Any,
) -> Gathered | None:
    """`gather` by the call that served this kind before; None where there was none.

    Args:
        settings: the first four of `GatherSettings`, which a kept call needs no tuple of.
    """
    dim, return_A, config, strict = settings
    key = _key(dim, return_A, config, strict, len(Bs), kinds)
    found: Gathered | None = kept.call_kept(group, key, A_shard, Bs, biases)
    return found


def _key(
    dim: int, return_A: bool, config: str, is_fused: bool, weights: int, kinds: Sequence[Any]
) -> tuple[Any, ...]:
    """The kind under which calls are kept. Settings that decide nothing more are left out: any of
    them leads to the same route."""
    return _OP, dim, return_A, config, not (config or is_fused), weights, *kinds


_OP = PlainGather.op
