"""The torch ops of `all_gather_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm.ops.autograd import AllGatherMatmul
from agmm.ops.checks import check_gatherable, needs_gradient
from agmm.ops.gather import GatherSettings
from agmm.ops.library import define, library
from agmm.ops.operands import check_operands, is_plain, is_watched
from agmm.ops.plain_gather import gather
from agmm.runtime.epilogues import Epilogue, named
from agmm.runtime.groups import group_of, group_of_size, world_size_of


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A_shard: torch.Tensor
    Bs: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    group_name: str
    world_size: int
    gather_dim: int
    return_A: bool
    config: str
    strict: bool
    save_gathered: bool = False
    """Whether the backward uses the gathered A; the forward has no use for it."""
    prefer_fused: bool = False
    activation: str = ""
    save_preactivation: bool = False
    """Whether the products with their biases are results too, behind those that the activation
    makes of them."""

    @property
    def epilogue(self) -> Epilogue | None:
        return named(self.activation, saves_products=self.save_preactivation)


def _impl(call: _Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of_size(call.group_name, call.world_size)
    settings = GatherSettings(
        *(call.gather_dim, call.return_A, call.config, call.strict, call.prefer_fused),
        epilogue=call.epilogue,
    )
    A, _, outs = gather(call.A_shard, call.Bs, call.biases, group, settings)
    return (call.A_shard.new_empty(0) if A is None else A), outs


def _fake(call: _Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    A_shard, dim = call.A_shard, call.gather_dim
    check_gatherable(A_shard, call.Bs, call.biases, dim, call.world_size)
    epilogue, columns = call.epilogue, [B.shape[1] for B in call.Bs]
    if epilogue is not None:
        epilogue.check(call.Bs, A_shard.dtype)
        columns = epilogue.outs(columns)
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * call.world_size
    A = A_shard.new_empty(shape if call.return_A else 0)
    return A, [A_shard.new_empty(*shape[:-1], n) for n in columns]


def _autograd(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    given = A_shard, *Bs, *biases
    if needs_gradient(*given):
        A, *outs = AllGatherMatmul.apply(len(Bs), settings, *given)
        return A, outs
    with torch._C._AutoDispatchBelowAutograd():
        A, outs = torch.ops.agmm._all_gather_matmul.default(A_shard, Bs, biases, *settings)
    return A, outs


def dispatched(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group_name: str,
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A call that the dispatcher sees."""
    check_operands(A_shard, Bs, biases)
    world_size = world_size_of(group_name)
    A, outs = torch.ops.agmm._all_gather_matmul.default(
        A_shard, list(Bs), list(biases), group_name, world_size, *settings
    )
    return A, outs


def _native(
    A_shard: torch.Tensor, B: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_watched() or not (is_plain(A_shard) and is_plain(B)):
        A, outs = dispatched(A_shard, [B], [None], group_name, 0, True, "", False, False, True)
        return A, outs[0]
    whole, _, outs = gather(A_shard, [B], [None], group_of(group_name), _NATIVE)
    assert whole is not None
    return whole, outs[0]


_NATIVE = GatherSettings(return_A=True, prefer_fused=True)
"""The settings of torch's own op."""


define("_all_gather_matmul", _Arguments, "(Tensor A, Tensor[] outs)", run=_impl, fake=_fake)
library.impl("_all_gather_matmul", _autograd, "Autograd")
# It is a composite, so that what is traced is the op above, with the world size.
library.impl("_fused_all_gather_matmul_native", _native, "CompositeImplicitAutograd")
