"""Gradients of parameters that are whole on each rank, and of which each computes a part: they are
summed over the ranks in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from agmm.collectives import all_reduce
from agmm.nn._ranks import Ranks
from agmm.ops.checks import needs_gradient

_Group = dist.ProcessGroup | str


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = [grad.numel() for grad in grads]
        joint = all_reduce(torch.cat([grad.flatten() for grad in grads]), ctx.group)
        return None, *(
            shard.view_as(grad) for shard, grad in zip(joint.split(sizes), grads, strict=True)
        )


def with_summed_gradients(
    parameters: Iterable[torch.Tensor], ranks: Ranks
) -> tuple[torch.Tensor, ...]:
    """The parameters for what sees some of the rows: the gradients that it gives to them are summed
    over the ranks."""
    given = tuple(parameters)
    if not needs_gradient(*given):
        return given
    found: tuple[torch.Tensor, ...] = _SummedGradients.apply(ranks.for_ops, *given)
    return found


@contextmanager
def summed_gradients(module: torch.nn.Module, ranks: Ranks) -> Iterator[None]:
    """What runs inside sees some of the rows: the gradients that it gives to the module's own
    parameters are summed over the ranks."""
    given = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if needs_gradient(parameter)
    }
    if not given:
        yield
        return
    own: dict[str, Any] = module._parameters
    own.update(zip(given, with_summed_gradients(given.values(), ranks), strict=True))
    try:
        yield
    finally:
        own.update(given)
