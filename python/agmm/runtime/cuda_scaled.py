"""Chooses the CUDA kernels for fp8 operands, and tells the core of their scales."""

from __future__ import annotations

import torch

from agmm import _core
from agmm._core import Accumulation
from agmm.runtime.cuda_calls import Kernel, b_layout
from agmm.runtime.scaled import Scaled, Weight
from agmm.runtime.scaling import ALL, BLOCK, Tile


def dtype_name(a: torch.dtype, b: torch.dtype) -> str:
    """The name of a pair of dtypes in `_core.DType`."""
    return "_".join(str(dtype).removeprefix("torch.") for dtype in (a, b))


def accumulation_of(A: Scaled, weight: Weight) -> Accumulation | None:
    """The accumulation that the scales of a product want; where they leave a choice, `fast_accum`
    decides. None where no kernel has such scales."""
    return accumulation_of_tiles(A.tile, weight.B.tile, fast=weight.fast_accum)


def accumulation_of_tiles(a: Tile, b: Tile, *, fast: bool) -> Accumulation | None:
    """The accumulation for scales that cover these tiles of A and B; ``fast`` decides where they
    leave a choice. None where no kernel has such scales."""
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


def kernel_of(
    A: Scaled, weight: Weight, config: _core.KernelConfig, accumulation: Accumulation
) -> Kernel:
    """The kernel with the format of a product of which `why_illegal` finds nothing. Block scales
    may have any strides; others are contiguous, since a call copies those that are not."""
    B = weight.B
    strides = B.scale.shape[-1] if B.scale.dim() else 1, 1
    if B.tile == (BLOCK, BLOCK):
        strides = B.scale.stride(0), B.scale.stride(1)
    scales = _core.ScaleLayout(
        a_per_row=A.tile[0] == 1,
        a_columns=1 if A.tile[1] == ALL else A.scale.shape[-1],
        b_per_column=B.tile[1] == 1,
        b_k_stride=strides[0],
        b_n_stride=strides[1],
    )
    dtype = _core.DType.__members__[dtype_name(A.values.dtype, B.values.dtype)]
    return Kernel(config, _core.Format(dtype, accumulation, scales))
