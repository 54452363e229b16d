"""Matmul + reduce-scatter on CUDA for one kind of tensors, ready to be called, and its symmetric
memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime.cuda_calls import (
    SCALE_BYTES,
    TMA_ALIGNMENT,
    Kernel,
    aligned_pointer,
    b_layout,
    bias_pointer,
    contiguous_stride,
    new_on_gpu,
    scale_pointer,
)
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import SymmetricWorkspace, enqueue


class ScatterWorkspace(SymmetricWorkspace):
    """The memory for the partial sums that the ranks of a group send each other. A slot holds what
    one rank sends to another."""

    core_class = _core.CudaScatterWorkspace
    _granule = 8 << 20


class ReadyScatter(NamedTuple):
    """A matmul + reduce-scatter, or matmul + all-reduce, that can be called any number of times
    with tensors of one kind."""

    workspace: ScatterWorkspace
    problem: _core.ScatterProblem
    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    out_dtype: torch.dtype
    b_scale_alignment: int
    part_bytes: int

    def __call__(
        self,
        As: Sequence[torch.Tensor],
        Bs: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        scale_as: Sequence[torch.Tensor] = (),
        scale_bs: Sequence[torch.Tensor] = (),
        tile_times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply, sum over the products and the ranks, and scatter the rows. Collective.

        Args:
            As: [M, ..., K] each, whose rows are evenly apart.
            Bs: [K, N] each.
            bias: [N], added once, to the sum; or None.
            residual: this rank's rows of what is added to the sum, [M / world_size, ..., N], of an
                all-reduce too; or None. Not of fp8 operands.
            scale_as, scale_bs: this rank's own, of fp8 operands one for each product; else empty.
            tile_times: uint8, where the kernel records when each tile was computed and sent (timed
                kernels).

        Returns:
            out [M / world_size, ..., N], of an all-reduce [M, ..., N].

        Raises:
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
            Unsupported, AgmmError: as `SymmetricWorkspace.ensure`.
        """
        workspace, problem, out_shape, out_stride, dtype, b_scale_alignment, part_bytes = self
        with workspace.lock:
            workspace.known.calls += 1
            out = new_on_gpu(As[0], out_shape, out_stride, dtype)
            copies: list[torch.Tensor] = []  # they live until the call is enqueued
            a, b = As[0].data_ptr(), Bs[0].data_ptr()
            of_bias = 0 if bias is None else bias_pointer(bias, copies)
            of_residual = 0 if residual is None else bias_pointer(residual, copies)
            # The usual call goes without a loop, which takes a twentieth of its time in Python.
            if len(As) == 1 and not scale_as and (a | b) % TMA_ALIGNMENT == 0:
                addresses = [a, b, 0, 0, of_bias, of_residual, out.data_ptr()]
            else:
                addresses = []
                for i, (A, B) in enumerate(zip(As, Bs, strict=True)):
                    addresses += (
                        aligned_pointer(A, copies),
                        aligned_pointer(B, copies),
                        scale_pointer(scale_as[i], SCALE_BYTES, copies) if scale_as else 0,
                        scale_pointer(scale_bs[i], b_scale_alignment, copies) if scale_bs else 0,
                    )
                addresses += (of_bias, of_residual, out.data_ptr())
            enqueue(
                workspace,
                part_bytes,
                "matmul_reduce_scatter",
                problem,
                addresses,
                stream_of(workspace.device),
                0 if tile_times is None else tile_times.data_ptr(),
            )
        return out


def ready_scatter(
    workspace: ScatterWorkspace,
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    kernel: Kernel,
    *,
    is_average: bool,
    all_reduce_sms: int = 0,
) -> ReadyScatter:
    """The call for operands of these kinds.

    Args:
        As: [M, ..., K] each, contiguous, M a multiple of the world size.
        Bs: [K, N] each, all of one layout, as TMA wants it.
        kernel: one that sends tiles, and for an all-reduce finished tiles too.
        is_average: the sum is multiplied by 1 / world_size, before the bias.
        all_reduce_sms: as `_core.ScatterProblem` has it; not 0 for all rows on all ranks.
    """
    A, n, world_size = As[0], Bs[0].shape[1], workspace.world_size
    rows = A.shape[:-1].numel()
    products, is_column_major = [], True
    for B in Bs:
        layout = b_layout(B)
        assert layout is not None
        is_column_major = layout.column_major
        products.append((B.shape[0], layout.leading, B.shape[0]))
    parts = 1 if all_reduce_sms else world_size
    shape = (A.shape[0] // parts, *A.shape[1:-1], n)
    return ReadyScatter(
        workspace,
        _core.ScatterProblem(
            rows,
            n,
            kernel.format,
            products,
            kernel.config,
            b_column_major=is_column_major,
            is_average=is_average,
            all_reduce_sms=all_reduce_sms,
        ),
        shape,
        contiguous_stride(shape),
        kernel.out_dtype,
        kernel.b_scale_alignment,
        _core.scatter_part_bytes(rows, n, world_size, kernel.config, all_reduce_sms != 0),
    )
