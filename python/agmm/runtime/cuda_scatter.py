"""Matmul + reduce-scatter on CUDA: its symmetric memory, and calls that are ready to be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda_calls import aligned_pointer, bias_pointer, stream_of
from agmm.runtime.symmetric import SymmetricWorkspace


class ScatterWorkspace(SymmetricWorkspace):
    """The sums that the ranks of a group send each other. A slot is what one sends to another."""

    _core_class = _core.CudaScatterWorkspace
    _granule = 8 << 20


class OperandLayout(NamedTuple):
    """Of one product."""

    lda: int
    ldb: int
    k: int


class ScatterCall(NamedTuple):
    """A call that is ready to be made any number of times with tensors of the same kind."""

    workspace: ScatterWorkspace
    rows: int
    n: int
    dtype: _core.DType
    b_column_major: bool
    products: tuple[OperandLayout, ...]
    out_shape: tuple[int, ...]
    is_average: bool
    config: _core.KernelConfig
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
        workspace = self.workspace
        with workspace.lock:
            workspace.known.calls += 1
            buffers = workspace.enter(self.part_bytes)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            out = As[0].new_empty(self.out_shape)
            products = []
            for A, B, (lda, ldb, k) in zip(As, Bs, self.products, strict=True):
                products.append((aligned_pointer(A, kept), lda, aligned_pointer(B, kept), ldb, k))
            captured = True  # also where the call fails half-way
            try:
                captured = buffers.core.matmul_reduce_scatter(
                    products,
                    self.rows,
                    self.n,
                    self.dtype,
                    self.b_column_major,
                    bias_pointer(bias, kept),
                    out.data_ptr(),
                    self.is_average,
                    self.config,
                    stream_of(workspace.device),
                    0 if tile_times is None else tile_times.data_ptr(),
                )
            except ValueError as error:
                captured = False  # nothing was enqueued
                raise InvalidArgument(str(error)) from None
            finally:
                if captured:
                    workspace.captured = True
        return out
