"""Matmul + reduce-scatter of few rows in one kernel, which streams the weight and sends each rank
its rows of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.ops.copying import Copying
from agmm.planning.problems import KernelConfig
from agmm.runtime import cuda_calls
from agmm.runtime.cuda_collectives import CollectivesWorkspace
from agmm.runtime.results import moved, reshaped
from agmm.runtime.workspaces import collectives_workspace


class StreamedScatter(NamedTuple):
    """Makes calls of one kind, any number of times. Collective."""

    workspace: CollectivesWorkspace
    problem: _core.MatmulProblem
    copying: Copying | None
    world_size: int
    is_average: bool

    def __call__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dim = 0
        if self.copying is not None:
            dim = self.copying.dim
            As, Bs = self.copying(As, Bs)
            residual = None if residual is None else residual.movedim(dim, 0)
        A, B = As[0], Bs[0]
        out = A.new_empty(A.shape[:-1].numel() // self.world_size, B.shape[1])
        copies: list[torch.Tensor] = []  # they live until the call is enqueued
        addresses = (
            *(cuda_calls.aligned_pointer(one, copies) for one in (A, B)),
            *(cuda_calls.bias_pointer(one, copies) for one in (bias, residual)),
            out.data_ptr(),
        )
        self.workspace.streamed_reduce_scatter(self.problem, addresses, is_average=self.is_average)
        shape = A.shape[0] // self.world_size, *A.shape[1:-1], B.shape[1]
        return moved(reshaped(out, shape), 0, dim)


def ready(
    kernel: KernelConfig,
    A: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int,
    is_average: bool,
) -> StreamedScatter:
    """What computes calls like this one by a streaming kernel. Collective."""
    copying = Copying.of([A], [B], dim)
    if copying is not None:
        (A,), (B,) = copying([A], [B])
    of_core = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A", A))
    matmul = cuda_calls.ready_matmul(A.view(-1, A.shape[-1]), B, None, 0, of_core)
    workspace = collectives_workspace(group, A.device)
    return StreamedScatter(workspace, matmul.problem, copying, group.size(), is_average)
