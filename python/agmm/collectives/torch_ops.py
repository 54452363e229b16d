"""The torch ops behind ``agmm.collectives``: what they do, their fakes and their backward."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from agmm.collectives.autograd import AllGather, AllReduce, ReduceScatter
from agmm.collectives.checks import check_dim, check_op, shape_of_result
from agmm.collectives.run import start
from agmm.ops.library import library
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import groups


def _at_once(
    kind: Kind,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    op: str,
    dim: int,
    strict: bool,
    low_contention: bool = False,
) -> torch.Tensor:
    found = start(
        kind, x, group, op, dim, None, async_op=False, strict=strict, low_contention=low_contention
    )
    return cast(torch.Tensor, found)


def _all_gather_impl(
    x: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    return _at_once("all_gather", x, group, "sum", dim, strict, low_contention)


def _reduce_scatter_impl(
    x: torch.Tensor,
    group_name: str,
    world_size: int,
    op: str,
    dim: int,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    return _at_once("reduce_scatter", x, group, op, dim, strict, low_contention)


def _all_reduce_impl(
    x: torch.Tensor, group_name: str, world_size: int, op: str, strict: bool = False
) -> torch.Tensor:
    return _at_once("all_reduce", x, groups.group_of_size(group_name, world_size), op, 0, strict)


def _all_gather_fake(
    x: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor:
    dim = check_dim(x, dim)
    return x.new_empty(shape_of_result("all_gather", x, world_size, dim))


def _reduce_scatter_fake(
    x: torch.Tensor,
    group_name: str,
    world_size: int,
    op: str,
    dim: int,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor:
    dim = check_dim(x, dim)
    check_op(op, x)
    return x.new_empty(shape_of_result("reduce_scatter", x, world_size, dim))


def _all_reduce_fake(
    x: torch.Tensor, group_name: str, world_size: int, op: str, strict: bool = False
) -> torch.Tensor:
    check_op(op, x)
    return x.new_empty(x.shape)


def _autograd_of(op: Any, function: Any) -> Any:
    def kernel(x: torch.Tensor, *settings: Any) -> torch.Tensor:
        out: torch.Tensor
        if torch.is_grad_enabled() and x.requires_grad:
            out = function.apply(x, *settings)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out = op(x, *settings)
        return out

    return kernel


OPS: dict[Kind, Any] = {}
"""By kind."""

_KINDS: tuple[tuple[Kind, Any, Any, Any], ...] = (
    ("all_gather", _all_gather_impl, _all_gather_fake, AllGather),
    ("reduce_scatter", _reduce_scatter_impl, _reduce_scatter_fake, ReduceScatter),
    ("all_reduce", _all_reduce_impl, _all_reduce_fake, AllReduce),
)
for _kind, _impl, _fake, _function in _KINDS:
    for _key in ("CPU", "CUDA"):
        library.impl(f"_{_kind}", _impl, _key)
    library.impl(f"_{_kind}", _fake, "Meta")
    OPS[_kind] = getattr(torch.ops.agmm, f"_{_kind}").default
    library.impl(f"_{_kind}", _autograd_of(OPS[_kind], _function), "Autograd")
