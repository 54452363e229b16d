"""Operands in fp8 with their scales, as the ops take them and as kernels, plans and libraries want
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm._core import Accumulation
from agmm.ops.scaled_checks import scalings_of
from agmm.planning import call_plans, fp8_kernels
from agmm.planning.plans import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, KernelConfig, Problem
from agmm.runtime import cuda_scaled, symmetric
from agmm.runtime.cuda_calls import Kernel
from agmm.runtime.scaled import Scaled, Weight
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
    if device.type != "cuda" or not fp8_kernels.are_built():
        return f"fp8: found device {device.type}, wanted one that this build has fp8 kernels for"
    return symmetric.why_unfused(device)


def why_unfused(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """The reason why no kernel serves fp8 calls of a group, on all ranks alike, or None. Collective
    at first use on GPUs."""
    if device.type == "cuda" and fp8_kernels.are_built():
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
) -> Problem | str:
    """What the planner is asked of a product of ``m`` rows on the multiprocessors of a group, or of
    all of this GPU's; or the reason why no kernel serves it."""
    reason = cuda_scaled.why_illegal(A, weight)
    if reason is not None:
        return reason
    scatters = op == MATMUL_REDUCE_SCATTER
    dtype = cuda_scaled.dtype_name(A.values.dtype, weight.B.values.dtype)
    wanted = cuda_scaled.accumulation_of(A, weight)
    assert wanted is not None  # else it is illegal
    accumulation = fp8_kernels.served_by(dtype, wanted, scatters=scatters)
    if not fp8_kernels.built(dtype, accumulation, scatters=scatters):
        return f"fp8: found {dtype} {wanted.name}, wanted what this build has a kernel for"
    return call_plans.scaled_problem(
        m,
        weight.B.values.shape[1],
        A.values.shape[1],
        dtype,
        accumulation.name,
        A.values.device,
        world_size=1 if group is None else group.size(),
        return_A=return_A,
        op=op,
        group=group,
    )


def kernel_of(A: Scaled, weight: Weight, problem: Problem, config: KernelConfig) -> Kernel:
    """What the core is told of a product whose problem is `problem_of`'s."""
    accumulation = Accumulation.__members__[problem.accumulation]
    return cuda_scaled.kernel_of(A, weight, config.core, accumulation)
