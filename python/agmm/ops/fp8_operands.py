"""Operands in fp8 with their scales, as the ops take them and as kernels, plans and libraries want
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm._core import Accumulation
from agmm.errors import InvalidArgument
from agmm.ops.scaled_checks import scaling_of, scalings_of
from agmm.planning import built_kernels, call_plans, formats, heuristics
from agmm.planning.problems import ALL_GATHER_MATMUL, PLAIN, KernelConfig, Problem
from agmm.runtime import cuda_scaled, symmetric
from agmm.runtime.cuda_calls import Kernel, ReadyMatmul, ready_matmul
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.scaled import Scaled, ScaledProducts, Weight
from agmm.runtime.scaling import ALL, Tile


class Fp8Weights(NamedTuple):
    """What fp8 rows are multiplied with, by the names of the ops' arguments; one of each kind for
    each weight."""

    Bs: Sequence[torch.Tensor]
    scale_bs: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    result_scales: Sequence[torch.Tensor | None]
    out_dtypes: Sequence[torch.dtype]
    fast_accum: Sequence[bool]

    def described(
        self, A: torch.Tensor, scale_a: torch.Tensor, kind: str = ""
    ) -> tuple[Tile, list[Weight]]:
        """What a scale of A covers, and the weights; of checked operands.

        Args:
            kind: the kind of the scales where it is known, and not to be told by their shapes.
        """
        scalings = scalings_of(A, scale_a, self.Bs, self.scale_bs, kind)
        weights = []
        for scaling, B, scale_b, *rest in zip(scalings, *self, strict=True):
            if scaling.b == (ALL, ALL):
                scale_b = scale_b.reshape(1, 1)
            weights.append(Weight(Scaled(B, scale_b, scaling.b), *rest))
        return scalings[0].a, weights


def described(given: ScaledProducts) -> list[tuple[Tile, Weight]]:
    """What a scale of A covers, and the weight, of each product of checked operands. The bias is
    that of the first weight."""
    bias, result_scale, out_dtype, fast_accum = given[4:]
    found = []
    for A, B, scale_a, scale_b in zip(*given[:4], strict=True):
        scaling = scaling_of(A, scale_a, B, scale_b)
        scale = scale_b.reshape(1, 1) if scaling.b == (ALL, ALL) else scale_b
        B_scaled = Scaled(B, scale, scaling.b)
        found.append((scaling.a, Weight(B_scaled, bias, result_scale, out_dtype, fast_accum)))
        bias = None
    return found


def rows_of(A: torch.Tensor, scale: torch.Tensor, tile: Tile, dim: int) -> Scaled:
    """A [..., K] as [M, K], contiguous, the rows in the order that ``dim`` first gives."""
    values = A.movedim(dim, 0).flatten(0, -2)
    if tile[0] == ALL:
        return Scaled(values.contiguous(), scale.reshape(1, 1), tile)
    found = scale.movedim(dim, 0).reshape(len(values), scale.shape[-1])
    return Scaled(values.contiguous(), found, tile)


def why_no_kernel(device: torch.device) -> str | None:
    """The reason why agmm itself computes nothing in fp8 on the device, or None."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not built_kernels.has_fp8():
        return f"fp8: found device {device.type}, wanted one that this build has fp8 kernels for"
    return symmetric.why_unfused(device)


def why_unfused(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """The reason why no kernel serves fp8 calls of a group, on all ranks alike, or None. Collective
    at first use on GPUs."""
    if device.type == "cuda" and built_kernels.has_fp8():
        return symmetric.why_group_unfused(group, device)
    return why_no_kernel(device)


def problem_of(
    A: Scaled,
    weight: Weight,
    m: int,
    *,
    op: str = ALL_GATHER_MATMUL,
    return_A: bool = False,
    group: dist.ProcessGroup | None = None,
    epilogue: Epilogue | None = None,
) -> Problem | str:
    """What the planner is asked of a product of ``m`` rows on the multiprocessors of a group, or of
    all of this GPU's; or the reason why no kernel serves it.

    Args:
        epilogue: what the kernel makes of the sums; of a gate, ``weight`` is one of two alike.
    """
    reason = cuda_scaled.why_illegal(A, weight)
    if reason is not None:
        return reason
    dtype, accumulation = _wanted(A, weight)
    of_kernel = PLAIN if epilogue is None else epilogue.kernel
    name = built_kernels.format_served(op, dtype, accumulation, epilogue=of_kernel)
    if not built_kernels.kernels_of(op, name, of_kernel):
        return f"fp8: found {dtype} {accumulation}, wanted what this build has a kernel for"
    n = weight.B.values.shape[1]
    return call_plans.problem_of(
        (m, 2 * n if epilogue is not None and epilogue.is_gated else n, A.values.shape[1]),
        name,
        A.values.device,
        op=op,
        group=group,
        return_A=return_A,
        epilogue=of_kernel,
    )


def _wanted(A: Scaled, weight: Weight) -> tuple[str, str]:
    """The names of the element types and of the accumulation that a legal product wants."""
    wanted = cuda_scaled.accumulation_of(A, weight)
    assert wanted is not None  # else it is illegal
    return cuda_scaled.dtype_name(A.values.dtype, weight.B.values.dtype), wanted.name


def kernel_of(
    A: Scaled,
    weight: Weight,
    problem: Problem | str,
    config: KernelConfig,
    epilogue: Epilogue | None = None,
) -> Kernel:
    """What the core is told of a product whose problem is `problem_of`'s, or has that format."""
    name = problem if isinstance(problem, str) else problem.format
    accumulation = Accumulation.__members__[formats.of(name).accumulation]
    kernel = cuda_scaled.kernel_of(A, weight, config.core, accumulation)
    return kernel if epilogue is None else _with(kernel, epilogue)


def _with(kernel: Kernel, epilogue: Epilogue) -> Kernel:
    return kernel._replace(activation=epilogue.activation, quantize_out=epilogue.quantize_out)


def ready_matmul_of(
    A: Scaled,
    weight: Weight,
    a_chunk_signals: torch.Tensor | None = None,
    pivot: int = 0,
    *,
    config: KernelConfig | None = None,
    sm_count: int = 0,
    epilogue: Epilogue | None = None,
    up: torch.Tensor | None = None,
) -> ReadyMatmul:
    """The product of one GPU, ready for operands of these kinds.

    Args:
        a_chunk_signals, pivot, sm_count, up: as those of `cuda_calls.ready_matmul`.
        config: the kernel; None for the planner's.
        epilogue: one that a kernel computes (`kernel_epilogues.why_scaled_behind`).

    Raises:
        InvalidArgument: no kernel can take the operands; the message says why.
    """
    reason = why_no_kernel(A.values.device) or cuda_scaled.why_illegal(A, weight)
    if reason is not None:
        raise InvalidArgument(reason)
    if config is not None:
        of_kernel = PLAIN if epilogue is None else epilogue.kernel
        name = built_kernels.format_served(
            ALL_GATHER_MATMUL, *_wanted(A, weight), epilogue=of_kernel
        )
        kernel = kernel_of(A, weight, name, config, epilogue)
    else:
        problem = problem_of(A, weight, A.values.shape[0], epilogue=epilogue)
        if isinstance(problem, str):
            raise InvalidArgument(problem)
        if sm_count:
            problem = replace(problem, sm_count=sm_count)
        chosen = call_plans.planner(None, A.values.device).fused_plan(problem).kernel
        assert chosen is not None
        chunks = 1 if a_chunk_signals is None else a_chunk_signals.shape[0]
        chosen = heuristics.across_chunks(problem, chosen, chunks)
        kernel = kernel_of(A, weight, problem, chosen, epilogue)
    return ready_matmul(
        A.values, weight.B.values, a_chunk_signals, pivot, kernel, sm_count=sm_count, up=up
    )
