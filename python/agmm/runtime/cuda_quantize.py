"""Dynamic quantisation to fp8 by kernels, on the GPUs that agmm has them for."""

from __future__ import annotations

import torch

from agmm import _core
from agmm.runtime import capabilities
from agmm.runtime.scaling import ALL, BLOCK, Tile, scale_shape
from agmm.runtime.streams import stream_of

ADDRESS_MULTIPLE = 16  # bytes that a thread reads at once

SCALE_OF = {
    (1, ALL): _core.ScaleOf.row,
    (1, BLOCK): _core.ScaleOf.block,
    (ALL, ALL): _core.ScaleOf.matrix,
    (ALL, 1): _core.ScaleOf.column,
    (BLOCK, BLOCK): _core.ScaleOf.square,
}
"""What the kernels call the tile that a scale of a row-major matrix covers."""


def quantised(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype,
    *,
    amax: torch.Tensor | None = None,
    power_of_2: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `agmm.ops.quantize.quantised` returns, for a CUDA matrix with elements, on its
    current stream; None where there is no kernel for it, such as for an ``amax`` of rows or
    blocks."""
    if not x.is_contiguous() and x.t().is_contiguous():
        amax = None if amax is None else amax.t()
        found = _of_rows(x.t(), (tile[1], tile[0]), dtype, amax, power_of_2)
        return None if found is None else (found[0].t(), found[1].t())
    return _of_rows(x, tile, dtype, amax, power_of_2)


def quantised_columns(
    x: torch.Tensor, dtype: torch.dtype, *, amax: torch.Tensor | None = None, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what `agmm.ops.quantize.quantised_columns` returns, for a contiguous CUDA matrix with
    a scale for each column; None where there is no kernel for it."""
    return _of_rows(x, (ALL, 1), dtype, amax, power_of_2, transposed=True)


def transposed(values: torch.Tensor) -> torch.Tensor | None:
    """Return what `agmm.ops.quantize.transposed` returns, for a contiguous CUDA matrix of fp8 with
    elements; None where there is no kernel for it."""
    if not _is_readable(values):
        return None
    m, features = values.shape
    found = values.new_empty(features, _filled_up(m))
    with torch.cuda.device(values.device):
        _core.transpose_bytes(
            values.data_ptr(),
            m,
            features,
            found.data_ptr(),
            found.shape[1],
            stream_of(values.device),
        )
    return found


def amax_of(x: torch.Tensor, tile: Tile = (ALL, ALL)) -> torch.Tensor | None:
    """The largest absolute values of the tiles of a CUDA matrix with elements, float32; None where
    there is no kernel for it. There is one for the whole matrix, and for the columns of a
    contiguous one."""
    if tile == (ALL, ALL) and not x.is_contiguous():
        x = x.t()
    given = _given_dtype(x)
    if given is None or tile not in _WITH_AMAX:
        return None
    amax = x.new_empty(scale_shape(x.shape, tile), dtype=torch.float32)
    with torch.cuda.device(x.device):
        _core.find_amax(
            x.data_ptr(),
            given,
            SCALE_OF[tile],
            x.shape[0],
            x.shape[1],
            amax.data_ptr(),
            stream_of(x.device),
        )
    return amax


_WITH_AMAX = ((ALL, ALL), (ALL, 1))
"""The tiles whose largest value is searched for before anything is quantised."""


def _filled_up(rows: int) -> int:
    return -(-rows // _core.QUANTIZE_MULTIPLE) * _core.QUANTIZE_MULTIPLE


def _is_readable(x: torch.Tensor) -> bool:
    return (
        capabilities.why_not(capabilities.QUANTISERS, x.device) is None
        and x.is_contiguous()
        and x.shape[1] % _core.QUANTIZE_MULTIPLE == 0
        and x.data_ptr() % ADDRESS_MULTIPLE == 0
    )


def _given_dtype(x: torch.Tensor) -> _core.QuantizedFrom | None:
    """The kernels' name for the dtype of a matrix that they can read; else None."""
    given = _core.QuantizedFrom.__members__.get(str(x.dtype).removeprefix("torch."))
    return given if given is not None and _is_readable(x) else None


def _of_rows(
    x: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype,
    amax: torch.Tensor | None,
    power_of_2: bool,
    *,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    scale_of = SCALE_OF.get(tile)
    given = _given_dtype(x)
    if scale_of is None or given is None or not (amax is None or tile in _WITH_AMAX):
        return None
    leading = _filled_up(x.shape[0]) if transposed else 0
    if transposed:
        values = x.new_empty(x.shape[1], leading, dtype=dtype)
    else:
        values = torch.empty_like(x, dtype=dtype)
    scale = x.new_empty(scale_shape(x.shape, tile), dtype=torch.float32)
    has_amax = amax is not None
    if amax is not None:
        amax = amax.to(torch.float32).contiguous()
    elif tile in _WITH_AMAX:
        amax = torch.empty_like(scale)
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
            leading,
            scale.data_ptr(),
            0 if amax is None else amax.data_ptr(),
            has_amax,
            stream_of(x.device),
        )
    return values, scale
