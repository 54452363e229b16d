"""Gradients through activations by a kernel, on the GPUs that agmm has it for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime import capabilities
from agmm.runtime.cuda_quantize import ADDRESS_MULTIPLE, SCALE_OF
from agmm.runtime.scaling import ALL, BLOCK, Tile, scale_shape
from agmm.runtime.streams import stream_of

_Quantised = tuple[torch.Tensor, torch.Tensor]


class Cast(NamedTuple):
    """How both gradients are quantised, as one matrix."""

    tile: Tile
    dtype: torch.dtype
    power_of_2: bool


def gradients(
    activation: str, dout: torch.Tensor, products: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """The gradient of each product [..., N] of one result, on the current stream of its CUDA
    device; None where there is no kernel for it."""
    if not all(_is_readable(one, dout) for one in (dout, *products)):
        return None
    found = [dout.new_empty(dout.shape) for _ in products]
    _enqueue(activation, [dout, *products, *found], None)
    return found


def joint_gradients(
    activation: str, dout: torch.Tensor, products: Sequence[torch.Tensor], cast: Cast | None
) -> tuple[torch.Tensor, _Quantised | None] | None:
    """The gradients of the products of gate and up [..., N] side by side, [..., 2 N], and, as
    matrices, what `agmm.ops.quantize.quantised` makes of them, where one kernel can do that too;
    None where there is no kernel."""
    n = dout.shape[-1]
    if not all(_is_readable(one, dout) for one in (dout, *products)):
        return None
    joint = dout.new_empty(*dout.shape[:-1], 2 * n)
    quantised = None
    if cast is not None and _is_quantised(cast.tile, n):
        rows = joint.flatten(0, -2)
        values = torch.empty_like(rows, dtype=cast.dtype)
        scale = rows.new_empty(scale_shape(rows.shape, cast.tile), dtype=torch.float32)
        quantised = values, scale
    _enqueue(activation, [dout, *products, *joint.split(n, -1)], quantised, cast)
    return joint, quantised


def _is_quantised(tile: Tile, n: int) -> bool:
    """Whether a kernel knows the scales of both gradients of N columns when it writes them."""
    if tile == (1, ALL):
        return n <= _core.MOST_QUANTIZED_COLUMNS
    return tile == (1, BLOCK) and n % BLOCK == 0


def _is_readable(x: torch.Tensor, like: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and (x.dtype, x.shape, x.device) == (like.dtype, like.shape, like.device)
        and x.numel() > 0
        and x.dim() > 1
        and x.stride(-1) == 1
        and x.shape[-1] % _core.GRADIENT_MULTIPLE == 0
        and _row_stride(x) is not None
        and x.data_ptr() % ADDRESS_MULTIPLE == 0
        and capabilities.why_not(capabilities.GRADIENTS, x.device) is None
    )


def _row_stride(x: torch.Tensor) -> int | None:
    """The elements from one row [N] of x [..., N] to the next, where it is the same for all rows
    and a kernel can read at it; else None."""
    if x.shape[:-1].numel() == 1:
        return x.shape[-1]
    sizes_and_strides = [
        (size, stride)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        if size > 1
    ]
    _, found = sizes_and_strides[-1]
    wanted = found
    for size, stride in reversed(sizes_and_strides):
        if stride != wanted:
            return None
        wanted *= size
    return found if found >= x.shape[-1] and not found % _core.GRADIENT_MULTIPLE else None


def _enqueue(
    activation: str,
    matrices: Sequence[torch.Tensor],
    quantised: _Quantised | None,
    cast: Cast | None = None,
) -> None:
    out = matrices[0]
    given = None
    if quantised is not None and cast is not None:
        to = _core.QuantizedTo.__members__[str(cast.dtype).removeprefix("torch.")]
        values, scale = quantised
        of_scale = SCALE_OF[cast.tile]
        given = to, of_scale, cast.power_of_2, values.data_ptr(), scale.data_ptr()
    with torch.cuda.device(out.device):
        _core.activation_gradient(
            activation,
            _core.DType.__members__[str(out.dtype).removeprefix("torch.")],
            out.shape[:-1].numel(),
            out.shape[-1],
            [(one.data_ptr(), _row_stride(one) or 0) for one in matrices],
            given,
            stream_of(out.device),
        )
