"""``torch.ops.agmm._async_input_mm``: a matmul whose rows of A come while it runs."""

from __future__ import annotations

from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_async_input, check_no_grad
from agmm.ops.library import library
from agmm.planning import legality
from agmm.runtime import cpu, cuda


def _async_input_mm_cpu(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return cpu.async_input_mm(a, b, a_chunk_signals, a_chunk_pivot)


def _async_input_mm_cuda(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    reason = (
        cuda.why_unfused(a.device)
        or legality.why_unfused(str(a.dtype).removeprefix("torch."), b.shape[1], a.shape[1])
        or cuda.why_b_unfused(b)
    )
    if reason is None and not a_chunk_signals.is_contiguous():
        reason = "a_chunk_signals: found a strided tensor, wanted a contiguous one"
    if reason is not None:
        raise InvalidArgument(reason)
    return cuda.async_input_mm(a, b, a_chunk_signals, a_chunk_pivot)


def _async_input_mm_fake(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return a.new_empty(a.shape[0], b.shape[1])


def _async_input_mm_autograd(*arguments: Any) -> torch.Tensor:
    check_no_grad(arguments[:2])
    with torch._C._AutoDispatchBelowAutograd():
        out: torch.Tensor = torch.ops.agmm._async_input_mm.default(*arguments)
    return out


library.impl("_async_input_mm", _async_input_mm_cpu, "CPU")
library.impl("_async_input_mm", _async_input_mm_cuda, "CUDA")
library.impl("_async_input_mm", _async_input_mm_fake, "Meta")
library.impl("_async_input_mm", _async_input_mm_autograd, "Autograd")
