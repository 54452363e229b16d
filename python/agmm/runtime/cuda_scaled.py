"""Calls of the CUDA kernels for fp8 operands: row-wise and tensor-wise scales, bfloat16 results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import aligned_pointer, b_layout, bias_pointer, stream_of
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL

_SCALE_BYTES = 4  # float32


class Kernel(NamedTuple):
    config: _core.KernelConfig
    fast_accum: bool


def dtype_name(a: torch.dtype, b: torch.dtype) -> str:
    """What `_core.DType` calls the pair."""
    return "_".join(str(dtype).removeprefix("torch.") for dtype in (a, b))


def why_illegal(A: Scaled, weight: Weight) -> str | None:
    """The reason why no kernel can compute this product, of checked operands, or None."""
    B, bias = weight.B, weight.bias
    if A.tile[1] != ALL:
        return "scale_a: block scales, the kernels want row-wise or tensor-wise ones"
    if B.tile not in ((ALL, ALL), (ALL, 1)):
        return "scale_b: block scales, the kernels want row-wise or tensor-wise ones"
    if weight.out_dtype != torch.bfloat16:
        return f"out_dtype: {weight.out_dtype}, the kernels write torch.bfloat16"
    if weight.result_scale is not None:
        return "result_scale: the kernels scale no result"
    if bias is not None and bias.dtype != torch.bfloat16:
        return f"bias: dtype {bias.dtype}, the kernels add torch.bfloat16"
    n = B.values.shape[1]
    if n < 1:
        return "B: N=0, the kernels want columns"
    if n % _core.ALIGNMENT != 0:
        return f"B: N={n} is not a multiple of {_core.ALIGNMENT} (16-byte TMA alignment)"
    layout = b_layout(B.values)
    if layout is None or not layout.column_major:
        return f"B: strides {tuple(B.values.stride())}, the kernels want column-major (weight.t())"
    if layout.leading % _core.FP8_ALIGNMENT != 0:
        return f"B: leading dimension {layout.leading} is not a multiple of {_core.FP8_ALIGNMENT}"
    return None


def _leading(B: torch.Tensor) -> int:
    layout = b_layout(B)
    assert layout is not None
    return layout.leading


def _pointer(scale: torch.Tensor, kept: list[torch.Tensor]) -> int:
    if not scale.is_contiguous():
        scale = scale.contiguous()
        kept.append(scale)
    return scale.data_ptr()


def async_input_mm(
    A: Scaled,
    weight: Weight,
    kernel: Kernel,
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    *,
    sm_count: int = 0,
) -> torch.Tensor:
    """The product [M, N], each row chunk of ``A`` and its scales once its signal is 1.

    Args:
        A: [M, K], contiguous, with a scale for each row or one; with signals, at a multiple of 16
            bytes.
        weight: of which `why_illegal` finds nothing.
        kernel: one of its dtypes.
        a_chunk_signals: uint32 [chunks], contiguous; None: all is ready.
        pivot: the first row chunk to compute.
        sm_count: CTAs at most; 0: as many as there are multiprocessors.

    Raises:
        InvalidArgument: the kernel cannot take the operands; the message says why.
    """
    values, B = A.values, weight.B
    m, k = values.shape
    n = B.values.shape[1]
    out = values.new_empty(m, n, dtype=torch.bfloat16)
    if m == 0 or n == 0:
        return out
    if a_chunk_signals is not None:  # a copy would be made before the chunks have come
        if values.data_ptr() % 16 != 0:
            raise InvalidArgument(
                f"A: found address {values.data_ptr():#x}, wanted a multiple of 16 bytes"
            )
        if not A.scale.is_contiguous():
            raise InvalidArgument(
                f"scale_a: found strides {tuple(A.scale.stride())}, wanted contiguous ones"
            )
    kept: list[torch.Tensor] = []  # copies live until the call is enqueued
    with torch.cuda.device(values.device):
        try:
            _core.async_input_scaled_mm(
                aligned_pointer(values, kept),
                aligned_pointer(B.values, kept),
                out.data_ptr(),
                bias_pointer(weight.bias, kept),
                (
                    _pointer(A.scale, kept),
                    A.tile[0] == 1,
                    _pointer(B.scale, kept),
                    B.tile[1] == 1,
                ),
                m,
                n,
                k,
                _core.DType.__members__[dtype_name(values.dtype, B.values.dtype)],
                kernel.fast_accum,
                _leading(B.values),
                0 if a_chunk_signals is None else a_chunk_signals.data_ptr(),
                1 if a_chunk_signals is None else a_chunk_signals.shape[0],
                pivot,
                kernel.config,
                dist.get_rank() if dist.is_initialized() else 0,
                sm_count,
                stream_of(values.device),
            )
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
    return out


def all_gather_scaled_matmul(
    workspace: CudaWorkspace,
    shard: Scaled,
    weights: Sequence[Weight],
    kernels: Sequence[Kernel],
    *,
    return_A: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Gather the shard with its scales and multiply it by each weight. Collective.

    Args:
        shard: [M_local, K], contiguous, the same shape, dtype and kind of scales on all ranks.
        weights: of one dtype, of which `why_illegal` finds nothing.
        kernels: for each weight, with tiles of its dtypes.
        return_A: whether A and its scales are wanted.

    Returns:
        As `agmm.runtime.cpu_scaled.all_gather_scaled_matmul`.

    Raises:
        Unsupported: the workspace cannot be made or grow; all ranks raise.
        InvalidArgument: a kernel cannot take the operands; nothing was enqueued.
    """
    values, world_size = shard.values, workspace.world_size
    rows, k = values.shape
    m = world_size * rows
    if world_size == 1:
        outs = [
            async_input_mm(shard, weight, kernel, None, 0)
            for weight, kernel in zip(weights, kernels, strict=True)
        ]
        return (values.clone(), shard.scale.clone(), outs) if return_A else (None, None, outs)
    is_one = shard.tile[0] == ALL
    with workspace.lock:
        workspace.known.calls += 1
        buffers = workspace.enter(m * (k + _SCALE_BYTES))
        # Each shard may have its own scale, so it is sent as those of its rows.
        scales = shard.scale.expand(rows, 1) if is_one else shard.scale
        A = scale_A = None
        if return_A:
            A, scale_A = values.new_empty(m, k), scales.new_empty(m, 1)
        outs = [values.new_empty(m, w.B.values.shape[1], dtype=torch.bfloat16) for w in weights]
        kept: list[torch.Tensor] = []  # copies live until the call is enqueued
        arguments = [
            (
                aligned_pointer(weight.B.values, kept),
                _leading(weight.B.values),
                weight.B.values.shape[1],
                bias_pointer(weight.bias, kept),
                out.data_ptr(),
                kernel.config,
                _pointer(weight.B.scale, kept),
                weight.B.tile[1] == 1,
                kernel.fast_accum,
            )
            for weight, kernel, out in zip(weights, kernels, outs, strict=True)
        ]
        captured = True  # also where the call fails half-way
        try:
            captured = buffers.core.all_gather_scaled_matmul(
                aligned_pointer(values, kept),
                _pointer(scales, kept),
                rows,
                k,
                _core.DType.__members__[dtype_name(values.dtype, weights[0].B.values.dtype)],
                arguments,
                0 if A is None else A.data_ptr(),
                0 if scale_A is None else scale_A.data_ptr(),
                stream_of(values.device),
            )
        except ValueError as error:
            captured = False  # nothing was enqueued
            raise InvalidArgument(str(error)) from None
        finally:
            if captured:
                workspace.captured = True
    if is_one and scale_A is not None:
        scale_A = scale_A[::rows].contiguous()
    return A, scale_A, outs
