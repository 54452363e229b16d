"""``torch.ops.agmm._async_input_scaled_mm``: `_async_input_mm` of fp8 operands. The scales of A
come with its rows; the result is bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from agmm.errors import InvalidArgument
from agmm.ops import fp8_operands
from agmm.ops.checks import check_no_backward
from agmm.ops.fp8_operands import Fp8Weights, rows_of
from agmm.ops.library import define
from agmm.ops.scaled_checks import check_scaled_async_input
from agmm.planning import call_plans, heuristics
from agmm.planning.problems import KernelConfig
from agmm.runtime import cpu_scaled, cuda_calls, cuda_scaled
from agmm.runtime.scaled import Scaled, Weight


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A: torch.Tensor
    B: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    a_chunk_signals: torch.Tensor
    a_chunk_pivot: int
    use_fast_accum: bool

    def check(self) -> None:
        check_scaled_async_input(*self[:7])


def _described(
    product: Sequence[torch.Tensor], bias: torch.Tensor | None, fast_accum: bool
) -> tuple[Scaled, Weight]:
    A, B, scale_a, scale_b = product
    given = Fp8Weights([B], [scale_b], [bias], [None], [torch.bfloat16], [fast_accum])
    tile, (weight,) = given.described(A, scale_a)
    return rows_of(A, scale_a, tile, 0), weight


def _on_cpu(call: _Arguments) -> torch.Tensor:
    call.check()
    operand, weight = _described(call[:4], call.bias, call.use_fast_accum)
    return cpu_scaled.async_input_mm(operand, weight, call.a_chunk_signals, call.a_chunk_pivot)


def _on_cuda(call: _Arguments) -> torch.Tensor:
    call.check()
    if not call.a_chunk_signals.is_contiguous():
        raise InvalidArgument("a_chunk_signals: found a strided tensor, wanted a contiguous one")
    if call.A.shape[0] == 0 or call.B.shape[1] == 0:
        return _fake(call)
    return on_cuda(
        *(call[:4], call.a_chunk_signals, call.a_chunk_pivot),
        bias=call.bias,
        fast_accum=call.use_fast_accum,
    )


def on_cuda(
    product: Sequence[torch.Tensor],
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    *,
    bias: torch.Tensor | None = None,
    fast_accum: bool = True,
    config: KernelConfig | None = None,
    sm_count: int = 0,
) -> torch.Tensor:
    """The product in bfloat16, each row chunk of A and its scales once its signal is 1.

    Args:
        product: A, B, scale_a and scale_b.
        a_chunk_signals, pivot, bias, sm_count: as those of `ready_matmul` and `ReadyMatmul`.
        config: the kernel; None for the planner's.

    Raises:
        InvalidArgument: the kernel cannot take the operands; the message says why.
    """
    operand, weight = _described(product, bias, fast_accum)
    A = operand.values
    reason = fp8_operands.why_no_kernel(A.device) or cuda_scaled.why_illegal(operand, weight)
    if reason is not None:
        raise InvalidArgument(reason)
    if config is not None:
        accumulation = cuda_scaled.accumulation_of(operand, weight)
        assert accumulation is not None  # else it is illegal
        kernel = cuda_scaled.kernel_of(operand, weight, config.core, accumulation)
    else:
        problem = fp8_operands.problem_of(operand, weight, A.shape[0])
        if isinstance(problem, str):
            raise InvalidArgument(problem)
        if sm_count:
            problem = replace(problem, sm_count=sm_count)
        chosen = call_plans.planner(None, A.device).fused_plan(problem).kernel
        assert chosen is not None
        chunks = 1 if a_chunk_signals is None else a_chunk_signals.shape[0]
        chosen = heuristics.across_chunks(problem, chosen, chunks)
        kernel = fp8_operands.kernel_of(operand, weight, problem, chosen)
    a, b = A, weight.B.values
    ready = cuda_calls.ready_matmul(a, b, a_chunk_signals, pivot, kernel, sm_count=sm_count)
    return ready(a, b, a_chunk_signals, bias=bias, scale_a=operand.scale, scale_b=weight.B.scale)


def _fake(call: _Arguments) -> torch.Tensor:
    call.check()
    return call.A.new_empty(call.A.shape[0], call.B.shape[1], dtype=torch.bfloat16)


def _check_grad(call: _Arguments) -> None:
    check_no_backward([(name, getattr(call, name)) for name in call._fields[:5]])


define(
    "_async_input_scaled_mm",
    _Arguments,
    "Tensor",
    run={"CPU": _on_cpu, "CUDA": _on_cuda},
    fake=_fake,
    check_grad=_check_grad,
)
