"""The products of one tensor with several weights, by one launch of a streaming kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda_calls import (
    SCALE_BYTES,
    Kernel,
    aligned_pointer,
    b_layout,
    bias_pointer,
    check_awaited,
    is_on_current_gpu,
    new_on_gpu,
    scale_pointer,
)
from agmm.runtime.streams import stream_of


def share_a_launch(Bs: Sequence[torch.Tensor], kernels: Sequence[Kernel]) -> bool:
    """Whether one launch multiplies all of these weights, of which there are several: by the same
    streaming kernel, in one layout, with one kind of scales. No launch of several weights applies
    an activation."""
    first = kernels[0]
    if not 1 < len(kernels) <= _core.MAX_STREAMED_WEIGHTS or not first.config.is_streaming:
        return False
    if first.activation:
        return False
    return len({_kind(B, kernel) for B, kernel in zip(Bs, kernels, strict=True)}) == 1


def _kind(B: torch.Tensor, kernel: Kernel) -> tuple[object, ...]:
    layout, scales = b_layout(B), kernel.format.scales
    return (
        repr(kernel.config),
        None if layout is None else layout.column_major,
        kernel.format.dtype,
        kernel.format.accumulation,
        None if scales is None else scales.b_per_column,
    )


class ReadyMatmuls(NamedTuple):
    """``a @ b (+ bias)`` for each of several weights, of operands of one kind, which were
    checked."""

    problem: _core.MatmulProblem
    out_shapes: tuple[tuple[int, int], ...]
    out_dtype: torch.dtype
    b_scale_alignment: int

    def __call__(
        self,
        a: torch.Tensor,
        bs: Sequence[torch.Tensor],
        a_chunk_signals: torch.Tensor | None,
        biases: Sequence[torch.Tensor | None],
        scale_a: torch.Tensor | None = None,
        scale_bs: Sequence[torch.Tensor | None] = (),
    ) -> list[torch.Tensor]:
        """Multiply, as `ReadyMatmul` does, by each of the weights.

        Raises:
            InvalidArgument: the kernel cannot take the operands; the message says why.
        """
        outs = [new_on_gpu(a, shape, (shape[1], 1), self.out_dtype) for shape in self.out_shapes]
        if a_chunk_signals is not None:  # a copy would be made before the chunks have come
            check_awaited(a, scale_a)
        copies: list[torch.Tensor] = []  # they live until the call is enqueued
        scale_bs = scale_bs or (None,) * len(outs)
        of_weights = [
            (
                aligned_pointer(b, copies),
                0 if scale is None else scale_pointer(scale, self.b_scale_alignment, copies),
                bias_pointer(bias, copies),
                out.data_ptr(),
            )
            for b, scale, bias, out in zip(bs, scale_bs, biases, outs, strict=True)
        ]
        first, *others = of_weights
        with nullcontext() if is_on_current_gpu(a) else torch.cuda.device(a.device):
            try:
                addresses = (
                    aligned_pointer(a, copies),
                    first[0],
                    0 if scale_a is None else scale_pointer(scale_a, SCALE_BYTES, copies),
                    *first[1:],
                    0 if a_chunk_signals is None else a_chunk_signals.data_ptr(),
                    *(address for each in others for address in each),
                )
                stream = stream_of(a.device)
                # One of the copies may be a weight's.
                _core.async_input_mm(self.problem, addresses, stream, weight_is_new=bool(copies))
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
        return outs


def ready_matmuls(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    kernels: Sequence[Kernel],
    *,
    sm_count: int = 0,
) -> ReadyMatmuls:
    """The call for operands of this kind, which `share_a_launch`.

    Args:
        a, bs, a_chunk_signals: as `ReadyMatmuls` takes them.
        pivot, sm_count: as `cuda_calls.ready_matmul` has them.
        kernels: one for each weight, which differ in the strides of scales alone.
    """
    m, k = a.shape
    kernel = kernels[0]
    layouts = [b_layout(b) for b in bs]
    chunks = () if a_chunk_signals is None else a_chunk_signals.shape
    chunks_m, chunks_k = (*chunks, 1, 1)[:2]
    more = []
    for b, layout, of_b in zip(bs[1:], layouts[1:], kernels[1:], strict=True):
        scales = of_b.format.scales
        strides = (0, 0) if scales is None else (scales.b_k_stride, scales.b_n_stride)
        assert layout is not None
        more.append((b.shape[1], layout.leading, *strides))
    assert layouts[0] is not None
    return ReadyMatmuls(
        _core.MatmulProblem(
            (m, bs[0].shape[1], k),
            layouts[0],
            kernel.format,
            kernel.config,
            chunks=(chunks_m, chunks_k, pivot),
            rank=dist.get_rank() if dist.is_initialized() else 0,
            sm_count=sm_count,
            more=more,
        ),
        tuple((m, b.shape[1]) for b in bs),
        kernel.out_dtype,
        kernel.b_scale_alignment,
    )
