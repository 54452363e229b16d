"""A rank's own product that is batch-invariant: see `ops.invariant`. It is torch's
``torch.nn.functional.linear`` in layers that send nothing before or behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from agmm import _env
from agmm.errors import warn_once
from agmm.ops import invariant
from agmm.ops.checks import needs_gradient
from agmm.ops.copying import Copying
from agmm.ops.library import library
from agmm.runtime import cpu_scatter, cuda_calls
from agmm.runtime.results import reshaped

_Maybe = torch.Tensor | None

_MOST_KEPT = 256
"""The most calls that are kept ready. A decode step of 80 layers, whose weights have some 8 shapes,
has as many calls for 32 numbers of rows."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    """``torch.nn.functional.linear``, whose rows are batch-invariant where AGMM_BATCH_INVARIANT
    asks for it."""
    if not invariant.is_asked(None):
        return torch.nn.functional.linear(x, weight, bias)
    return matmul(x, weight.t(), bias)


def matmul(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    """``A @ B (+ bias)``, batch-invariant. Differentiable; nothing is promised of gradients.

    Args:
        A: [..., K].
        B: [K, N], row-major or column-major, of the dtype of A.
        bias: [N] or None.
    """
    found: torch.Tensor = torch.ops.agmm._invariant_matmul.default(A, B, bias)
    return found


def why_not_invariant(A: torch.Tensor) -> str | None:
    """The reason why agmm has no batch-invariant product of such operands, or None."""
    if A.is_floating_point():
        return None
    return f"A: dtype={A.dtype}, a batch-invariant product wants a floating-point type"


def why_not_streamed(As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor]) -> str | None:
    """The reason why no streaming kernel multiplies one of these pairs on a GPU, or None."""
    reasons = (invariant.why_not_streamed(A, B) for A, B in zip(As, Bs, strict=True))
    return next(filter(None, reasons), None)


def product_on_gpu(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """``A @ B`` by a streaming kernel, or by the library in blocks of rows. A is [..., K]."""
    rows = A.reshape(-1, A.shape[-1]).contiguous()
    ready = _ready_for(rows, B)
    out = invariant.in_blocks(rows, B) if isinstance(ready, str) else ready(rows, B, None)
    return reshaped(out, [*A.shape[:-1], B.shape[1]])


class _Ready(NamedTuple):
    """A product by a streaming kernel, of operands of one kind."""

    call: cuda_calls.ReadyMatmul
    copying: Copying | None

    def __call__(self, A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
        weight = B if self.copying is None else self.copying.weight(B)
        return self.call(A, weight, None, bias=bias)


_ready: dict[Any, _Ready] = {}
"""Products that were made before, by the kinds of their operands."""


def _ready_for(A: torch.Tensor, B: torch.Tensor) -> _Ready | str:
    """What multiplies operands like these, which are on a GPU, by a streaming kernel, or the reason
    why there is none."""
    kind = A.shape, A.dtype, A.device, B.shape, B.stride()
    known = _ready.get(kind)
    if known is not None:
        return known
    reason = invariant.why_not_streamed(A, B)
    if reason is not None:
        return reason
    copying = Copying.of([A], [B], 0)
    weight = B if copying is None else copying.weight(B)
    kernel = invariant.kernel_of(A, weight)
    assert kernel is not None
    of_core = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A", A))
    if len(_ready) >= _MOST_KEPT:
        _ready.clear()
    found = _ready[kind] = _Ready(cuda_calls.ready_matmul(A, weight, None, 0, of_core), copying)
    return found


def _on_cpu(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    summands = cpu_scatter.plain_sum([A], [B], bias, invariant=True).summands(len(A))
    out = A.new_empty(len(A), B.shape[1])
    summands.sum(summands.product(slice(0, len(A))), [], 0, 1, bias, out)
    return out


def _on_cuda(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    ready = _ready_for(A, B)
    if not isinstance(ready, str):
        return ready(A, B, bias)
    warn_once(f"agmm multiplies blocks of rows by the library: {ready}")
    out = invariant.in_blocks(A, B)
    return out if bias is None else out.add_(bias)


def _impl(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    reason = why_not_invariant(A)
    if reason is not None:
        warn_once(f"{_env.BATCH_INVARIANT.name}: found on, but torch multiplies: {reason}")
    if reason is not None or 0 in (A.numel(), B.numel()) or A.dtype != B.dtype:
        return torch.nn.functional.linear(A, B.t(), bias)  # which refuses other dtypes
    product = _on_cuda if A.is_cuda else _on_cpu
    rows = product(A.reshape(-1, A.shape[-1]).contiguous(), B, bias)
    return reshaped(rows, [*A.shape[:-1], B.shape[1]])


def _fake(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    return A.new_empty(*A.shape[:-1], B.shape[1])


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
        needs_A, needs_B, _ = ctx.needs_input_grad
        ctx.save_for_backward(A if needs_B else None, B if needs_A else None)
        with torch._C._AutoDispatchBelowAutograd():
            return matmul(A, B, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[_Maybe, ...]:
        A, B = ctx.saved_tensors
        rows = dout.flatten(0, -2)
        dA = None if B is None else dout @ B.t()
        dB = None if A is None else (rows.t() @ A.flatten(0, -2)).t()
        return dA, dB, rows.sum(0) if ctx.needs_input_grad[2] else None


def _autograd(A: torch.Tensor, B: torch.Tensor, bias: _Maybe) -> torch.Tensor:
    if needs_gradient(A, B, bias):
        found: torch.Tensor = _Matmul.apply(A, B, bias)
        return found
    with torch._C._AutoDispatchBelowAutograd():
        return matmul(A, B, bias)


library.define("_invariant_matmul(Tensor A, Tensor B, Tensor? bias) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl("_invariant_matmul", _impl, _key)
library.impl("_invariant_matmul", _fake, "Meta")
library.impl("_invariant_matmul", _autograd, "Autograd")
