"""``torch.ops.agmm._async_input_scaled_mm``: `_async_input_mm` of fp8 operands. The scales of A
come with its rows; the result is bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm import errors
from agmm.errors import InvalidArgument
from agmm.ops.async_input_mm import check_up
from agmm.ops.checks import check_no_backward
from agmm.ops.fp8_operands import Fp8Weights, ready_matmul_of, rows_of
from agmm.ops.kernel_epilogues import why_scaled_behind
from agmm.ops.library import define
from agmm.ops.scaled_checks import check_scaled_async_input
from agmm.planning.problems import KernelConfig
from agmm.runtime import cpu_scaled
from agmm.runtime.cuda_calls import Up
from agmm.runtime.epilogues import Epilogue, named
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
    activation: str = ""
    up: torch.Tensor | None = None
    """A second weight, for a gated activation; B is the gate."""
    scale_up: torch.Tensor | None = None
    bias_up: torch.Tensor | None = None

    @property
    def weights(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Each weight with its scale and bias."""
        found = [(self.B, self.scale_b, self.bias)]
        if self.up is not None and self.scale_up is not None:
            found.append((self.up, self.scale_up, self.bias_up))
        return found

    def check(self) -> Epilogue | None:
        epilogue = named(self.activation)
        check_up(self.up, epilogue)
        for name, tensor in (("scale_up", self.scale_up), ("bias_up", self.bias_up)):
            if tensor is not None and self.up is None:
                raise InvalidArgument(f"{name}: found one without up, wanted None")
        if self.up is not None and self.scale_up is None:
            raise InvalidArgument("scale_up: found None, wanted the scales of up")
        for B, scale_b, bias in self.weights:
            signals = self.a_chunk_signals, self.a_chunk_pivot
            check_scaled_async_input(self.A, B, self.scale_a, scale_b, bias, *signals)
        if epilogue is not None:
            epilogue.check([B for B, *_ in self.weights], torch.bfloat16)
        return epilogue


def _described(
    product: Sequence[torch.Tensor], bias: torch.Tensor | None, fast_accum: bool
) -> tuple[Scaled, Weight]:
    A, B, scale_a, scale_b = product
    given = Fp8Weights([B], [scale_b], [bias], [None], [torch.bfloat16], [fast_accum])
    tile, (weight,) = given.described(A, scale_a)
    return rows_of(A, scale_a, tile, 0), weight


def _on_cpu(call: _Arguments) -> torch.Tensor:
    epilogue = call.check()
    weights = []
    for B, scale_b, bias in call.weights:
        product = call.A, B, call.scale_a, scale_b
        operand, weight = _described(product, bias, call.use_fast_accum)
        weights.append(weight)
    signals = call.a_chunk_signals, call.a_chunk_pivot
    return cpu_scaled.async_input_mm(operand, weights, *signals, epilogue)


def _on_cuda(call: _Arguments) -> torch.Tensor:
    epilogue = call.check()
    if not call.a_chunk_signals.is_contiguous():
        raise InvalidArgument("a_chunk_signals: found a strided tensor, wanted a contiguous one")
    if call.A.shape[0] == 0 or call.B.shape[1] == 0:
        return _fake(call)
    signals = call.a_chunk_signals, call.a_chunk_pivot
    settings: dict[str, Any] = {"fast_accum": call.use_fast_accum}
    if epilogue is not None:
        operands = [
            _described((call.A, B, call.scale_a, scale_b), bias, call.use_fast_accum)
            for B, scale_b, bias in call.weights
        ]
        A, weights = operands[0][0], [weight for _, weight in operands]
        reason = why_scaled_behind(epilogue, A, weights)
        if reason is None:
            return activated_on_cuda(A, weights, *signals, epilogue)
        errors.compose(reason, strict=False)
    products = [
        on_cuda((call.A, B, call.scale_a, scale_b), *signals, bias=bias, **settings)
        for B, scale_b, bias in call.weights
    ]
    return products[0] if epilogue is None else epilogue(products)[0]


def activated_on_cuda(
    A: Scaled,
    weights: Sequence[Weight],
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    epilogue: Epilogue,
    *,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """The epilogue of a product, or of those of gate and up, by one kernel that has it
    (`why_scaled_behind`). Arguments are as those of `on_cuda`."""
    weight, last = weights[0], weights[-1]
    up = Up(last.B.values, last.bias, last.B.scale) if epilogue.is_gated else None
    second = None if up is None else up.B
    ready = ready_matmul_of(
        *(A, weight, a_chunk_signals, pivot), config=config, epilogue=epilogue, up=second
    )
    scales: dict[str, Any] = {"scale_a": A.scale, "scale_b": weight.B.scale}
    return ready(A.values, weight.B.values, a_chunk_signals, bias=weight.bias, up=up, **scales)


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
    a, b = operand.values, weight.B.values
    ready = ready_matmul_of(
        operand, weight, a_chunk_signals, pivot, config=config, sm_count=sm_count
    )
    return ready(a, b, a_chunk_signals, bias=bias, scale_a=operand.scale, scale_b=weight.B.scale)


def _fake(call: _Arguments) -> torch.Tensor:
    call.check()
    return call.A.new_empty(call.A.shape[0], call.B.shape[1], dtype=torch.bfloat16)


def _check_grad(call: _Arguments) -> None:
    names = *call._fields[:5], "up", "scale_up", "bias_up"
    check_no_backward([(name, getattr(call, name)) for name in names])


define(
    "_async_input_scaled_mm",
    _Arguments,
    "Tensor",
    run={"CPU": _on_cpu, "CUDA": _on_cuda},
    fake=_fake,
    check_grad=_check_grad,
)
