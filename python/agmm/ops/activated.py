"""Activations of products that are there already, with their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agmm.ops.activation_gradients import gradients
from agmm.runtime.epilogues import Epilogue


class _Activated(torch.autograd.Function):
    """The one result of a gated activation; the products are saved."""

    @staticmethod
    def forward(ctx: Any, activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return Epilogue(activation)([gate, up])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        dgate, dup = gradients(Epilogue(ctx.activation), [dout], ctx.saved_tensors)
        return None, dgate, dup


def activated(activation: str, products: Sequence[torch.Tensor]) -> torch.Tensor:
    """A gated activation of the products of gate and up, computed in float32 at least and rounded
    once. Differentiable once."""
    gate, up = products
    found: torch.Tensor = _Activated.apply(activation, gate, up)
    return found
