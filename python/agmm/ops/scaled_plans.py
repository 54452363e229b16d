"""What the planner is asked of a product of fp8 operands, and what the core is told of it."""

from __future__ import annotations

import torch.distributed as dist

from agmm._core import Accumulation
from agmm.planning import built_kernels, call_plans, formats
from agmm.planning.plans import ALL_GATHER_MATMUL, KernelConfig, Problem
from agmm.runtime import cuda_scaled
from agmm.runtime.scaled import Scaled, Weight


def problem_of(
    A: Scaled,
    weight: Weight,
    m: int,
    *,
    op: str = ALL_GATHER_MATMUL,
    return_A: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Problem | str:
    """A product of ``m`` rows on the multiprocessors of a group, or all of this GPU's, or the
    reason why no kernel serves it."""
    reason = cuda_scaled.why_illegal(A, weight)
    if reason is not None:
        return reason
    dtype = cuda_scaled.dtype_name(A.values.dtype, weight.B.values.dtype)
    wanted = cuda_scaled.accumulation_of(A, weight)
    assert wanted is not None  # else it is illegal
    name = built_kernels.format_served(op, dtype, wanted.name)
    if not built_kernels.kernels_of(op, name):
        return f"fp8: found {dtype} {wanted.name}, wanted what this build has a kernel for"
    return call_plans.problem_of(
        (m, weight.B.values.shape[1], A.values.shape[1]),
        name,
        A.values.device,
        op=op,
        group=group,
        return_A=return_A,
    )


def kernel_of(problem: Problem, config: KernelConfig) -> cuda_scaled.Kernel:
    return cuda_scaled.Kernel(
        config.core, Accumulation.__members__[formats.of(problem.format).accumulation]
    )
