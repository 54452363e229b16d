"""The grouped matmul kernel on CUDA: which operands it takes, and its calls. Nothing here looks at
the device, so a call can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm import _core
from agmm.planning import grouped_kernels
from agmm.runtime import capabilities, kernels
from agmm.runtime.cuda_calls import TMA_ALIGNMENT, bias_pointer
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.streams import stream_of

_FP8 = torch.float8_e4m3fn
_DTYPES = {
    torch.bfloat16: _core.DType.bfloat16,
    torch.float16: _core.DType.float16,
    _FP8: _core.DType.float8_e4m3fn_float8_e4m3fn,
}


_LEAST_TILE, _MOST_BLOCKS = 64, 2**30 - 1
"""The rows and columns of the smallest tile of `kernels.json`, and the most tiles that a kernel
counts, if wrong offsets gave every expert all rows."""


class _Layout(NamedTuple):
    """How the matrices of all experts lie: contiguous along K (column-major) or along N."""

    column_major: bool
    leading: int
    expert_stride: int


_ScalesOfWeight = tuple[int, int, int, int, int]
_ScalesOfRows = tuple[int, int, int]
_NO_SCALES: _ScalesOfWeight = (0, 0, 0, 0, 1)
_NO_SCALES_OF_ROWS: _ScalesOfRows = (0, 0, 0)


def scales_of_weight(scale: torch.Tensor, columns: int) -> _ScalesOfWeight:
    """The scales of an fp8 weight as the core takes them.

    Args:
        scale: float32 [experts, K's, N's].
        columns: how many columns a scale is of: 1, and all of K, or the size of a scale block.
    """
    by_expert, by_k, by_n = scale.stride()
    return scale.data_ptr(), by_expert, 0 if columns == 1 else by_k, by_n, columns


def scales_of_rows(scale: torch.Tensor) -> _ScalesOfRows:
    """The scales of fp8 rows, float32 [rows, K's], as the core takes them."""
    by_row, by_k = scale.stride()
    return scale.data_ptr(), by_row, by_k if scale.shape[1] > 1 else 0


class Arrival(NamedTuple):
    """How the kernel sees that rows, which are still on their way, have come. The rows of an expert
    lie by the rank that they come from."""

    arrived: torch.Tensor
    """int32 [sources, experts]: how many rows have come. They are 0 before the first one comes, and
    the caller sets them back."""
    begins: torch.Tensor
    """int32 [experts, sources]: the first row of each source."""
    first_source: int
    """The source whose rows come first, whose tiles are computed first."""
    rank: int
    """This rank, for the message of a wait that passes its limit."""


def _alignment(operand: torch.Tensor) -> int:
    """The number of elements of which strides and K are multiples."""
    return _core.FP8_ALIGNMENT if operand.dtype == _FP8 else _core.ALIGNMENT


def _layout(weight: torch.Tensor) -> _Layout | None:
    """The layout of a weight [experts, K, N], or None where the kernel does not take it."""
    alignment = _alignment(weight)
    experts, k, n = weight.shape
    of_expert, by_k, by_n = weight.stride()
    if experts == 1:
        of_expert = k * n  # of an expert that is not there
    if by_k == 1 and by_n >= k:
        found = _Layout(True, by_n, of_expert)
    elif by_n == 1 and by_k >= n:
        found = _Layout(False, by_k, of_expert)
    else:
        return None
    is_aligned = found.leading % alignment == of_expert % alignment == 0
    return found if is_aligned and of_expert > 0 else None


def config_of(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], epilogue: Epilogue | None = None
) -> _core.KernelConfig | None:
    """The kernel that multiplies rows on CUDA with a weight, or with gate and up, or None.

    Args:
        rows: [rows, K].
        weights: [experts, K, N]; two where `epilogue` is gated.
        epilogue: what the kernel makes of its sums; None for the products.
    """
    dtype, (capacity, k) = _DTYPES.get(rows.dtype), rows.shape
    experts, _, n = weights[0].shape
    if dtype is None or capabilities.why_not(capabilities.MATMULS, rows.device) is not None:
        return None
    if 0 in (capacity, k, n) or not 1 <= experts <= _core.MOST_EXPERTS:
        return None
    blocks = experts * -(-capacity // _LEAST_TILE) * -(-n // _LEAST_TILE)
    if max(capacity, k, n) > _core.MAX_SIZE or blocks > _MOST_BLOCKS:
        return None
    if k % _alignment(rows) or n % _core.ALIGNMENT or not _takes_rows(rows):
        return None
    if any(weight.data_ptr() % TMA_ALIGNMENT for weight in weights):
        return None
    if any(weight.dtype != rows.dtype for weight in weights):
        return None
    layouts = {layout and layout.column_major for layout in map(_layout, weights)}
    if None in layouts or len(layouts) > 1:
        return None
    b_layout = "column" if True in layouts else "row"
    kind = kernels.PLAIN if epilogue is None else epilogue.kernel
    return grouped_kernels.chosen(capacity, n, k, experts, dtype.name, b_layout, kind)


def _takes_rows(rows: torch.Tensor) -> bool:
    by_row, by_column = rows.stride()
    is_row_major = by_column == 1 and by_row >= rows.shape[1]
    return is_row_major and by_row % _alignment(rows) == 0 and rows.data_ptr() % TMA_ALIGNMENT == 0


class Described(NamedTuple):
    """A call of the kernel but for its rows, and its result."""

    arguments: tuple[Any, ...]
    """The kernel, dtype, layout, activation, sizes, weights and the address of the result, as the
    core takes them."""
    out: torch.Tensor
    held: list[torch.Tensor]
    """The tensors that the call reads and nobody else may hold."""


class OfRows(NamedTuple):
    """A call of the kernel with its rows."""

    call: Described
    rows: torch.Tensor
    scales: _ScalesOfRows = _NO_SCALES_OF_ROWS


def described(
    config: _core.KernelConfig,
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    epilogue: Epilogue | None,
    *,
    has_out: bool = True,
    scales: Sequence[_ScalesOfWeight] = (),
) -> Described:
    """The call of the kernel that `config_of` found for the operands.

    Args:
        has_out: False where the result has a place elsewhere; then `Described.out` is empty.
        scales: of each weight in fp8, as `scales_of_weight` says.
    """
    experts, k, n = weights[0].shape
    held: list[torch.Tensor] = []
    given, column_major = [], False
    of_each = scales or [_NO_SCALES] * len(weights)
    for weight, bias, scale in zip(weights, biases, of_each, strict=True):
        layout = _layout(weight)
        assert layout is not None
        column_major = layout.column_major
        address = bias_pointer(bias, held)
        of_matrix = layout.leading, layout.expert_stride
        given.append((weight.data_ptr(), *of_matrix, address, scale))
    dtype = torch.bfloat16 if rows.dtype == _FP8 else rows.dtype
    out = rows.new_empty(rows.shape[0] if has_out else 0, n, dtype=dtype)
    activation = "" if epilogue is None else epilogue.activation
    sizes = (rows.shape[0], n, k, experts)
    arguments = config, _DTYPES[rows.dtype], column_major, activation, sizes, given, out.data_ptr()
    return Described(arguments, out, held)


def run(
    config: _core.KernelConfig,
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    offsets: torch.Tensor,
    epilogue: Epilogue | None = None,
    *,
    sm_count: int = 0,
    arrival: Arrival | None = None,
) -> torch.Tensor:
    """The products of each expert's rows, or what a gate makes of them; zeros behind the last
    expert's rows. The operands are those for which `config_of` found the kernel.

    Args:
        biases: for each weight [experts, N] in the dtype of the rows, or None.
        offsets: [experts + 1], as in `Routing`.
        sm_count: the most CTAs of the launch; 0 for all that there is room for.
        arrival: None where all rows are there.
    """
    call = described(config, rows, weights, biases, epilogue)
    return launch(call, rows, offsets, sm_count=sm_count, arrival=arrival)


def launch(
    call: Described,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    *,
    sm_count: int = 0,
    arrival: Arrival | None = None,
    scales: _ScalesOfRows = _NO_SCALES_OF_ROWS,
) -> torch.Tensor:
    """The result of a described call.

    Args:
        offsets, sm_count, arrival: as for `run`.
        scales: of rows in fp8, as `scales_of_rows` says.
    """
    ends = _int32(offsets)
    config, dtype, column_major, activation, sizes, given, address = call.arguments
    with torch.cuda.device(rows.device):
        _core.grouped_matmul(
            config,
            dtype,
            column_major,
            activation,
            sizes,
            rows.data_ptr(),
            rows.stride(0),
            ends.data_ptr(),
            given,
            address,
            sm_count,
            stream_of(rows.device),
            None
            if arrival is None
            else (
                arrival.arrived.data_ptr(),
                arrival.begins.data_ptr(),
                arrival.begins.shape[1],
                arrival.first_source,
                arrival.rank,
            ),
            scales,
        )
    return call.out


def _int32(offsets: torch.Tensor) -> torch.Tensor:
    return offsets.to(torch.int32).contiguous()


def gated_config(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], epilogue: Epilogue | None
) -> _core.KernelConfig | None:
    """The kernel that computes both products of a gate and what it makes of them, or None."""
    if epilogue is None or not epilogue.is_gated or epilogue.saves_products:
        return None
    if weights[0].shape != weights[1].shape:
        return None
    return config_of(rows, weights, epilogue)


def gated(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    offsets: torch.Tensor,
    epilogue: Epilogue | None,
) -> torch.Tensor | None:
    """What a gate makes of the products of two weights, or None where no kernel computes both."""
    config = gated_config(rows, weights, epilogue)
    return None if config is None else run(config, rows, weights, biases, offsets, epilogue)
