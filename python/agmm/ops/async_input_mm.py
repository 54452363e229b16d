"""``torch.ops.agmm._async_input_mm``: a matmul whose rows of A come while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmm import errors
from agmm.errors import InvalidArgument
from agmm.ops.checks import check_async_input, check_no_grad, check_same
from agmm.ops.kept import kind_of
from agmm.ops.kernel_epilogues import why_behind
from agmm.ops.library import library
from agmm.planning import call_plans, heuristics, legality
from agmm.planning.problems import PLAIN, KernelConfig
from agmm.runtime import cpu_async_input, cuda_calls, symmetric
from agmm.runtime.epilogues import Epilogue, named


def _weights(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor,
    pivot: int,
    activation: str,
    up: torch.Tensor | None,
) -> tuple[list[torch.Tensor], Epilogue | None]:
    """The weights of a call that is checked here, and what becomes of their products."""
    bs = [b] if up is None else [b, up]
    check_async_input(a, b, a_chunk_signals, pivot)
    epilogue = named(activation)
    check_up(up, epilogue)
    if epilogue is not None:
        epilogue.check(bs, a.dtype)
    if up is not None:
        check_same("up", up, "a", a)
    return bs, epilogue


def check_up(up: torch.Tensor | None, epilogue: Epilogue | None) -> None:
    """Refuses a second weight that no gated activation has a use for."""
    if up is not None and not (epilogue and epilogue.is_gated):
        found = None if epilogue is None else epilogue.activation
        raise InvalidArgument(f"up: found one with activation {found!r}, wanted a gated activation")


def _async_input_mm_cpu(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor,
    a_chunk_pivot: int,
    activation: str = "",
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    bs, epilogue = _weights(a, b, a_chunk_signals, a_chunk_pivot, activation, up)
    return cpu_async_input.async_input_mm(a, bs, a_chunk_signals, a_chunk_pivot, epilogue)


_ready: dict[Any, cuda_calls.ReadyMatmul] = {}
"""Calls on CUDA that were found to be legal, by the kinds of their tensors and their pivot."""

_MAX_CALLS = 4096  # of a process


def _async_input_mm_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor,
    a_chunk_pivot: int,
    activation: str = "",
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    key: tuple[Any, ...] = (
        *(*kind_of(a), *kind_of(b), *kind_of(a_chunk_signals), a_chunk_pivot),
        *((activation, up is not None and kind_of(up)) if activation or up is not None else ()),
    )
    call = _ready.get(key)
    if call is None:
        given = a, b, a_chunk_signals, a_chunk_pivot
        if 0 in (*a.shape[:1], *b.shape[1:]):  # which are not checked yet
            return _async_input_mm_fake(*given, activation, up)
        bs, epilogue = _weights(*given, activation, up)
        reason = None if epilogue is None else why_behind(epilogue, bs)
        if epilogue is not None and reason is not None:
            errors.compose(reason, strict=False)
            (out,) = epilogue([_async_input_mm_cuda(a, one, *given[2:]) for one in bs])
            return out
        call = _checked_on_cuda(*given, epilogue, up)
        if len(_ready) >= _MAX_CALLS:
            _ready.clear()
        _ready[key] = call
    return call(a, b, a_chunk_signals, up=None if up is None else cuda_calls.Up(up))


def why_no_kernel(a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor) -> str | None:
    """The reason why no kernel can compute a checked call on CUDA, or None."""
    dtype = str(a.dtype).removeprefix("torch.")
    reason = (
        symmetric.why_unfused(a.device)
        or legality.why_unfused(dtype, b.shape[1], a.shape[1], a="a", b="b")
        or cuda_calls.why_b_unfused(b, "b")
    )
    if reason is None and not a_chunk_signals.is_contiguous():
        reason = "a_chunk_signals: found a strided tensor, wanted a contiguous one"
    return reason


def _checked_on_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor,
    a_chunk_pivot: int,
    epilogue: Epilogue | None,
    up: torch.Tensor | None,
) -> cuda_calls.ReadyMatmul:
    """The call for operands that are checked, but for what a kernel wants of them."""
    reason = why_no_kernel(a, b, a_chunk_signals)
    if reason is None and up is not None:
        reason = cuda_calls.why_b_unfused(up, "up")
    if reason is not None:
        raise InvalidArgument(reason)
    kernel = _kernel(a, b, a_chunk_signals, epilogue=epilogue)
    return cuda_calls.ready_matmul(a, b, a_chunk_signals, a_chunk_pivot, kernel, up=up)


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    config: KernelConfig | None = None,
    epilogue: Epilogue | None = None,
) -> cuda_calls.Kernel:
    """The kernel of ``config``, or the planner's where that is None."""
    chosen = _planned(a, b, a_chunk_signals, epilogue) if config is None else config
    activation = "" if epilogue is None else epilogue.activation
    return cuda_calls.Kernel(chosen.core, cuda_calls.plain_format("a", a), activation)


def _planned(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    epilogue: Epilogue | None,
) -> KernelConfig:
    (m, k), n = a.shape, b.shape[1]
    problem = call_plans.problem_of(
        (m, 2 * n if epilogue is not None and epilogue.is_gated else n, k),
        a.dtype,
        a.device,
        column_major=b.stride(0) == 1,
        epilogue=PLAIN if epilogue is None else epilogue.kernel,
    )
    kernel = call_plans.planner(None, a.device).fused_plan(problem).kernel
    assert kernel is not None
    chunks = 1 if a_chunk_signals is None else a_chunk_signals.shape[0]
    return heuristics.across_chunks(problem, kernel, chunks)


def on_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    *,
    config: KernelConfig | None = None,
    bias: torch.Tensor | None = None,
    tile_times: torch.Tensor | None = None,
    sm_count: int = 0,
) -> torch.Tensor:
    """``a @ b (+ bias)``, each row chunk of ``a`` once its signal is 1. Arguments are as those of
    `ready_matmul` and `ReadyMatmul`; the kernel is the planner's where ``config`` is None.

    Raises:
        InvalidArgument: the kernel cannot take the operands; the message says why.
    """
    kernel = _kernel(a, b, a_chunk_signals, config)
    call = cuda_calls.ready_matmul(a, b, a_chunk_signals, pivot, kernel, sm_count=sm_count)
    return call(a, b, a_chunk_signals, bias=bias, tile_times=tile_times)


def activated_on_cuda(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    epilogue: Epilogue,
    *,
    config: KernelConfig | None = None,
    biases: Sequence[torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """The epilogue of ``a @ b + bias`` for one weight, of a gated activation for two, by one
    kernel. Arguments are as those of `on_cuda`.

    Raises:
        InvalidArgument: no kernel can take the operands; the message says why.
    """
    reason = why_behind(epilogue, bs, config)
    if reason is not None:
        raise InvalidArgument(reason)
    b, *more = bs
    up = more[0] if more else None
    kernel = _kernel(a, b, a_chunk_signals, config, epilogue)
    call = cuda_calls.ready_matmul(a, b, a_chunk_signals, pivot, kernel, up=up)
    second = None if up is None else cuda_calls.Up(up, biases[1])
    return call(a, b, a_chunk_signals, bias=biases[0], up=second)


def _async_input_mm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor,
    a_chunk_pivot: int,
    activation: str = "",
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    _weights(a, b, a_chunk_signals, a_chunk_pivot, activation, up)
    return a.new_empty(a.shape[0], b.shape[1])


def _async_input_mm_autograd(*arguments: Any) -> torch.Tensor:
    check_no_grad((*arguments[:2], *arguments[5:]))
    with torch._C._AutoDispatchBelowAutograd():
        out: torch.Tensor = torch.ops.agmm._async_input_mm.default(*arguments)
    return out


library.impl("_async_input_mm", _async_input_mm_cpu, "CPU")
library.impl("_async_input_mm", _async_input_mm_cuda, "CUDA")
library.impl("_async_input_mm", _async_input_mm_fake, "Meta")
library.impl("_async_input_mm", _async_input_mm_autograd, "Autograd")
