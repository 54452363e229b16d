"""Dynamic quantisation to fp8 by one kernel, on the GPUs that agmm has kernels for."""

from __future__ import annotations

import torch

from agmm import _core
from agmm.runtime import symmetric
from agmm.runtime.scaling import ALL, BLOCK, Tile, scale_shape
from agmm.runtime.symmetric import stream_of

_ADDRESS_MULTIPLE = 16  # bytes that a thread reads at once

_SCALE_OF = {
    (1, ALL): _core.ScaleOf.row,
    (1, BLOCK): _core.ScaleOf.block,
    (ALL, ALL): _core.ScaleOf.matrix,
}
"""By the tile of a row-major matrix."""


def quantised(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype,
    *,
    amax: torch.Tensor | None = None,
    power_of_2: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `agmm.ops.quantize.quantised` of a CUDA matrix with elements, on its current stream; None
    where there is no kernel for it, as for an ``amax`` of more than the whole matrix."""
    if not x.is_contiguous() and x.t().is_contiguous():
        found = _of_rows(x.t(), (tile[1], tile[0]), dtype, amax, power_of_2)
        return None if found is None else (found[0].t(), found[1].t())
    return _of_rows(x, tile, dtype, amax, power_of_2)


def amax_of(x: torch.Tensor) -> torch.Tensor | None:
    """The largest absolute value of a CUDA matrix with elements, float32 [1, 1]; None where there
    is no kernel for it."""
    if not x.is_contiguous():
        x = x.t()
    given = _given_dtype(x)
    if given is None:
        return None
    amax = x.new_empty(1, 1, dtype=torch.float32)
    with torch.cuda.device(x.device):
        _core.amax_of_matrix(
            x.data_ptr(), given, x.shape[0], x.shape[1], amax.data_ptr(), stream_of(x.device)
        )
    return amax


def _given_dtype(x: torch.Tensor) -> _core.QuantizedFrom | None:
    """What the kernels call the dtype of a matrix that they can read; else None."""
    given = _core.QuantizedFrom.__members__.get(str(x.dtype).removeprefix("torch."))
    if (
        given is None
        or not x.is_contiguous()
        or x.shape[1] % _core.QUANTIZE_MULTIPLE
        or x.data_ptr() % _ADDRESS_MULTIPLE
        or symmetric.why_unfused(x.device) is not None
    ):
        return None
    return given


def _of_rows(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype,
    amax: torch.Tensor | None,
    power_of_2: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    scale_of = _SCALE_OF.get(tile)
    given = _given_dtype(x)
    is_of_matrix = scale_of == _core.ScaleOf.matrix
    if scale_of is None or given is None or not (amax is None or is_of_matrix):
        return None
    values = torch.empty_like(x, dtype=dtype)
    scale = x.new_empty(scale_shape(x.shape, tile), dtype=torch.float32)
    has_amax = amax is not None
    if amax is not None:
        amax = amax.to(torch.float32)
    elif is_of_matrix:
        amax = x.new_empty(1, dtype=torch.float32)
    with torch.cuda.device(x.device):
        _core.quantize(
            x.data_ptr(),
            given,
            _core.QuantizedTo.__members__[str(dtype).removeprefix("torch.")],
            scale_of,
            x.shape[0],
            x.shape[1],
            power_of_2,
            values.data_ptr(),
            scale.data_ptr(),
            0 if amax is None else amax.data_ptr(),
            has_amax,
            stream_of(x.device),
        )
    return values, scale
