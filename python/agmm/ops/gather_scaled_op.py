"""The torch op of ``agmm.all_gather_scaled_matmul``, and its calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.ops import kept
from agmm.ops.checks import check_no_backward
from agmm.ops.fp8_gather import Fp8Gather
from agmm.ops.fp8_operands import Fp8Weights
from agmm.ops.gather import Gathered, GatherSettings
from agmm.ops.library import define
from agmm.ops.operands import is_watched
from agmm.ops.pipeline import serve
from agmm.ops.scaled_checks import check_scaled_gather, scalings_of
from agmm.runtime import groups
from agmm.runtime.epilogues import named
from agmm.runtime.scaling import ALL

_Given = tuple[
    torch.Tensor,
    torch.Tensor,
    list[torch.Tensor],
    list[torch.Tensor],
    list[torch.Tensor | None],
    list[torch.Tensor | None],
]


class _Settings(NamedTuple):
    """What the op takes behind the group."""

    gather_dim: int
    return_A: bool
    out_dtype: torch.dtype
    use_fast_accum: bool
    strict: bool
    quantize: str = ""
    """The kind of the scales where an ``all_gather_matmul`` has made them."""
    config: str = ""
    activation: str = ""


class _Arguments(NamedTuple):
    """The arguments of the torch op: operands, group and the fields of `_Settings`."""

    A_shard: torch.Tensor
    scale_a: torch.Tensor
    Bs: list[torch.Tensor]
    scale_bs: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    result_scales: list[torch.Tensor | None]
    group_name: str
    world_size: int
    gather_dim: int
    return_A: bool
    out_dtype: torch.dtype
    use_fast_accum: bool
    strict: bool = False
    quantize: str = ""
    config: str = ""
    activation: str = ""


def _impl(call: _Arguments) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    group = groups.group_of_size(call.group_name, call.world_size)
    given, settings = call[:6], _Settings(*call[8:])
    A, scale_A, outs = _run(kept.kind_of_call(settings, *given), given, group, settings)
    if A is None or scale_A is None:
        A, scale_A = _no_A(call.A_shard)
    return A, scale_A, outs


def _no_A(A_shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is returned in place of A and its scales. Both tensors are fp8: torch's estimates of
    time want results with one dtype, not counting those of 8 bits."""
    return A_shard.new_empty(0), A_shard.new_empty(0)


def _run(kind: Any, given: _Given, group: dist.ProcessGroup, settings: _Settings) -> Gathered:
    """Gather and multiply by a kept call, or as `serve` decides."""
    A_shard, scale_a, Bs, scale_bs, biases, result_scales = given
    found = kept.call_kept(group, kind, A_shard, Bs, biases, scale_a, scale_bs)
    if found is not None:
        return Gathered(*found)
    count = len(Bs)
    weights = Fp8Weights(
        *(Bs, scale_bs, biases, result_scales),
        *([settings.out_dtype] * count, [settings.use_fast_accum] * count),
    )
    of_gather = GatherSettings(
        *(settings.gather_dim, settings.return_A, settings.config, settings.strict),
        epilogue=named(settings.activation),
    )
    return serve(Fp8Gather(A_shard, scale_a, weights, group, of_gather, settings.quantize), kind)


def _fake(call: _Arguments) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    A_shard, scale_a, Bs, scale_bs, *_ = call
    check_scaled_gather(*call[:6], [call.out_dtype] * len(Bs), call.gather_dim)
    shape = list(A_shard.shape)
    shape[call.gather_dim] = shape[call.gather_dim] * call.world_size
    epilogue, columns = named(call.activation), [B.shape[1] for B in Bs]
    if epilogue is not None:
        epilogue.check(Bs, call.out_dtype)
        columns = epilogue.outs(columns)
    outs = [A_shard.new_empty(*shape[:-1], n, dtype=call.out_dtype) for n in columns]
    if not call.return_A:
        return *_no_A(A_shard), outs
    if scalings_of(A_shard, scale_a, Bs, scale_bs, call.quantize)[0].a[0] == ALL:
        scale_A = scale_a.new_empty(call.world_size, 1)
    else:
        scale_A = scale_a.new_empty(*shape[:-1], scale_a.shape[-1])
    return A_shard.new_empty(shape), scale_A, outs


def _check_grad(call: _Arguments) -> None:
    given: list[tuple[str, torch.Tensor | None]]
    given = [("A_shard", call.A_shard), ("scale_a", call.scale_a)]
    given += [("B", B) for B in call.Bs] + [("scale_b", scale) for scale in call.scale_bs]
    given += [("bias", bias) for bias in call.biases]
    check_no_backward(given + [("result_scale", scale) for scale in call.result_scales])


define(
    "_all_gather_scaled_matmul",
    _Arguments,
    "(Tensor A, Tensor scale_A, Tensor[] outs)",
    run=_impl,
    fake=_fake,
    check_grad=_check_grad,
)


def gather(
    given: _Given, group: dist.ProcessGroup | DeviceMesh | str | None, *settings: Any
) -> Gathered:
    """Gather and multiply. Collective.

    Args:
        settings: the fields of `_Settings`, in order.
    """
    known = _Settings(*settings)
    kind = None
    if known.gather_dim == 0 and not is_watched():
        kind = kept.kind_of_call(known, *given)
    if kind is not None:
        return _run(kind, given, groups.resolved(group), known)
    # The check comes before the op's schema, which refuses what is no tensor in its own words.
    check_scaled_gather(*given, [known.out_dtype] * len(given[2]), known.gather_dim)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    op = torch.ops.agmm._all_gather_scaled_matmul.default
    return Gathered(*op(*given, group_name, world_size, *known))
