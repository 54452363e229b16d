"""Matmul + reduce-scatter on CUDA: its symmetric memory, and calls that are ready to be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime.cuda_calls import TMA_ALIGNMENT, aligned_pointer, bias_pointer, new_on_gpu
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import SymmetricWorkspace, enqueue


class ScatterWorkspace(SymmetricWorkspace):
    """The sums that the ranks of a group send each other. A slot is what one sends to another."""

    core_class = _core.CudaScatterWorkspace
    _granule = 8 << 20


class ScatterCall(NamedTuple):
    """A call that is ready to be made any number of times with tensors of the same kind."""

    workspace: ScatterWorkspace
    problem: _core.ScatterProblem
    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    part_bytes: int

    def __call__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        tile_times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply and scatter. Collective.

        Args:
            As: [M, ..., K] each, whose rows are evenly apart.
            Bs: [K, N] each.
            bias: [N] or None.
            tile_times: uint8, where the kernel records when each tile was computed and sent (timed
                kernels).

        Returns:
            out [M / world_size, ..., N].

        Raises:
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
            Unsupported, AgmmError: as `SymmetricWorkspace.ensure`.
        """
        workspace, problem, out_shape, out_stride, part_bytes = self
        with workspace.lock:
            workspace.known.calls += 1
            out = new_on_gpu(As[0], out_shape, out_stride)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            operands = [As[0].data_ptr(), Bs[0].data_ptr()]
            # The usual call goes without a loop, which takes a twentieth of its time in Python.
            if len(As) > 1 or (operands[0] | operands[1]) % TMA_ALIGNMENT != 0:
                pairs = zip(As, Bs, strict=True)
                operands = [aligned_pointer(one, kept) for pair in pairs for one in pair]
            enqueue(
                workspace,
                part_bytes,
                "matmul_reduce_scatter",
                problem,
                operands,
                0 if bias is None else bias_pointer(bias, kept),
                out.data_ptr(),
                stream_of(workspace.device),
                0 if tile_times is None else tile_times.data_ptr(),
            )
        return out
