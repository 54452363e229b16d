"""The torch ops behind ``agmm.collectives``: what they do, their fakes and their backward."""

from __future__ import annotations

from typing import Any, cast

import torch

from agmm.collectives.autograd import AllGather, AllReduce, ReduceScatter
from agmm.collectives.checks import check_dim, check_op, shape_of_result
from agmm.collectives.run import Settings, start
from agmm.ops.library import library
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import groups

_SETTINGS: dict[Kind, tuple[str, ...]] = {
    "all_gather": ("dim",),
    "reduce_scatter": ("op", "dim"),
    "all_reduce": ("op",),
}
"""The settings that each kind's op takes between the world size and ``strict``."""


def arguments_of(kind: Kind, settings: Settings) -> tuple[Any, ...]:
    """What the kind's op takes behind the world size. The last ones are left out where they have
    their default, as the dispatcher does."""
    last = (settings.low_contention,) if settings.low_contention else ()
    return *(getattr(settings, name) for name in _SETTINGS[kind]), settings.strict, *last


def _settings_of(kind: Kind, given: tuple[Any, ...]) -> Settings:
    """The settings of a call of the kind's op; the reverse of `arguments_of`."""
    names = (*_SETTINGS[kind], "strict", "low_contention")
    return Settings(**{"op": "sum", "dim": 0, **dict(zip(names, given, strict=False))})


def _impl_of(kind: Kind) -> Any:
    def kernel(x: torch.Tensor, group_name: str, world_size: int, *given: Any) -> torch.Tensor:
        group = groups.group_of_size(group_name, world_size)
        return cast(torch.Tensor, start(kind, x, group, None, _settings_of(kind, given)))

    return kernel


def _fake_of(kind: Kind) -> Any:
    def kernel(x: torch.Tensor, group_name: str, world_size: int, *given: Any) -> torch.Tensor:
        settings = _settings_of(kind, given)
        check_op(settings.op, x)
        return x.new_empty(shape_of_result(kind, x, world_size, check_dim(x, settings.dim)))

    return kernel


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
        library.impl(f"_{_kind}", _impl_of(_kind), _key)
    library.impl(f"_{_kind}", _fake_of(_kind), "Meta")
    library.impl(f"_{_kind}", _autograd_of(OPS[_kind], _function), "Autograd")
