"""All-gather + matmul of few rows by two kernels, of which the second, a streaming one, reads its
weight while the first gathers by packets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.ops import invariant, small_collectives
from agmm.ops.gather import Gathered
from agmm.runtime import cuda_calls
from agmm.runtime.results import reshaped


class StreamedGather(NamedTuple):
    """Computes calls of one kind, any number of times. Collective."""

    gather: small_collectives.GatherOfKind
    matmuls: list[cuda_calls.ReadyMatmul]
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> Gathered:
        A = self.gather.empty(A_shard)
        rows, copies = A.view(-1, A.shape[-1]), list[torch.Tensor]()
        first = A.new_empty(len(rows), Bs[0].shape[1])
        addresses = (
            A_shard.data_ptr(),
            rows.data_ptr(),
            cuda_calls.aligned_pointer(Bs[0], copies),
            cuda_calls.bias_pointer(biases[0], copies),
            first.data_ptr(),
        )
        method = self.gather.call.method
        problem, nbytes = self.matmuls[0].problem, A_shard.nbytes
        self.gather.call.workspace.gathered_matmul(method, problem, addresses, nbytes)
        outs = [first]
        for matmul, B, bias in zip(self.matmuls[1:], Bs[1:], biases[1:], strict=True):
            outs.append(matmul(rows, B, None, bias=bias))
        outs = [reshaped(out, (*A.shape[:-1], out.shape[1])) for out in outs]
        return Gathered(A if self.return_A else None, None, outs)


def ready(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, *, return_A: bool
) -> StreamedGather:
    """What computes calls like this one, for which there is a kernel (`why_not`). Collective."""
    gather = small_collectives.prepare_gather(A_shard, group)
    A = gather.empty(A_shard).view(-1, A_shard.shape[-1])
    matmuls = []
    for B in Bs:
        kernel = invariant.kernel_of(A, B)
        if kernel is None:
            raise Unsupported("kernels: found no streaming one for it in this build, wanted one")
        of_core = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A_shard", A_shard))
        matmuls.append(cuda_calls.ready_matmul(A, B, None, 0, of_core))
    return StreamedGather(gather, matmuls, return_A)


def why_not(A_shard: torch.Tensor, Bs: Sequence[torch.Tensor]) -> str | None:
    """The reason why no streaming kernel multiplies the gathered rows, which are on a GPU, or None.
    The same on all ranks."""
    rows = A_shard.flatten(0, -2)
    return next(filter(None, (invariant.why_not_streamed(rows, B) for B in Bs)), None)
