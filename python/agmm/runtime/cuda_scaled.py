"""Calls of the CUDA kernels for fp8 operands, with bfloat16 results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm._core import Accumulation
from agmm.errors import InvalidArgument
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import aligned_pointer, b_layout, bias_pointer
from agmm.runtime.cuda_scatter import ScatterWorkspace
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, BLOCK, Tile
from agmm.runtime.symmetric import stream_of

_SCALE_BYTES = 4  # float32
_PAIR_BYTES = 2 * _SCALE_BYTES  # of neighbouring columns, which a kernel reads together


class Kernel(NamedTuple):
    config: _core.KernelConfig
    accumulation: Accumulation


def dtype_name(a: torch.dtype, b: torch.dtype) -> str:
    """What `_core.DType` calls the pair."""
    return "_".join(str(dtype).removeprefix("torch.") for dtype in (a, b))


def accumulation_of(A: Scaled, weight: Weight) -> Accumulation | None:
    """That which the scales want, and `fast_accum` of those that leave a choice; None where no
    kernel has such scales."""
    return accumulation_of_tiles(A.tile, weight.B.tile, fast=weight.fast_accum)


def accumulation_of_tiles(a: Tile, b: Tile, *, fast: bool) -> Accumulation | None:
    """The same, by what a scale covers."""
    if a == (1, BLOCK):
        return {(BLOCK, BLOCK): Accumulation.block, (BLOCK, 1): Accumulation.block_1x128}.get(b)
    if a[1] != ALL or b not in ((ALL, ALL), (ALL, 1)):
        return None
    return Accumulation.fast if fast else Accumulation.slow


def why_illegal(A: Scaled, weight: Weight) -> str | None:
    """The reason why no kernel can compute this product, of checked operands, or None."""
    B, bias = weight.B, weight.bias
    if accumulation_of(A, weight) is None:
        return f"scale_b: tiles of {B.tile} beside {A.tile} of A, the kernels want one kind of both"
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


def _scales_of(B: Scaled, kept: list[torch.Tensor]) -> tuple[int, bool, int, int]:
    """As the core takes them. Blocks of columns may have any strides, other scales are copied where
    they are not contiguous."""
    scale = B.scale
    if B.tile == (BLOCK, BLOCK):
        return scale.data_ptr(), False, scale.stride(0), scale.stride(1)
    return _pointer(scale, kept, _PAIR_BYTES), B.tile[1] == 1, scale.shape[-1], 1


def _pointer(scale: torch.Tensor, kept: list[torch.Tensor], alignment: int = _SCALE_BYTES) -> int:
    """Of scales that a kernel reads as they lie, else of a copy. Those that come while a kernel
    runs must not be copied."""
    if not scale.is_contiguous() or scale.data_ptr() % alignment:
        scale = scale.clone(memory_format=torch.contiguous_format)
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
        A: [M, K], contiguous; with signals, at a multiple of 16 bytes, and with contiguous scales.
        weight: of which `why_illegal` finds nothing.
        kernel: one of its dtypes.
        a_chunk_signals: uint32 [chunks], contiguous; None: all is ready.
        pivot: the first row chunk to compute, where they are computed one after the other.
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
                (_pointer(A.scale, kept), A.tile[0] == 1, _scales_of(B, kept)),
                m,
                n,
                k,
                _core.DType.__members__[dtype_name(values.dtype, B.values.dtype)],
                kernel.accumulation,
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
        # Each shard may have its own scale, so it is sent as those of its rows.
        scales = shard.scale.expand(rows, 1) if is_one else shard.scale
        A = scale_A = None
        if return_A:
            A, scale_A = values.new_empty(m, k), scales.new_empty(m, scales.shape[1])
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
                _scales_of(weight.B, kept),
                kernel.accumulation,
            )
            for weight, kernel, out in zip(weights, kernels, outs, strict=True)
        ]
        buffers = workspace.enter(m * (k + _SCALE_BYTES * scales.shape[1]))
        captured = True  # also where the call fails half-way
        try:
            captured = buffers.core.all_gather_scaled_matmul(
                aligned_pointer(values, kept),
                _pointer(scales, kept),
                scales.shape[1],
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
            raise workspace.refused(error) from None
        finally:
            if captured:
                workspace.captured = True
    if is_one and scale_A is not None:
        scale_A = scale_A[::rows].contiguous()
    return A, scale_A, outs


def matmul_reduce_scatter(
    workspace: ScatterWorkspace, A: Scaled, weight: Weight, kernel: Kernel, *, is_average: bool
) -> torch.Tensor:
    """Multiply, sum over the ranks and scatter the rows. Collective.

    Args:
        A: [M, K], contiguous, with scales of rows or one, which are this rank's own; M a multiple
            of the world size.
        weight: of which `why_illegal` finds nothing, with scales of columns or one; the bias is
            added once, to the sum.
        kernel: one of its dtypes that sends tiles.
        is_average: the sum is divided by the world size, before the bias.

    Returns:
        out [M / world_size, N].

    Raises:
        Unsupported: the workspace cannot be made or grow; all ranks raise.
        InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
    """
    values, B = A.values, weight.B
    rows, k = values.shape
    n = B.values.shape[1]
    world_size = workspace.world_size
    with workspace.lock:
        workspace.known.calls += 1
        out = values.new_empty(rows // world_size, n, dtype=torch.bfloat16)
        kept: list[torch.Tensor] = []  # copies live until the call is enqueued
        leading = _leading(B.values)
        buffers = workspace.enter(_core.scatter_part_bytes(rows, n, world_size, kernel.config))
        captured = True  # also where the call fails half-way
        try:
            captured = buffers.core.scaled_matmul_reduce_scatter(
                (aligned_pointer(values, kept), k, aligned_pointer(B.values, kept), leading, k),
                (_pointer(A.scale, kept), A.tile[0] == 1, _scales_of(B, kept)),
                rows,
                n,
                _core.DType.__members__[dtype_name(values.dtype, B.values.dtype)],
                kernel.accumulation,
                bias_pointer(weight.bias, kept),
                out.data_ptr(),
                is_average,
                kernel.config,
                stream_of(values.device),
            )
        except ValueError as error:
            captured = False  # nothing was enqueued
            raise workspace.refused(error) from None
        finally:
            if captured:
                workspace.captured = True
    return out
