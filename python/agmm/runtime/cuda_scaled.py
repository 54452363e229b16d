"""Calls of the CUDA kernels for fp8 operands, with bfloat16 results."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm._core import Accumulation
from agmm.errors import InvalidArgument
from agmm.runtime.cuda_calls import aligned_pointer, b_layout, bias_pointer
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, BLOCK, Tile
from agmm.runtime.streams import stream_of

SCALE_BYTES = 4  # float32
_PAIR_BYTES = 2 * SCALE_BYTES  # of neighbouring columns, which a kernel reads together


class Kernel(NamedTuple):
    config: _core.KernelConfig
    accumulation: Accumulation


def dtype_name(a: torch.dtype, b: torch.dtype) -> str:
    """What `_core.DType` calls the pair."""
    return "_".join(str(dtype).removeprefix("torch.") for dtype in (a, b))


def core_dtype(a: torch.Tensor, b: torch.Tensor) -> _core.DType:
    """That of a product of such tensors."""
    return _core.DType.__members__[dtype_name(a.dtype, b.dtype)]


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
        return f"scale_b: found tiles of {B.tile} beside {A.tile} of A, wanted one kind of both"
    if weight.out_dtype != torch.bfloat16:
        return f"out_dtype: found {weight.out_dtype}, wanted torch.bfloat16"
    if weight.result_scale is not None:
        return "result_scale: found one, wanted None: the kernels scale no result"
    if bias is not None and bias.dtype != torch.bfloat16:
        return f"bias: found dtype {bias.dtype}, wanted torch.bfloat16"
    n = B.values.shape[1]
    if n < 1:
        return "B: found N=0, wanted at least 1"
    if n % _core.ALIGNMENT != 0:
        return f"B: found N={n}, wanted a multiple of {_core.ALIGNMENT} (16-byte TMA alignment)"
    layout = b_layout(B.values)
    if layout is None or not layout.column_major:
        found = tuple(B.values.stride())
        return f"B: found strides {found}, wanted column-major (weight.t())"
    if layout.leading % _core.FP8_ALIGNMENT != 0:
        return (
            f"B: found leading dimension {layout.leading}, wanted a multiple of "
            f"{_core.FP8_ALIGNMENT}"
        )
    return None


def leading(B: torch.Tensor) -> int:
    """The leading dimension of a weight of which `why_illegal` finds nothing."""
    layout = b_layout(B)
    assert layout is not None
    return layout.leading


def scales_of(
    scale: torch.Tensor, tile: Tile, kept: list[torch.Tensor]
) -> tuple[int, bool, int, int]:
    """Those of B as the core takes them. Blocks of columns may have any strides, other scales are
    copied where they are not contiguous."""
    if tile == (BLOCK, BLOCK):
        return scale.data_ptr(), False, scale.stride(0), scale.stride(1)
    columns = scale.shape[-1] if scale.dim() else 1
    return scale_pointer(scale, kept, _PAIR_BYTES), tile[1] == 1, columns, 1


def scale_pointer(
    scale: torch.Tensor, kept: list[torch.Tensor], alignment: int = SCALE_BYTES
) -> int:
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
                (scale_pointer(A.scale, kept), A.tile[0] == 1, scales_of(B.scale, B.tile, kept)),
                m,
                n,
                k,
                core_dtype(values, B.values),
                kernel.accumulation,
                leading(B.values),
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
