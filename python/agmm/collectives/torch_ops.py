"""The torch ops behind ``agmm.collectives``: what they do, their fakes and their backward."""

from __future__ import annotations

from typing import Any, cast

import torch

from agmm.collectives.autograd import AllGather, AllReduce, ReduceScatter
from agmm.collectives.checks import check_dim, check_op, shape_of_result
from agmm.collectives.run import start
from agmm.ops.library import library
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import groups


def _impl(
    kind: Kind,
    x: torch.Tensor,
    group_name: str,
    world_size: int,
    op: str,
    dim: int,
    strict: bool = False,
    low_contention: bool = False,
) -> torch.Tensor:
    group = groups.group_of_size(group_name, world_size)
    found = start(
        kind, x, group, op, dim, None, async_op=False, strict=strict, low_contention=low_contention
    )
    return cast(torch.Tensor, found)


def _fake(
    kind: Kind, x: torch.Tensor, group_name: str, world_size: int, op: str, dim: int, *_: bool
) -> torch.Tensor:
    del group_name
    dim = check_dim(x, dim)
    check_op(op, x)
    return x.new_empty(shape_of_result(kind, x, world_size, dim))


def _kernel_of(kind: Kind, function: Any) -> Any:
    """``function`` with the arguments of the kind's op: those that mean something to it. The
    dispatcher leaves out the last ones that have their default."""
    if kind == "all_gather":
        return lambda x, name, size, *rest: function(kind, x, name, size, "sum", *rest)
    if kind == "all_reduce":
        return lambda x, name, size, op, *rest: function(kind, x, name, size, op, 0, *rest)
    return lambda *given: function(kind, *given)


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
"""The ops by kind."""

_FUNCTIONS: dict[Kind, Any] = {
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_reduce": AllReduce,
}
for _kind, _function in _FUNCTIONS.items():
    OPS[_kind] = getattr(torch.ops.agmm, f"_{_kind}").default
    for _key in ("CPU", "CUDA"):
        library.impl(f"_{_kind}", _kernel_of(_kind, _impl), _key)
    library.impl(f"_{_kind}", _kernel_of(_kind, _fake), "Meta")
    library.impl(f"_{_kind}", _autograd_of(OPS[_kind], _function), "Autograd")
