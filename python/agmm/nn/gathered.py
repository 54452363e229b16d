"""The products of a gather style's linears, in the shapes that a module wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from agmm.errors import warn_once
from agmm.nn._filled import filled_shard
from agmm.nn._fp8 import gather_products
from agmm.nn._ranks import Ranks
from agmm.nn._stand_in import StandIn
from agmm.nn._targets import BY_OUTPUTS, Target, local, wanted_output
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.runtime.epilogues import GatedActivation


class SaysGather(Protocol):
    """What the products need to know of their style."""

    sequence_dim: int
    use_local_output: bool
    save_gathered: bool
    strict: bool


def gathered_products(
    targets: Sequence[Target],
    style: SaysGather,
    ranks: Ranks,
    x: torch.Tensor,
    *,
    activation: GatedActivation | None = None,
    save_preactivation: bool = True,
) -> list[torch.Tensor]:
    """What the linears of a gather style return; with an activation the one result of gate and up.
    Collective."""
    dim, is_sized = style.sequence_dim, False
    if isinstance(x, StandIn):
        if x.sequence_dim != dim % x.dim():  # A trace with dynamic shapes wants a constant.
            dim = x.sequence_dim
        is_sized, x = x.asked, x.shard
    targets[0].check_operand(x)
    operands = [target.local_parameters(BY_OUTPUTS) for target in targets]
    weights, biases = zip(*operands, strict=True)
    for target, weight in zip(targets, weights, strict=True):
        target.check_input(x, weight, dim, weight.shape[0])
    _hint_at_gathered(targets[0], ranks, x, dim)
    # The fused path gathers along dimension 0.
    shard, rows, length = local(x, Shard(dim)), None, None
    if isinstance(x, DTensor) and x.shape[dim] % ranks.size:  # Only a DTensor knows the whole.
        length = x.shape[dim]
        targets[0].fill_up(length, dim, ranks.size, style.strict)
    if is_sized and math.prod(shard.shape[:dim]) > 1:
        rows = shard.shape[:-1]
        shard = shard.flatten(0, -2).contiguous()
    else:
        shard = shard.movedim(dim, 0)
        if length is not None:
            shard = filled_shard(shard, length, ranks.size)
        shard = shard.contiguous()
    if targets[0].fp8 is not None:
        outs = gather_products(
            targets[0].fp8,
            shard,
            weights,
            biases,
            ranks.own_name,
            strict=style.strict,
            activation=activation,
        )
    else:
        found: Any = all_gather_matmul(
            shard,
            list(weights),
            ranks.for_ops,
            bias=list(biases),
            activation=activation,
            save_gathered=style.save_gathered,
            save_preactivation=save_preactivation,
            strict=style.strict,
        )
        outs = [found] if isinstance(found, torch.Tensor) else list(found)
    if rows is None:
        outs = [out[:length].movedim(0, dim) for out in outs]
    else:  # The module may call view, for which the copy is contiguous.
        parts = [out.unflatten(0, (ranks.size, *rows)) for out in outs]
        outs = [part.movedim(0, dim).flatten(dim, dim + 1) for part in parts]
    return [wanted_output(style, ranks, out, Shard(out.dim() - 1)) for out in outs]


def _hint_at_gathered(target: Target, ranks: Ranks, x: torch.Tensor, dim: int) -> None:
    """Warns of an input that was gathered before: a shard of it is about to be gathered again."""
    if not isinstance(x, DTensor) or ranks.size == 1 or torch.compiler.is_compiling():
        return
    if x.placements == (Replicate(),):
        fault = target.fault(
            f"x: found {x.placements}, wanted {(Shard(dim),)}: it was gathered before, and is "
            "gathered again; leave out the PrepareModuleInput of its module"
        )
        warn_once(str(fault))
