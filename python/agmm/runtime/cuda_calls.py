"""What the core wants to know of tensors on CUDA, and the matmul of one kind of operands, ready to
be called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.epilogues import GATED
from agmm.runtime.scaling import BLOCK
from agmm.runtime.streams import stream_of

TMA_ALIGNMENT = 16  # of the address that a TMA descriptor takes
SCALE_BYTES = 4  # float32
_PAIR_BYTES = 2 * SCALE_BYTES  # of neighbouring columns, which a kernel reads together

_FORMATS = {
    torch.bfloat16: _core.Format(_core.DType.bfloat16),
    torch.float16: _core.Format(_core.DType.float16),
}


def plain_format(name: str, tensor: torch.Tensor) -> _core.Format:
    """The format of operands that need no scales, by the dtype of an argument.

    Raises:
        InvalidArgument: the kernels have no such element type.
    """
    found = _FORMATS.get(tensor.dtype)
    if found is None:
        names = " or ".join(str(dtype) for dtype in _FORMATS)
        raise InvalidArgument(f"{name}: found dtype {tensor.dtype}, wanted {names}")
    return found


class Kernel(NamedTuple):
    """One kernel of the core, and the format of its operands."""

    config: _core.KernelConfig
    format: _core.Format
    activation: str = ""
    """What the kernel makes of its sums, by the name in `epilogues.ACTIVATIONS`; a gated one has
    two weights."""
    quantize_out: str = ""
    """The kind of the scales of a gate's result in fp8, or nothing."""

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        if self.quantize_out:
            return torch.float8_e4m3fn
        is_half = self.format.dtype == _core.DType.float16
        return torch.float16 if is_half else torch.bfloat16

    @property
    def b_scale_alignment(self) -> int:
        """The alignment in bytes of the scales of B, which are contiguous; 0 where a kernel reads
        them with any strides."""
        return 0 if self.format.accumulation == _core.Accumulation.block else _PAIR_BYTES


class Layout(NamedTuple):
    column_major: bool
    leading: int


def b_layout(b: torch.Tensor) -> Layout | None:
    """Whether b is row-major or column-major, and its leading dimension; None where it is
    neither."""
    rows, columns = b.stride()
    if rows == 1 and columns >= b.shape[0]:
        return Layout(True, columns)
    if columns == 1 and rows >= b.shape[1]:
        return Layout(False, rows)
    # A direction of length 1 may have any stride.
    if b.shape[1] == 1:
        return Layout(True, b.shape[0]) if rows == 1 else None
    if b.shape[0] == 1:
        return Layout(False, b.shape[1]) if columns == 1 else None
    return None


def aligned_pointer(tensor: torch.Tensor, copies: list[torch.Tensor]) -> int:
    """The tensor's address, or that of a copy in ``copies`` where it is not as TMA wants it.

    It is copied rather than left to another path: addresses differ between ranks, and the path must
    not.
    """
    address = tensor.data_ptr()
    if address % TMA_ALIGNMENT != 0:
        # The copy has the same strides, which the call names; clone() closes gaps.
        tensor = tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        copies.append(tensor)
        address = tensor.data_ptr()
    return address


def bias_pointer(bias: torch.Tensor | None, copies: list[torch.Tensor]) -> int:
    """The address of a bias, or of a residual, or that of a contiguous, aligned copy in ``copies``;
    0 where there is none."""
    if bias is None:
        return 0
    if not bias.is_contiguous():
        bias = bias.contiguous()
        copies.append(bias)
    return aligned_pointer(bias, copies)


class Up(NamedTuple):
    """The second weight of a gate."""

    B: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    """The scales of an fp8 weight."""


def up_pointers(
    up: Up | None, scale: torch.Tensor | None, alignment: int, copies: list[torch.Tensor]
) -> tuple[int, int, int]:
    """The addresses of a second weight, its bias and its scales, as the core wants them behind the
    others.

    Args:
        scale: the first weight's, which the second one's lie as.
        alignment: that of both, as `scale_pointer` takes it.
    """
    assert up is not None  # a gate has two weights
    of_up = 0
    if up.scale is not None and scale is not None:
        found = up.scale
        if not alignment and found.stride() != scale.stride():
            found = found.new_empty_strided(scale.shape, scale.stride()).copy_(found)
            copies.append(found)
        of_up = scale_pointer(found, alignment, copies)
    return aligned_pointer(up.B, copies), bias_pointer(up.bias, copies), of_up


class OutScales(NamedTuple):
    """The scales of a result in fp8."""

    written: torch.Tensor
    """The scales of the values, float32, which the kernel writes."""
    given: torch.Tensor | None
    """The one that a tensor-wise result is wanted with."""

    @classmethod
    def of(cls, like: torch.Tensor, shape: Sequence[int], given: torch.Tensor | None) -> OutScales:
        """The scales of a result [..., N] of that shape, on the GPU of a tensor."""
        wanted = (*shape[:-1], -(-shape[-1] // BLOCK)) if given is None else (1, 1)
        return cls(like.new_empty(wanted, dtype=torch.float32), given)

    @property
    def pointers(self) -> tuple[int, int]:
        given = self.given
        return self.written.data_ptr(), 0 if given is None else given.data_ptr()


def up_leading(up: torch.Tensor | None) -> int:
    """The leading dimension of a second weight; 0 where there is none."""
    layout = None if up is None else b_layout(up)
    return 0 if layout is None else layout.leading


def scale_pointer(scale: torch.Tensor, alignment: int, copies: list[torch.Tensor]) -> int:
    """The address of scales that a kernel reads as they lie, or that of a copy in ``copies`` where
    they are not contiguous at multiples of ``alignment`` bytes; 0: they may lie anyhow. Scales that
    come while a kernel runs must not be copied."""
    if alignment and (not scale.is_contiguous() or scale.data_ptr() % alignment):
        scale = scale.clone(memory_format=torch.contiguous_format)
        copies.append(scale)
    return scale.data_ptr()


def why_b_unfused(b: torch.Tensor, name: str = "B") -> str | None:
    """The reason why the kernels cannot read a weight in its layout, or None. ``name`` is what the
    op calls it."""
    layout = b_layout(b)
    if layout is None:
        return f"{name}: found strides {tuple(b.stride())}, wanted row-major or column-major"
    if layout.leading % _core.ALIGNMENT != 0:
        return (
            f"{name}: found leading dimension {layout.leading}, wanted a multiple of "
            f"{_core.ALIGNMENT}"
        )
    return None


# Both are None in a torch without CUDA.
_current_gpu = getattr(torch._C, "_cuda_getDevice", None)
_empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def is_on_current_gpu(tensor: torch.Tensor) -> bool:
    return _current_gpu is not None and _current_gpu() == tensor.get_device()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def new_on_gpu(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """An empty tensor on the same GPU. It is allocated by what code of torch.compile allocates
    with, which takes half the time of ``new_empty``, where the GPU is the current one."""
    if _empty_on_current_gpu is None or not is_on_current_gpu(tensor):
        return tensor.new_empty_strided(shape, stride, dtype=dtype)
    out: torch.Tensor = _empty_on_current_gpu(shape, stride, dtype)
    return out


class ReadyMatmul(NamedTuple):
    """``a @ b (+ bias)`` of operands of one kind, which was checked: it is ready to be made any
    number of times."""

    problem: _core.MatmulProblem
    out_shape: tuple[int, int]
    out_dtype: torch.dtype
    b_scale_alignment: int
    needs_scratch: bool
    is_gated: bool = False

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_chunk_signals: torch.Tensor | None,
        *,
        bias: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        tile_times: torch.Tensor | None = None,
        up: Up | None = None,
        out_scales: OutScales | None = None,
    ) -> torch.Tensor:
        """Multiply each row chunk of ``a``, and its scales, once its signal is 1.

        Args:
            a: [M, K], row-major and contiguous; with signals, at a multiple of 16 bytes.
            b: [K, N], row-major or column-major.
            a_chunk_signals: uint32 [chunks] or [chunks, chunks_k], contiguous; None: all is ready.
            bias: [N] in the dtype of the result, or None.
            scale_a, scale_b: float32, of fp8 operands; with signals, ``scale_a`` is contiguous.
            tile_times: uint8, where the kernel records when each tile waited and ran (timed
                kernels).
            up: the second weight of a gate.
            out_scales: of a gate whose result is fp8.

        Raises:
            InvalidArgument: the kernel cannot take the operands; the message says why.
        """
        problem, out_shape, dtype, b_scale_alignment, needs_scratch, is_gated = self
        out = new_on_gpu(a, out_shape, (out_shape[1], 1), dtype)
        if 0 in out_shape:
            return out
        if a_chunk_signals is not None:  # a copy would be made before the chunks have come
            check_awaited(a, scale_a)
        copies: list[torch.Tensor] = []  # they live until the call is enqueued
        with nullcontext() if is_on_current_gpu(a) else torch.cuda.device(a.device):
            scratch = _split_scratch(a.device) if needs_scratch else None
            try:
                addresses = (
                    aligned_pointer(a, copies),
                    aligned_pointer(b, copies),
                    0 if scale_a is None else scale_pointer(scale_a, SCALE_BYTES, copies),
                    0 if scale_b is None else scale_pointer(scale_b, b_scale_alignment, copies),
                    bias_pointer(bias, copies),
                    out.data_ptr(),
                    0 if a_chunk_signals is None else a_chunk_signals.data_ptr(),
                    *(up_pointers(up, scale_b, b_scale_alignment, copies) if is_gated else ()),
                    *(() if out_scales is None else out_scales.pointers),
                )
                _core.async_input_mm(
                    problem,
                    addresses,
                    stream_of(a.device),
                    0 if tile_times is None else tile_times.data_ptr(),
                    0 if scratch is None else scratch.data_ptr(),
                    bool(copies),  # one of them may be the weight's
                )
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
        return out


def check_awaited(a: torch.Tensor, scale_a: torch.Tensor | None) -> None:
    """Checks that the operands in which chunks arrive lie as the kernels read them."""
    address = a.data_ptr()
    if address % TMA_ALIGNMENT != 0:
        name = "a" if scale_a is None else "A"
        raise InvalidArgument(
            f"{name}: found address {address:#x}, wanted a multiple of {TMA_ALIGNMENT} bytes"
        )
    if scale_a is not None and not scale_a.is_contiguous():
        raise InvalidArgument(
            f"scale_a: found strides {tuple(scale_a.stride())}, wanted contiguous ones"
        )


def ready_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    kernel: Kernel,
    *,
    sm_count: int = 0,
    up: torch.Tensor | None = None,
) -> ReadyMatmul:
    """The call for operands of this kind.

    Args:
        a, b, a_chunk_signals: as `ReadyMatmul` takes them.
        pivot: the first row chunk to compute, where they are computed one after the other.
        sm_count: CTAs at most; 0: as many as there are multiprocessors. Fewer are launched where
            they take no longer.
        up: the second weight of a gate, in the layout of ``b``.

    Raises:
        InvalidArgument: ``b`` is neither row-major nor column-major.
    """
    m, k = a.shape
    layout = b_layout(b)
    if layout is None:
        raise InvalidArgument(
            f"b: found strides {tuple(b.stride())}, wanted row-major or column-major"
        )
    chunks = () if a_chunk_signals is None else a_chunk_signals.shape
    chunks_m, chunks_k = (*chunks, 1, 1)[:2]
    config = kernel.config
    return ReadyMatmul(
        _core.MatmulProblem(
            (m, b.shape[1], k),
            layout,
            kernel.format,
            config,
            chunks=(chunks_m, chunks_k, pivot),
            rank=dist.get_rank() if dist.is_initialized() else 0,
            sm_count=sm_count,
            activation=kernel.activation,
            up_leading=up_leading(up),
            quantizes=bool(kernel.quantize_out),
        ),
        (m, b.shape[1]),
        kernel.out_dtype,
        kernel.b_scale_alignment,
        config.splits > 1 and not config.splits_in_cluster,
        kernel.is_gated,
    )


_MOST_SCRATCHES = 8
_scratches: dict[tuple[int, int], torch.Tensor] = {}
"""The scratch memory by device and id of the stream; calls of a stream come one after the other and
leave the counters 0. Only the streams used last have one."""


def _split_scratch(device: torch.device) -> torch.Tensor:
    """The scratch memory for one call at a time that splits K in global memory, on the current
    stream."""
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed on another stream
        return _new_split_scratch(device)
    key = device.index, _core.stream_id(stream_of(device))
    scratch = _scratches.pop(key, None)
    if scratch is None:
        scratch = _new_split_scratch(device)
    _scratches[key] = scratch
    if len(_scratches) > _MOST_SCRATCHES:
        _scratches.pop(next(iter(_scratches)), None)
    return scratch


def _new_split_scratch(device: torch.device) -> torch.Tensor:
    scratch = torch.empty(_core.split_scratch_bytes(), dtype=torch.uint8, device=device)
    scratch[: _core.SPLIT_COUNTER_BYTES].zero_()
    return scratch
