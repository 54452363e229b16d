"""The plan of a call on CUDA, made into what the runtime can call any number of times."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmm.errors import InvalidArgument
from agmm.planning import call_plans, legality
from agmm.planning.plans import KernelConfig, Plan, core_transport
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import FusedCall, Weight, b_layout, core_dtype


def prepare(
    workspace: CudaWorkspace,
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    *,
    return_A: bool,
    config: KernelConfig | None = None,
    transport: str | None = None,
) -> FusedCall:
    """Everything about a call that depends on shapes, dtypes and layouts alone.

    Args:
        A_shard: [M_local, ..., K], contiguous, the same shape and dtype on all ranks.
        Bs: weights [K, N], N free for each of them, row-major or column-major.
        return_A: whether A is wanted, in a tensor of its own.
        config: the kernel; chosen by the planner when None.
        transport: "push", "pull" or the name of an `SmPush`; that of the first weight's plan
            when None.

    Raises:
        InvalidArgument: a weight is neither row-major nor column-major; the first weight's
            kernel does not go with the transport.
    """
    k = A_shard.shape[-1]
    rows = A_shard.numel() // k
    m = workspace.world_size * rows
    leading = (workspace.world_size * A_shard.shape[0], *A_shard.shape[1:-1])
    weights: list[Weight] = []
    for B in Bs:
        layout = b_layout(B)
        if layout is None:
            raise InvalidArgument(
                f"B: found strides {tuple(B.stride())}, wanted row-major or column-major"
            )
        n = B.shape[1]
        problem = call_plans.problem_of(
            (m, n, k),
            A_shard.dtype,
            workspace.device,
            group=workspace.group,
            return_A=return_A,
            column_major=layout.column_major,
        )
        if config is None:
            chosen = call_plans.planner(workspace.group, workspace.device).fused_plan(problem)
        else:
            chosen = Plan(legality.copy_transports(problem, config)[0], config)
        assert chosen.kernel is not None
        if not weights:
            transport = transport or chosen.transport
            reason = legality.why_transport_illegal(problem, chosen.kernel, transport)
            if reason is not None:
                raise InvalidArgument(
                    f"config: {chosen.kernel.kernel}, return_A={return_A}: {reason}"
                )
        weights.append(
            Weight(
                layout.leading,
                layout.column_major,
                n,
                (*leading, n),
                chosen.kernel.core,
            )
        )
    return FusedCall(
        workspace,
        rows,
        k,
        core_dtype("A_shard", A_shard),
        m * k * 2,
        core_transport(transport or "push"),
        (*leading, k) if return_A else None,
        tuple(weights),
    )
