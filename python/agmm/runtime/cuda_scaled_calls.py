"""Calls on fp8 operands between ranks on CUDA that are ready to be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import aligned_pointer, bias_pointer
from agmm.runtime.cuda_scaled import (
    SCALE_BYTES,
    Kernel,
    async_input_mm,
    core_dtype,
    leading,
    scale_pointer,
    scales_of,
)
from agmm.runtime.cuda_scatter import ScatterWorkspace
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, Tile
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import enqueue


class ReadyWeight(NamedTuple):
    """What a call knows of a weight before it is made."""

    leading: int
    n: int
    out_shape: tuple[int, ...]
    tile: Tile
    """Of its scales."""
    kernel: Kernel


class GatherCall(NamedTuple):
    """An all-gather + matmul that is ready to be made any number of times with tensors of the same
    kind."""

    workspace: CudaWorkspace
    rows: int
    k: int
    scale_columns: int
    has_one_scale: bool
    dtype: _core.DType
    gathered_shape: tuple[int, ...] | None
    weights: tuple[ReadyWeight, ...]

    def __call__(
        self,
        A_shard: torch.Tensor,
        scale_a: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        scale_bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
        """Gather the shard with its scales and multiply it by each weight. Collective.

        Returns:
            A and its scales, or None, and out [world_size * M_local, ..., N] for each weight. The
            scales are those of each rank, [world_size, 1], where a shard has one.

        Raises:
            Unsupported: the workspace cannot be made or grow; all ranks raise.
            InvalidArgument: a kernel cannot take the operands; nothing was enqueued.
        """
        workspace, rows, k, scale_columns, has_one_scale, dtype, gathered_shape, weights = self
        with workspace.lock:
            workspace.known.calls += 1
            m = workspace.world_size * rows
            # Each shard may have its own scale, so it is sent as those of its rows.
            scales = scale_a.reshape(1, 1).expand(rows, 1) if has_one_scale else scale_a
            A = scale_A = None
            if gathered_shape is not None:
                A = A_shard.new_empty(gathered_shape)
                scale_A = scales.new_empty(*gathered_shape[:-1], scale_columns)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            outs, arguments = [], []
            for w, B, scale_b, bias in zip(weights, Bs, scale_bs, biases, strict=True):
                out = A_shard.new_empty(w.out_shape, dtype=torch.bfloat16)
                outs.append(out)
                arguments.append(
                    (
                        aligned_pointer(B, kept),
                        w.leading,
                        w.n,
                        bias_pointer(bias, kept),
                        out.data_ptr(),
                        w.kernel.config,
                        scales_of(scale_b, w.tile, kept),
                        w.kernel.accumulation,
                    )
                )
            enqueue(
                workspace,
                m * (k + SCALE_BYTES * scale_columns),
                "all_gather_scaled_matmul",
                aligned_pointer(A_shard, kept),
                scale_pointer(scales, kept),
                scale_columns,
                rows,
                k,
                dtype,
                arguments,
                0 if A is None else A.data_ptr(),
                0 if scale_A is None else scale_A.data_ptr(),
                stream_of(A_shard.device),
            )
        if has_one_scale and scale_A is not None:
            scale_A = scale_A.view(m, 1)[::rows].clone(memory_format=torch.contiguous_format)
        return A, scale_A, outs


def ready_gather(
    workspace: CudaWorkspace,
    shape: Sequence[int],
    shard: Scaled,
    weights: Sequence[Weight],
    kernels: Sequence[Kernel],
    *,
    return_A: bool,
) -> GatherCall:
    """The call for operands of these kinds, of more than one rank.

    Args:
        shape: [M_local, ..., K], that of the shard, the same on all ranks.
        shard: its rows, contiguous, of the same dtype and kind of scales on all ranks.
        weights: of one dtype, of which `why_illegal` finds nothing.
        kernels: for each weight, with tiles of its dtypes.
        return_A: whether A and its scales are wanted.
    """
    rows, k = shard.values.shape
    front = (workspace.world_size * shape[0], *shape[1:-1])
    has_one_scale = shard.tile[0] == ALL
    ready = []
    for weight, kernel in zip(weights, kernels, strict=True):
        B = weight.B
        n = B.values.shape[1]
        ready.append(ReadyWeight(leading(B.values), n, (*front, n), B.tile, kernel))
    return GatherCall(
        workspace,
        rows,
        k,
        1 if has_one_scale else shard.scale.shape[1],
        has_one_scale,
        core_dtype(shard.values, weights[0].B.values),
        (*front, k) if return_A else None,
        tuple(ready),
    )


def on_one_rank(
    shard: Scaled, weights: Sequence[Weight], kernels: Sequence[Kernel], *, return_A: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """What `GatherCall` returns, where there is nothing to gather; outs [M, N]."""
    outs = [
        async_input_mm(shard, weight, kernel, None, 0)
        for weight, kernel in zip(weights, kernels, strict=True)
    ]
    return (shard.values.clone(), shard.scale.clone(), outs) if return_A else (None, None, outs)


class ScatterCall(NamedTuple):
    """A matmul + reduce-scatter that is ready to be made any number of times with tensors of the
    same kind."""

    workspace: ScatterWorkspace
    rows: int
    k: int
    weight: ReadyWeight
    has_row_scales: bool
    dtype: _core.DType
    is_average: bool
    part_bytes: int

    def __call__(
        self,
        A: torch.Tensor,
        scale_a: torch.Tensor,
        B: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply, sum over the ranks and scatter the rows. Collective.

        Args:
            scale_a, scale_b: this rank's own.
            bias: added once, to the sum.

        Returns:
            out [M / world_size, ..., N].

        Raises:
            Unsupported: the workspace cannot be made or grow; all ranks raise.
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
        """
        workspace, rows, k, w, has_row_scales, dtype, is_average, part_bytes = self
        with workspace.lock:
            workspace.known.calls += 1
            out = A.new_empty(w.out_shape, dtype=torch.bfloat16)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            enqueue(
                workspace,
                part_bytes,
                "scaled_matmul_reduce_scatter",
                (aligned_pointer(A, kept), k, aligned_pointer(B, kept), w.leading, k),
                (scale_pointer(scale_a, kept), has_row_scales, scales_of(scale_b, w.tile, kept)),
                rows,
                w.n,
                dtype,
                w.kernel.accumulation,
                bias_pointer(bias, kept),
                out.data_ptr(),
                is_average,
                w.kernel.config,
                stream_of(A.device),
            )
        return out


def ready_scatter(
    workspace: ScatterWorkspace,
    A: Scaled,
    weight: Weight,
    kernel: Kernel,
    out_shape: tuple[int, ...],
    *,
    is_average: bool,
) -> ScatterCall:
    """The call for operands of these kinds.

    Args:
        A: [M, K], contiguous, with scales of rows or one; M a multiple of the world size.
        weight: of which `why_illegal` finds nothing, with scales of columns or one.
        kernel: one of its dtype that sends tiles.
        out_shape: that of the result.
        is_average: the sum is multiplied by 1 / world_size, before the bias.
    """
    rows, k = A.values.shape
    B = weight.B
    n = B.values.shape[1]
    part_bytes = _core.scatter_part_bytes(rows, n, workspace.world_size, kernel.config)
    return ScatterCall(
        workspace,
        rows,
        k,
        ReadyWeight(leading(B.values), n, out_shape, B.tile, kernel),
        A.tile[0] == 1,
        core_dtype(A.values, B.values),
        is_average,
        part_bytes,
    )
