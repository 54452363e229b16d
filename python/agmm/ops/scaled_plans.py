"""What the planner is asked of a product of fp8 operands, and what the core is told of it."""

from __future__ import annotations

import torch.distributed as dist

from agmm._core import Accumulation
from agmm.planning import call_plans, fp8_kernels
from agmm.planning.plans import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, KernelConfig, Problem
from agmm.runtime import cuda_scaled
from agmm.runtime.cuda_calls import Kernel
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
    accumulation = Accumulation.__members__[problem.accumulation]
    return cuda_scaled.kernel_of(A, weight, config.core, accumulation)
