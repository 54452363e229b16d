"""What a caller's tensors are: cast under autocast, plain memory or not, seen by the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.profiler as profiler

from agmm.ops.checks import check_operand

_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Types whose tensors stand for nothing but their memory."""


def check_operands(A_shard: Any, Bs: Sequence[Any], biases: Sequence[torch.Tensor | None]) -> None:
    check_operand("A_shard", A_shard)
    for B in Bs:
        check_operand("B", B)
    for bias in biases:
        if bias is not None:
            check_operand("bias", bias)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a call without the dispatcher computes what the tensor stands for."""
    return (
        type(tensor) in PLAIN_TYPES
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (tensor.is_neg() or tensor.is_meta or tensor._is_zerotensor())
        and tensor.layout == torch.strided
    )


_transforms = torch._C._functorch.peek_interpreter_stack


def is_watched() -> bool:
    """Whether the dispatcher has to see the call: compilation, traces, fake tensors, other modes,
    transforms of torch.func, forward-mode derivatives, and profilers, which name ops."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or _transforms() is not None
    )


_T = TypeVar("_T", bound=tuple[torch.Tensor | None, ...])


def autocast(tensors: _T, device: torch.device) -> _T:
    """The tensors as ``torch.nn.functional.linear`` would take them: cast where autocast is on."""
    kind = device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast_one(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dtype not in _AUTOCAST_DTYPES:
            return tensor
        return tensor.to(dtype)

    return cast(_T, tuple(cast_one(tensor) for tensor in tensors))
