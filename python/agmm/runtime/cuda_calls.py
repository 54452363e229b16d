"""Planned calls of the CUDA kernels: what the core wants to know of tensors, and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.results import reshaped
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import enqueue

TMA_ALIGNMENT = 16  # of the address that a TMA descriptor takes


_CORE_DTYPES = {torch.bfloat16: _core.DType.bfloat16, torch.float16: _core.DType.float16}


def core_dtype(name: str, tensor: torch.Tensor) -> _core.DType:
    """What the kernels call the dtype of an argument.

    Raises:
        InvalidArgument: they have no such element type.
    """
    found = _CORE_DTYPES.get(tensor.dtype)
    if found is None:
        names = " or ".join(str(dtype) for dtype in _CORE_DTYPES)
        raise InvalidArgument(f"{name}: found dtype {tensor.dtype}, wanted {names}")
    return found


class Layout(NamedTuple):
    column_major: bool
    leading: int


def b_layout(b: torch.Tensor) -> Layout | None:
    """Row-major or column-major with its leading dimension; None where B is neither."""
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


def aligned_pointer(tensor: torch.Tensor, kept: list[torch.Tensor]) -> int:
    """The tensor's address, or that of a copy in ``kept`` where it is not as TMA wants it.

    A copy, not another path: addresses differ between ranks, and the path must not.
    """
    address = tensor.data_ptr()
    if address % TMA_ALIGNMENT != 0:
        # With the same strides, which the call names; clone() closes gaps.
        tensor = tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)
        kept.append(tensor)
        address = tensor.data_ptr()
    return address


def bias_pointer(bias: torch.Tensor | None, kept: list[torch.Tensor]) -> int:
    """The same of a bias, contiguous; 0 where there is none."""
    if bias is None:
        return 0
    if not bias.is_contiguous():
        bias = bias.contiguous()
        kept.append(bias)
    return aligned_pointer(bias, kept)


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


# None in a torch without CUDA.
_current_gpu = getattr(torch._C, "_cuda_getDevice", None)
_empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def is_on_current_gpu(tensor: torch.Tensor) -> bool:
    return _current_gpu is not None and _current_gpu() == tensor.get_device()


def new_on_gpu(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """An empty tensor of the same dtype and GPU. By what code of torch.compile allocates with,
    which takes half the time of ``new_empty``, where the GPU is the current one."""
    if _empty_on_current_gpu is None or not is_on_current_gpu(tensor):
        return tensor.new_empty_strided(shape, stride)
    out: torch.Tensor = _empty_on_current_gpu(shape, stride, tensor.dtype)
    return out


class ReadyMatmul(NamedTuple):
    """``a @ b (+ bias)`` of operands whose kind was checked, any number of times: what the core
    wants to know of the kind."""

    m: int
    n: int
    k: int
    dtype: _core.DType
    layout: Layout
    chunks_m: int
    chunks_k: int
    config: _core.KernelConfig

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_chunk_signals: torch.Tensor | None,
        pivot: int,
        *,
        bias: torch.Tensor | None = None,
        tile_times: torch.Tensor | None = None,
        sm_count: int = 0,
    ) -> torch.Tensor:
        """See `async_input_mm`."""
        m, n, k, dtype, layout, chunks_m, chunks_k, config = self
        out = new_on_gpu(a, (m, n), (n, 1))
        if m == 0:
            return out
        kept: list[torch.Tensor] = []  # copies live until the call is enqueued
        signals = 0
        if a_chunk_signals is not None:
            signals = a_chunk_signals.data_ptr()
            address = a.data_ptr()
            if address % TMA_ALIGNMENT != 0:  # a copy would be made before the chunks have come
                raise InvalidArgument(
                    f"a: found address {address:#x}, wanted a multiple of {TMA_ALIGNMENT} bytes"
                )
        needs_scratch = config.splits > 1 and not config.splits_in_cluster
        with nullcontext() if is_on_current_gpu(a) else torch.cuda.device(a.device):
            scratch = _split_scratch(a.device) if needs_scratch else None
            try:
                _core.async_input_mm(
                    aligned_pointer(a, kept),
                    aligned_pointer(b, kept),
                    out.data_ptr(),
                    bias_pointer(bias, kept),
                    m,
                    n,
                    k,
                    dtype,
                    layout.column_major,
                    layout.leading,
                    signals,
                    chunks_m,
                    chunks_k,
                    pivot,
                    config,
                    dist.get_rank() if dist.is_initialized() else 0,
                    sm_count,
                    0 if tile_times is None else tile_times.data_ptr(),
                    0 if scratch is None else scratch.data_ptr(),
                    stream_of(a.device),
                )
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
        return out


def ready_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    config: _core.KernelConfig,
) -> ReadyMatmul:
    """The call for operands of this kind; for what is given and raised see `async_input_mm`."""
    m, k = a.shape
    layout = b_layout(b)
    if layout is None:
        raise InvalidArgument(
            f"b: found strides {tuple(b.stride())}, wanted row-major or column-major"
        )
    chunks = () if a_chunk_signals is None else a_chunk_signals.shape
    chunks_m, chunks_k = (*chunks, 1, 1)[:2]
    return ReadyMatmul(m, b.shape[1], k, core_dtype("a", a), layout, chunks_m, chunks_k, config)


def async_input_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    *,
    config: _core.KernelConfig,
    bias: torch.Tensor | None = None,
    tile_times: torch.Tensor | None = None,
    sm_count: int = 0,
) -> torch.Tensor:
    """``a @ b (+ bias)``, each row chunk of ``a`` once its signal is 1.

    Args:
        a: [M, K] bf16 or fp16, row-major and contiguous; with signals, at a multiple of 16 bytes.
        b: [K, N] of the same dtype, row-major or column-major.
        a_chunk_signals: uint32 [chunks] or [chunks, chunks_k], contiguous; None: all is ready.
        pivot: the first row chunk to compute, where they are computed one after the other.
        config: the kernel.
        bias: [N], or None.
        tile_times: uint8, where the kernel records when each tile waited and ran (timed kernels).
        sm_count: CTAs at most; 0: as many as there are multiprocessors. Fewer are launched where
            they take no longer.

    Raises:
        InvalidArgument: the kernel cannot take the operands; the message says why.
    """
    call = ready_matmul(a, b, a_chunk_signals, config)
    return call(a, b, a_chunk_signals, pivot, bias=bias, tile_times=tile_times, sm_count=sm_count)


_MOST_SCRATCHES = 8
_scratches: dict[tuple[int, int], torch.Tensor] = {}
"""By device and id of the stream, whose calls come one after the other and leave the counters 0. Of
the streams used last."""


def _split_scratch(device: torch.device) -> torch.Tensor:
    """What calls that split K in global memory need, for one call at a time. On the current
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


class Weight(NamedTuple):
    leading: int
    column_major: bool
    n: int
    out_shape: tuple[int, ...]
    config: _core.KernelConfig


class FusedCall(NamedTuple):
    """A call that is ready to be made any number of times with tensors of the same kind."""

    workspace: CudaWorkspace
    rows: int
    k: int
    dtype: _core.DType
    slot_bytes: int
    transport: tuple[int, int, int, int, int]
    gathered_shape: tuple[int, ...] | None
    weights: tuple[Weight, ...]

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        tile_times: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather and multiply. Collective.

        Args:
            A_shard, Bs: as given to `agmm.ops.prepare.prepare`.
            biases: for each weight a bias [N] or None.
            tile_times: uint8, see `async_input_mm`; of the first weight's tiles.

        Returns:
            A or None, and out [world_size * M_local, ..., N] for each weight.

        Raises:
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
        """
        workspace, rows, k, dtype, slot_bytes, transport, gathered_shape, weights = self
        if workspace.world_size == 1:
            outs = [
                async_input_mm(A_shard.view(rows, k), B, None, 0, config=w.config, bias=bias)
                for w, B, bias in zip(weights, Bs, biases, strict=True)
            ]
            outs = [reshaped(out, w.out_shape) for w, out in zip(weights, outs, strict=True)]
            return (None if gathered_shape is None else A_shard.clone()), outs
        with workspace.lock:
            workspace.known.calls += 1
            A = None if gathered_shape is None else A_shard.new_empty(gathered_shape)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            outs = []
            arguments = []
            for w, B, bias in zip(weights, Bs, biases, strict=True):
                out = A_shard.new_empty(w.out_shape)
                outs.append(out)
                arguments.append(
                    (
                        aligned_pointer(B, kept),
                        w.leading,
                        w.column_major,
                        w.n,
                        bias_pointer(bias, kept),
                        out.data_ptr(),
                        w.config,
                    )
                )
            enqueue(
                workspace,
                slot_bytes,
                "all_gather_matmul",
                aligned_pointer(A_shard, kept),
                rows,
                k,
                dtype,
                arguments,
                transport,
                0 if A is None else A.data_ptr(),
                0 if tile_times is None else tile_times.data_ptr(),
                stream_of(A_shard.device),
            )
        return A, outs
